"""run.toml: its sections and their checks. Imports only the SDK."""
