"""What holds for every test."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Nothing in the suite may depend on how busy the machine is: an example that takes long is no failure.
settings.register_profile("any-load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-load")
