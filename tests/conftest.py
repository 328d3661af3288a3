"""What holds for every test."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

# Nothing in the suite may depend on how busy the machine is: an example that takes long is no failure.
settings.register_profile("any-load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-load")


def pytest_configure() -> None:
    """A shell starts background jobs with SIGINT ignored, and what the tests start would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
