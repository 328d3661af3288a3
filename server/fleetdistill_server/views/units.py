"""Human-readable units and numbers."""

from __future__ import annotations

from fleetdistill_server.texts import counted, readable_bytes

__all__ = ["counted", "readable_bytes"]
