"""What cannot be sent to a device costs that device a round, and never ends a run: all methods, and FedDKC attacked."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.answering import AnsweringDevice
from support.fleets import EVERY_METHOD, RUNS, assert_no_upload_lost, prepare, run_in_memory
from support.long import long_except
from torch import nn

from fleetdistill.errors import KnowledgeError
from fleetdistill.knowledge import Parts, RefinedKnowledge
from fleetdistill.state.state_file import unpack_state
from fleetdistill.wire.codec import encode
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_server.config.run_config import RunConfig, run_config
from fleetdistill_server.engine.cohort import StoreCohort
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.methods.cohort import DeviceAnswer
from fleetdistill_server.store.store import Store

TOO_LARGE = {"too large": RefinedKnowledge(valid=True, sample_ids=np.arange(1), values=np.full((1, 2), 1e30))}


def poisoned(payload: Any, fits: Callable[[str], bool]) -> Callable[[str], Parts | None]:
    def parts(device: str) -> Parts | None:
        own = payload(device) if callable(payload) else payload
        return own if fits(device) else {**(own or {}), **TOO_LARGE}

    return parts


@pytest.mark.parametrize("name", long_except(EVERY_METHOD, "classstats", "fedavg", "feddkc"))
def test_ask_that_cannot_be_encoded_costs_a_round_not_the_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In round 1 nobody's can, in round 2 all but one device's: of two the quorum wants both, so both fall short."""
    with pytest.raises(KnowledgeError, match="does not fit float"):
        encode(TOO_LARGE, np.float16)
    honest = StoreCohort.ask

    async def ask(self: StoreCohort, step: str, payload: Any = None, **how: Any) -> AsyncIterator[DeviceAnswer]:
        def fits(device: str) -> bool:
            return self.round > 2 or (self.round == 2 and device == self.devices[0])

        async for answer in honest(self, step, poisoned(payload, fits), **how):  # type: ignore[arg-type]
            yield answer

    monkeypatch.setattr(StoreCohort, "ask", ask)
    wanted = RUNS[name]
    config, specs, work = prepare(wanted, tmp_path / "work")
    in_float16 = config.contract.model_copy(update={"knowledge_type": "float16"})
    store = run_in_memory((config.model_copy(update={"contract": in_float16}), specs, work))
    row = store.runs.get(RUN)
    assert row is not None
    assert (row.status, row.completed_rounds) == ("finished", config.run.rounds)
    rounds = store.runs.rounds(RUN)
    assert [item.status for item in rounds] == ["short", "short"] + ["closed"] * config.run.rounds
    told = [(event.round, event.device) for event in store.history.events(RUN, "not-asked")]
    first, *others = rounds[0].cohort
    assert told[: 2 * len(others) + 1] == [(1, first), *((number, name) for number in (1, 2) for name in others)]
    assert all("does not fit" in event.text for event in store.history.events(RUN, "not-asked"))
    assert_no_upload_lost(store)
    store.close()


# --- FedDKC


class Loud(AnsweringDevice):
    """Its features are as large as float16 goes."""

    def _feature_column(self, random: np.random.Generator, shape: tuple[int, ...]) -> Any:
        return np.full(shape, 65504, np.float32)


def steep_predictor(feature_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Of rows as large as float16 goes it says more than float16 holds, and its training comes to nothing finite."""
    linear = nn.Linear(math.prod(feature_shape), classes)
    nn.init.uniform_(linear.weight, 0.0, 1.0)
    return nn.Sequential(nn.Flatten(), linear)


def config_for(**run: Any) -> RunConfig:
    sys.modules["test_unsendable"] = sys.modules[__name__]
    return run_config(
        {
            "run": {"name": RUN, "method": "feddkc", "rounds": 3, "min_devices": 3, **run},
            "contract": {"classes": 10, "input_shape": [1, 8, 8], "knowledge_type": "float16"},
            "model": {"server": "test_unsendable:steep_predictor"},
            "method": {"server_epochs": 1, "teacher_guard": False, "robust": "off"},
            "server": {"torch_device": "cpu"},
        }
    )


class Turns:
    """A waker that lets one device take one step."""

    def __init__(self, devices: list[Any]) -> None:
        self._devices, self._turn = devices, 0

    async def wait(self, seconds: float = 0.0) -> None:
        self._turn += 1
        self._devices[self._turn % len(self._devices)].step(0.0)

    def wake_other(self) -> None:
        """Devices in this process need no wake-up."""


def fleet(store: Store, *kinds: type[AnsweringDevice]) -> Turns:
    api = DeviceApi(store)
    return Turns([kind(MemoryLink(api), RUN, f"d{number}") for number, kind in enumerate(kinds)])


def state_of(store: Store) -> dict[str, Any]:
    state: dict[str, Any] = unpack_state(store.blobs.get_state(store.runs.existing(RUN).checkpoint))
    return state


def test_largest_features_of_the_wire_do_not_end_feddkc_run() -> None:
    store = Store.in_memory()
    asyncio.run(Engine(store, config_for(), fleet(store, AnsweringDevice, AnsweringDevice, Loud)).run())
    assert [row.status for row in store.runs.rounds(RUN)] == ["closed"] * 3
    assert {row.device for row in store.history.events(RUN, "knowledge-left-out")} == {"d2"}
    valid = {device: bool(one[2]) for device, one in state_of(store)["knowledge"].items()}
    assert valid == {"d0": True, "d1": True, "d2": False}
    assert {row.status for row in store.asks.uploads(RUN)} == {"used"}
    store.close()
