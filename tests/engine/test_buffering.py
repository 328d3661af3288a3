"""Buffered rounds: they end at K answers or after T seconds, and a late answer counts in a later round, once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.answering import AnsweringDevice
from support.fleets import assert_no_upload_lost
from torch import nn

from fleetdistill.errors import ConfigurationError
from fleetdistill.state import failpoints
from fleetdistill.state.failpoints import FailpointError
from fleetdistill.testing import ManualClock
from fleetdistill.training.local_training import TrainingReport
from fleetdistill.wire.codec import encode
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_server.config.run_config import RunConfig, run_config
from fleetdistill_server.engine.buffering import BufferTerms
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.methods.cohort import DeviceAnswer
from fleetdistill_server.store.clock import Clock
from fleetdistill_server.store.location import Location
from fleetdistill_server.store.rollback import roll_back
from fleetdistill_server.store.store import Store
from fleetdistill_server.training.trainer import Trainer

ROWS = 6


def test_a_stale_answer_has_less_weight() -> None:
    answer = DeviceAnswer("d", 8, encode({}))
    assert answer.weight == 8
    answer.staleness, answer.decay = 3, BufferTerms(answers=1, seconds=0.0, limit=10, exponent=0.5).decay(3)
    assert answer.weight == 4.0


class Fleet:
    """Three devices; `d2` answers an ask only once its patience, in waits of the engine, is used up.

    Attributes:
        patience: Waits of the engine until `d2` takes its next step.
        on_wait: Called at each wait.
    """

    def __init__(self, store: Store, patience: int, count: int = 3) -> None:
        self.store, self.patience, self.clock = store, patience, ManualClock(1000.0)
        store.asks.clock = Clock(self.clock.now, self.clock.now)
        link = MemoryLink(DeviceApi(store))
        self.devices = [AnsweringDevice(link, RUN, f"d{number}") for number in range(count)]
        self.on_wait: Callable[[], None] = lambda: None
        self._waits = 0

    async def wait(self, seconds: float = 0.0) -> None:
        self._waits += 1
        self.on_wait()
        *quick, slow = self.devices
        for device in quick:
            device.step()
        if slow.contract is None or self._waits % self.patience == 0:
            slow.step()

    def wake_other(self) -> None:
        return

    def run(self, config: RunConfig, max_short_rounds: int | None = 1) -> None:
        asyncio.run(Engine(self.store, config, self, max_short_rounds).run())

    def figures(self, name: str) -> list[dict[str, Any]]:
        return [row.figures.get(name, {}) for row in self.store.runs.rounds(RUN)]


def config_of(rounds: int = 4, **run: Any) -> RunConfig:
    return run_config(
        {
            "run": {"name": RUN, "method": "feddkc", "rounds": rounds, "min_devices": 3, "buffer_answers": 2, **run},
            "contract": {"classes": 10, "input_shape": [1, 8, 8], "knowledge_type": "float32"},
            "model": {"device": "fedd2s_digits"},
            "server": {"torch_device": "cpu", "keep_checkpoints": 100},
        }
    )


@pytest.fixture
def store(location: Location, tmp_path: Path) -> Iterator[Store]:
    """In memory, or in PostgreSQL and an object store."""
    made = Store.in_memory() if location == Location() else Store.open(tmp_path, location)
    yield made
    made.close()


def used_of(store: Store, device: str) -> list[tuple[int, str]]:
    return [(row.round, row.status) for row in store.asks.uploads(RUN) if row.device == device]


def test_round_ends_at_k_answers_and_late_answer_counts_later(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[int] = []  # rows that FedDKC's predictor is trained on, by round
    train = Trainer.train_steps

    def counted(trainer: Trainer, model: nn.Module, pools: list[int], **how: Any) -> TrainingReport:
        trained.append(sum(pools))
        return train(trainer, model, pools, **how)

    monkeypatch.setattr(Trainer, "train_steps", counted)
    fleet = Fleet(store, patience=5)
    fleet.run(config_of())
    ages = fleet.figures("staleness")
    assert all(len(age) >= 2 for age in ages)
    late = [(number, one["d2"]) for number, one in enumerate(ages, 1) if "d2" in one]
    assert late
    assert late[0][1] > 0
    for number, age in late:
        weight = fleet.figures("staleness_weight")[number - 1]["d2"]
        assert weight == pytest.approx((1 + age) ** -0.5)
        others = len(ages[number - 1]) - 1
        assert trained[number - 1] == ROWS * others + int(ROWS * weight)
    asked = [number for number, _ in used_of(fleet.store, "d2")]
    assert len(set(asked)) == len(asked)  # while it works it is not asked again
    assert used_of(fleet.store, "d0") == [(number, "used") for number in range(1, 5)]
    assert_no_upload_lost(fleet.store)
    assert fleet.store.asks.open_ids() == set()


def test_a_round_ends_after_t_seconds_with_one_answer(store: Store) -> None:
    fleet = Fleet(store, patience=1000)
    fleet.on_wait = partial(fleet.clock.advance, 1.0)
    fleet.run(config_of(rounds=2, buffer_answers=3, buffer_seconds=30.0))
    assert [sorted(figure) for figure in fleet.figures("staleness")] == [["d0", "d1"]] * 2
    assert fleet.clock.now() - 1000.0 >= 60.0


@pytest.mark.parametrize("settings", [{"staleness_limit": 2}, {"deadline_seconds": 5.0}])
def test_ask_ends_at_its_deadline_and_at_staleness_limit(settings: dict[str, Any], store: Store) -> None:
    fleet = Fleet(store, patience=1000)
    fleet.on_wait = partial(fleet.clock.advance, 1.0)
    fleet.run(config_of(rounds=8, **settings))
    asks = [fleet.store.asks.get(RUN, number, 1, "d2") for number in range(1, 9)]
    assert len([ask for ask in asks if ask is not None]) > 1  # it is asked again
    assert {ask.status for ask in asks if ask is not None} == {"out"}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    "moment", ["engine.asks.after-commit", "engine.answer.after-read", "engine.close.after-commit"]
)
@pytest.mark.parametrize("number", range(1, 6))
def test_an_engine_that_dies_uses_every_answer_once(moment: str, number: int, store: Store) -> None:
    fleet = Fleet(store, patience=4)
    with failpoints.switched_on(f"{moment}=error@{number}"), suppress(OSError, FailpointError):
        fleet.run(config_of())
    fleet.run(config_of())
    assert_no_upload_lost(fleet.store)
    receipts = [row.receipt for row in fleet.store.asks.uploads(RUN)]
    assert sorted(receipts) == sorted(receipt for device in fleet.devices for receipt in device.receipts)
    used = sum(len(figure) for figure in fleet.figures("staleness"))
    assert used == sum(row.status == "used" for row in fleet.store.asks.uploads(RUN))


def test_a_rollback_reports_late_answers_of_undone_rounds_too(store: Store) -> None:
    fleet = Fleet(store, patience=5)
    fleet.run(config_of(rounds=6))
    number, age = next(
        (number, one["d2"]) for number, one in enumerate(fleet.figures("staleness"), 1) if one.get("d2", 0) > 0
    )
    assert (number - age, "used") in used_of(fleet.store, "d2")
    roll_back(fleet.store, RUN, number - 1)
    assert (number - age, "reported") in used_of(fleet.store, "d2")
    assert_no_upload_lost(fleet.store)


def status_of_d2(fleet: Fleet) -> str:
    """Status of d2's ask of round 1."""
    ask = fleet.store.asks.get(RUN, 1, 1, "d2")
    assert ask is not None
    return ask.status


def test_next_start_without_buffering_settles_late_asks(store: Store) -> None:
    fleet = Fleet(store, patience=1000)

    def stop() -> None:
        if len(fleet.store.runs.rounds(RUN)) == 3:
            raise FailpointError

    fleet.on_wait = stop
    with suppress(FailpointError):
        fleet.run(config_of())
    assert status_of_d2(fleet) == "open"
    fleet.on_wait, fleet.patience = lambda: None, 1
    fleet.run(config_of(buffer_answers=0))
    assert status_of_d2(fleet) == "out"
    assert_no_upload_lost(fleet.store)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "two steps": ({"method": "fedd2s"}, "requires a method with one step per round, but fedd2s asks the steps"),
    "seconds alone": ({"buffer_answers": 0, "buffer_seconds": 1.0}, "buffer_seconds needs buffer_answers"),
    "two ends": ({"devices_per_round": 2}, "buffer_answers and devices_per_round both end a round"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_settings_that_cannot_be_buffered_are_refused(wrong: str) -> None:
    changes, message = WRONG[wrong]
    fleet = Fleet(Store.in_memory(), 1)
    with pytest.raises(ConfigurationError, match=message):
        fleet.run(config_of(**changes))
