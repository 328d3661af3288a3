"""Runs a run's server half on top of the store. Its modules may import `methods`, `service`, `store` and `config`."""
