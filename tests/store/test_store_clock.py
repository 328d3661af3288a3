"""A store that uses another clock stamps every row and compares every deadline with it."""

from __future__ import annotations

from typing import Any

from fleetdistill.testing import ManualClock
from fleetdistill_server.store.clock import Clock
from fleetdistill_server.store.records import Ask
from fleetdistill_server.store.store import Store


def test_all_rows_have_the_times_of_the_stores_clock() -> None:
    clock = ManualClock(now=1000.0, time=1000.0)
    store = Store.in_memory()
    store.use_clock(Clock(clock.now, clock.now))
    store.runs.begin("r", {"run": {"name": "r"}})
    store.devices.register("r", "a", b"", b"")
    clock.advance(5)
    number = store.runs.start_round("r", ["a"])
    ask: dict[str, Any] = {
        "run": "r",
        "round": number,
        "step_number": 1,
        "device": "a",
        "step": "train",
        "expects": {},
        "seed": 1,
    }
    store.asks.add([Ask(**ask, deadline_at=store.asks.clock.now() + 10)])
    clock.advance(10)
    assert store.asks.expire("r", store.asks.clock.now()) == [], "exactly at the deadline"
    clock.advance_to(1015.5)
    (late,) = store.asks.expire("r", store.asks.clock.now())
    assert late.device == "a"
    store.runs.close_short_round("r", number, "quorum")
    store.devices.mark_absent("r", "a", "device left")
    (row,) = store.runs.rounds("r")
    assert (row.started_at, row.ended_at) == (1005.0, 1015.5)
    assert {event.at for event in store.history.events("r")} == {1015.5}
    (device,) = store.devices.all("r")
    assert (device.first_seen, device.last_seen) == (1000.0, 1000.0)
    store.close()
