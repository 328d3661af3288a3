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
    sys.path.append(os.getcwd())  # last: own models and methods are found, and no file here hides an installed module
    try:
        from fleetdistill_server.cli.app import app
    except KeyboardInterrupt:
        print("interrupted before anything was done: give the same command again", file=sys.stderr)
        sys.exit(INTERRUPTED)
    app()
