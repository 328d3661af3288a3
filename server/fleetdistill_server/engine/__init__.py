"""Runs the server half of a run's method over the store. Imports `methods`, `service`, `store` and `config`."""
