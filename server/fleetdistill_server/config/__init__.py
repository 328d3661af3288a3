"""The sections of run.toml and their checks. Modules of this package may import only the SDK."""
