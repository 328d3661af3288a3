"""Traces of rounds with OpenTelemetry, which is imported only if `[server] traces` is on."""
