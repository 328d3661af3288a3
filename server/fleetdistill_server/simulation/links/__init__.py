"""Runs a simulated fleet over the in-memory link or over gRPC."""
