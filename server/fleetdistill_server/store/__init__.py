"""Durable state of all runs: a SQLite database and payload files.

Modules of this package may import `config` and the SDK.
"""
