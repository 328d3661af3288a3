"""`python -m fleetdistill_server.front`: the process that `fleetdistill serve` starts."""

from fleetdistill_server.front.process import main

if __name__ == "__main__":
    raise SystemExit(main())
