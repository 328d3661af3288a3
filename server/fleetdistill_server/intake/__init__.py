"""Implements the device API without a transport: check-in, asks, uploads, downloads. Imports `store` and `config`."""
