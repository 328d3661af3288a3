"""What an operator writes: run.toml, its sections, their checks. Imports the SDK alone."""
