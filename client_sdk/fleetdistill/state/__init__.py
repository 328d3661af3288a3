"""A device's state directory, and durable files."""
