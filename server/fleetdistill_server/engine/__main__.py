"""Runs the engine process; `fleetdistill serve` starts it as `python -m fleetdistill_server.engine`."""

from fleetdistill_server.engine.process import main

if __name__ == "__main__":
    raise SystemExit(main())
