"""The processes of `fleetdistill serve`: supervisor, locks, heartbeat. Imports `store` and `config`."""
