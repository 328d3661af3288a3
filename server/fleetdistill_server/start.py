"""Entry point of the command `fleetdistill`; handles signals before the slow imports."""

from __future__ import annotations

import os
import signal
import sys

INTERRUPTED = 130
"""Exit status that shells report for a program stopped by Ctrl-C."""


def main() -> None:
    """Runs the command line; signals during the imports of `serve` end it in the same way as later ones."""
    if sys.argv[1:2] == ["device"]:  # needs only the SDK; the other commands need the extra `server`
        from fleetdistill.device.command import main as device

        sys.exit(device(sys.argv[2:]))
    if sys.argv[1:2] == ["doctor"] and any(word.partition("=")[0] == "--state" for word in sys.argv):  # the SDK's too
        from fleetdistill.device.doctor import main as doctor

        sys.exit(doctor(sys.argv[2:]))
    if sys.argv[1:2] == ["serve"]:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda signum, frame: sys.exit(0))
    if sys.argv[1:2] == ["simulate"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _not_begun)
    sys.path.append(os.getcwd())  # appended, so that local files do not shadow installed modules
    try:
        from fleetdistill_server.cli.app import app
    except KeyboardInterrupt:
        print("interrupted before anything was done; run the command again", file=sys.stderr)
        sys.exit(INTERRUPTED)
    app()


def _not_begun(number: int, frame: object) -> None:
    print("interrupted before the simulation started; run the command again", file=sys.stderr)
    sys.exit(INTERRUPTED)


def ctrl_c_interrupts() -> None:
    """Restores the default behaviour of Ctrl-C, which raises KeyboardInterrupt."""
    if signal.getsignal(signal.SIGINT) is _not_begun:
        signal.signal(signal.SIGINT, signal.default_int_handler)
