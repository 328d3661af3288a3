"""The durable state of all runs: a SQLite database and the files of payloads. Imports `config` and the SDK."""
