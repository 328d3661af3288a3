"""Implements the device API without a transport: check-in, asks, uploads and downloads.

Modules of this package may import `store` and `config`.
"""
