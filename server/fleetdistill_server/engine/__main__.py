"""`python -m fleetdistill_server.engine`: the process that `fleetdistill serve` starts."""

from fleetdistill_server.engine.process import main

if __name__ == "__main__":
    raise SystemExit(main())
