"""What the server's processes share: exit statuses, and not outliving the supervisor."""

from __future__ import annotations

import os
import signal
import threading
import time

EXIT_CONFIGURATION = 2
EXIT_CANNOT_LISTEN = 3
_LOOK_SECONDS = 1.0


def end_with_parent(parent: int | None = None) -> None:
    """Ends this process, as SIGTERM would, once the process that started it is gone.

    Args:
        parent: Its id, by default that of the parent now; a child that takes long to start may have lost it already.
    """
    expected = os.getppid() if parent is None else parent

    def watch() -> None:
        while os.getppid() == expected:
            time.sleep(_LOOK_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
