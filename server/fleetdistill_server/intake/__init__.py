"""The calls of devices without a transport: check-in, asks, uploads, downloads. Imports `store` and `config`."""
