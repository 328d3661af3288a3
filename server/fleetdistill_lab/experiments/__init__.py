"""`fleetdistill compare`: several methods on the same fleets, with several seeds."""
