"""Runs a run's server half on top of the store. Imports `methods`, `service`, `store` and `config`."""
