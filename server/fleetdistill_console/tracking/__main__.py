"""Runs the tracking process; `serve` and `simulate` start it as `python -m fleetdistill_console.tracking`."""

import sys

from fleetdistill_console.tracking.process import main

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
