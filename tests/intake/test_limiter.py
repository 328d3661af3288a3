"""The limiter without limits; test_limits of the front has it with them."""

from __future__ import annotations

from fleetdistill_server.intake.limiter import Limiter, Reservation

ONE = ("run", "d1")


def test_without_limits_nothing_is_refused() -> None:
    limiter = Limiter(None)
    for _ in range(100):
        limiter.begin_upload(ONE)
        assert isinstance(limiter.open_call(ONE), Reservation)
        limiter.hold_bytes(ONE, 1 << 60)
        limiter.check_devices(ONE, 1 << 60)
        limiter.begin_enrolment()
