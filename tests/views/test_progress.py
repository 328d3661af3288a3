"""The state of each ask of a round, and of a device that left it for whatever reason."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.security.revocation import revoke_device
from fleetdistill_server.store.records import Ask
from fleetdistill_server.store.store import Store
from fleetdistill_server.views.fleet import round_progress

RUN = "r"


def asked(payload: bytes | None) -> tuple[Store, Ask]:
    """A store with one open ask of device a, and its row."""
    store = Store.in_memory()
    store.runs.begin(RUN, {"run": {"name": RUN, "method": "feddkc", "rounds": 2}})
    store.devices.register(RUN, "a", b"", contract_pb2.DeviceProfile().SerializeToString())
    number = store.runs.start_round(RUN, ["a"])
    row: dict[str, Any] = {"run": RUN, "round": number, "step_number": 1, "device": "a", "step": "train", "seed": 1}
    row |= {"expects": {}, "payload": payload, "payload_bytes": 1, "deadline_at": time.time() + 600}
    store.asks.add([Ask(**row)])
    (ask,) = store.asks.of_step(RUN, number, 1)
    return store, ask


def state(store: Store) -> str:
    (ask,) = round_progress(store, RUN).lists["asks"]
    return str(ask["state"])


def test_an_ask_with_a_payload_is_downloaded_before_it_trains() -> None:
    store, ask = asked(bytes(32))
    states = [state(store)]
    for at, column in enumerate(("sent_at", "download_at", "downloaded_at", "upload_at")):
        store.asks.record_times({(ask.id, column): float(at)})
        states.append(state(store))
    store.asks.accept_upload(ask.id, 1, bytes(32), 0, 1)
    assert [*states, state(store)] == ["asked", "asked", "downloading", "training", "uploading", "acknowledged"]


def test_an_ask_without_a_payload_trains_once_it_is_sent() -> None:
    store, ask = asked(None)
    assert state(store) == "asked"
    store.asks.record_times({(ask.id, "sent_at"): 1.0})
    assert state(store) == "training"


@pytest.mark.parametrize(
    ("end", "shown"),
    [
        (lambda store, ask: revoke_device(store, "a", "stolen"), "left"),
        (lambda store, ask: store.devices.mark_absent(RUN, "a", "lease ended"), "left"),
        (lambda store, ask: store.devices.mark_absent(RUN, "a", "device left"), "left"),
        (lambda store, ask: store.devices.ask_to_forget(RUN, "a"), "left"),
        (lambda store, ask: store.asks.expire(RUN, time.time() + 3600), "late"),
        (lambda store, ask: store.asks.close(ask, "refused: bad-value"), "refused"),
        (lambda store, ask: store.asks.close(ask, "declined"), "declined"),
        (lambda store, ask: store.asks.close(ask, "enough devices answered"), "out"),
    ],
)
def test_a_device_that_does_not_answer_says_why(end: Callable[[Store, int], object], shown: str) -> None:
    store, ask = asked(None)
    end(store, ask.id)
    assert state(store) == shown
