"""Exports the server's model of a run in a process of its own, so that the tracker never loads torch."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fleetdistill.errors import FleetDistillError
from fleetdistill_server.logs import about
from fleetdistill_server.service.processes import child_environment

logger = logging.getLogger("fleetdistill.server.tracking")
MODEL_NAME = "onnx/server.onnx"
"""Path under which a tracker shows the server's model."""
_MAX_SECONDS = 600.0


@contextlib.contextmanager
def exported_model(store: Path, run: str) -> Iterator[Path | None]:
    """Yields the ONNX file of a run's server model, which is deleted afterwards; None if there is none to export."""
    with tempfile.TemporaryDirectory(prefix="fleetdistill-") as folder:
        file = Path(folder, "server.onnx")
        command = [sys.executable, "-m", "fleetdistill_console.tracking.server_model", str(store), run, str(file)]
        done = subprocess.run(
            command, capture_output=True, text=True, env=child_environment(), timeout=_MAX_SECONDS, check=False
        )
        if done.returncode:
            why = (done.stdout or done.stderr).strip().splitlines()
            logger.info("the server's model is not tracked: %s", why[-1] if why else "", extra=about(run=run))
        yield file if done.returncode == 0 else None


def main(words: list[str]) -> int:
    """Exports the model of the run `words[1]` in the store `words[0]` to the file `words[2]`."""
    from fleetdistill_server.engine.export import export_server_model
    from fleetdistill_server.store.store import Store

    store = Store.open(Path(words[0]))
    try:
        export_server_model(store, words[1], Path(words[2]))
    except FleetDistillError as error:
        print(error)
        return 1
    finally:
        store.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
