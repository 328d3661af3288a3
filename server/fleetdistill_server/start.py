"""Where the command `fleetdistill` begins: before anything is imported that takes a while."""

from __future__ import annotations

import os
import signal
import sys

INTERRUPTED = 130
"""What shells say of a program that Ctrl-C has ended."""


def main() -> None:
    """Runs the command line; a signal that comes while `serve` is still being imported ends it like a later one."""
    if sys.argv[1:2] == ["serve"]:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda signum, frame: sys.exit(0))
    if sys.argv[1:2] == ["simulate"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _not_begun)
    sys.path.append(os.getcwd())  # last: own models and methods are found, and no file here hides an installed module
    try:
        from fleetdistill_server.cli.app import app
    except KeyboardInterrupt:
        print("interrupted before anything was done: give the same command again", file=sys.stderr)
        sys.exit(INTERRUPTED)
    app()


def _not_begun(number: int, frame: object) -> None:
    print("interrupted before anything was simulated: give the same command again", file=sys.stderr)
    sys.exit(INTERRUPTED)


def ctrl_c_interrupts() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt, as it usually does."""
    if signal.getsignal(signal.SIGINT) is _not_begun:
        signal.signal(signal.SIGINT, signal.default_int_handler)
