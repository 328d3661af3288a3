"""The processes of `fleetdistill serve`: supervisor, locks and heartbeat.

Modules of this package may import `store` and `config`.
"""
