"""A run of many devices and rounds in a store, filled through the store's own calls instead of by devices."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fleetdistill.knowledge import Metric, Metrics
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.store.records import Ask
from fleetdistill_server.store.store import Store
from fleetdistill_server.store.traffic import Counted

RUN = "large"
_DIGEST = hashlib.sha256(b"the same answer of all").digest()


def device_name(number: int) -> str:
    return f"device-{number:04}"


def fill(directory: Path, devices: int, rounds: int, per_round: int) -> None:
    """Makes a run whose rounds ask `per_round` devices in turn; the last round, which asks all, is open.

    Half of the devices of the open round have answered.
    """
    store = Store.open(directory)
    names = [device_name(number) for number in range(devices)]
    _begin(store, names, rounds + 1)
    turns = itertools.cycle(names)
    for number in range(1, rounds + 1):
        with store.transaction():
            _complete(store, number, list(itertools.islice(turns, per_round)))
    with store.transaction():
        asks = _ask(store, names)
        for device, ask in list(zip(names, asks, strict=True))[: devices // 2]:
            store.asks.accept_upload(ask, 1, _DIGEST, 5_000, 100)
            _report(store, rounds + 1, device)
    store.close()


def add_round(directory: Path, cohort: Sequence[str]) -> None:
    """Completes the open round and one more, as an engine would while the dashboard reads."""
    store = Store.open(directory)
    opened = store.runs.open_round(RUN)
    assert opened is not None
    with store.transaction():
        store.runs.close_short_round(RUN, opened.number, "only half of the devices answered")
    with store.transaction():
        _complete(store, opened.number + 1, cohort)
    store.close()


def _begin(store: Store, names: Sequence[str], rounds: int) -> None:
    contract = contract_pb2.Contract(classes=[str(label) for label in range(10)], input_shape=[1, 8, 8])
    profile = contract_pb2.DeviceProfile(samples=100, model_name="digits_linear", parameters=650).SerializeToString()
    with store.transaction():
        store.runs.begin(RUN, {"run": {"name": RUN, "method": "fedavg", "rounds": rounds}})
        store.runs.publish_contract(RUN, contract.SerializeToString())
        for name in names:
            store.devices.register(RUN, name, name.encode(), profile)
            store.devices.mark_present(RUN, name)


def _ask(store: Store, cohort: Sequence[str]) -> list[int]:
    number = store.runs.start_round(RUN, cohort)
    row: dict[str, Any] = {
        "run": RUN,
        "round": number,
        "step_number": 1,
        "step": "train",
        "expects": {},
        "payload": _DIGEST,
    }
    row |= {"payload_bytes": 5_000, "seed": number, "deadline_at": 4e9}
    store.asks.add([Ask(**row, device=name) for name in cohort])
    ids = {ask.device: int(ask.id) for ask in store.asks.of_step(RUN, number, 1)}
    return [ids[name] for name in cohort]


def _report(store: Store, number: int, device: str) -> None:
    right = 100.0 * (1 - 0.9 / (1 + number / 100))
    accuracy = Metric(name="accuracy", split="test", sum=right, count=100)
    loss = Metric(name="loss", split="train", sum=230 / (1 + number / 100), count=100)
    store.history.add_figures(RUN, number, device, Metrics(metrics=[accuracy, loss]))
    for direction in ("up", "down"):
        counted = Counted()
        counted.tensor["model_parameters"] = counted.sent["model_parameters"] = 5_000
        store.history.add_traffic(RUN, number, device, direction, counted, 300)


def _complete(store: Store, number: int, cohort: Sequence[str]) -> None:
    asks = _ask(store, cohort)
    for device, ask in zip(cohort, asks, strict=True):
        store.asks.accept_upload(ask, 1, _DIGEST, 5_000, 100)
        _report(store, number, device)
    if number % 10 == 0:
        store.history.add_event(RUN, "norm-guard", "an update was scaled", number=number, device=cohort[0])
    store.runs.close_round(RUN, number, _DIGEST, asks, {})
