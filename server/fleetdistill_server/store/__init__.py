"""Durable state of all runs: a SQLite database and payload files. May import `config` and the SDK."""
