"""Joining must not hurt, in a whole fleet: verdicts and guards are counted, and shown; a device may decline an ask."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fleets import assert_no_upload_lost, prepare, run_in_memory

from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import Metric, Metrics
from fleetdistill.methods.feddkd.device import FedDKDDevice
from fleetdistill.replacement import REPLACEMENT_METRICS, SPLIT
from fleetdistill_lab.simulation.data.test_parts import hold_out_validation
from fleetdistill_lab.simulation.fleet import simulate
from fleetdistill_lab.simulation.spec.arrays import load_arrays
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.engine.cohort import RoundTerms, StoreCohort
from fleetdistill_server.event_kinds import GUARD
from fleetdistill_server.security.revocation import revoke_device
from fleetdistill_server.store.store import Store
from fleetdistill_server.store.sums import EVERY
from fleetdistill_server.views import runs as views

SMALL = Simulation(
    method="feddkc",
    models=("digits_mlp_small",),
    devices=3,
    rounds=3,
    train_limit=240,
    test_limit=60,
    alpha=0.5,
    validation_share=0.25,
)


# --- the device's own validation data


@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    share=st.floats(0, 0.99),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_held_out_rows_are_of_own_device_and_classes_keep_one(
    labels: list[int], share: float, seed: int, data: st.DataObject
) -> None:
    rows = np.array(sorted(data.draw(st.sets(st.integers(0, len(labels) - 1), min_size=1))))
    kept, held_out = hold_out_validation(labels, rows, share, seed)
    assert sorted([*kept, *held_out]) == list(rows)
    assert len(held_out) <= round(share * len(rows))
    y = np.array(labels)
    assert set(y[kept]) == set(y[rows])
    for item in (kept, held_out):
        assert list(item) == sorted(item)


def test_held_out_rows_have_the_devices_mix_of_classes() -> None:
    labels = np.repeat([0, 1, 2], [40, 20, 8])
    _, held_out = hold_out_validation(labels, np.arange(68), 0.25, seed=1)
    assert list(np.bincount(labels[held_out])) == [10, 5, 2]
    assert not np.array_equal(held_out, hold_out_validation(labels, np.arange(68), 0.25, seed=2)[1])


def test_without_a_share_the_rows_are_untouched() -> None:
    rows = np.array([1, 3, 5])
    kept, held_out = hold_out_validation([0, 1, 0, 1, 0, 1], rows, 0.0, seed=1)
    assert kept is rows
    assert not len(held_out)


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_a_share_out_of_range_is_refused(share: float, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"validation_share is .*, must be at least 0 and below 1"):
        simulate(replace(SMALL, validation_share=share, out=tmp_path))


def test_a_simulated_device_trains_on_the_rest_of_its_samples(tmp_path: Path) -> None:
    _, whole, _ = prepare(replace(SMALL, validation_share=0.0), tmp_path / "whole")
    _, parted, _ = prepare(SMALL, tmp_path / "parted")
    for before, after in zip(whole, parted, strict=True):
        assert before.validation_file == ""
        all_, kept, held = (load_arrays(f)[0] for f in (before.data_file, after.data_file, after.validation_file))
        assert len(kept) + len(held) == len(all_)
        assert 0.15 * len(all_) < len(held) < 0.3 * len(all_)


# --- verdicts, counted


@pytest.mark.long
@pytest.mark.parametrize(("method", "each"), [("feddkc", 3), ("fedd2s", 3), ("fedavg", 3 + 1), ("feddkd", 3 + 1)])
def test_every_verdict_is_in_tables_of_run_devices_and_totals(method: str, each: int, tmp_path: Path) -> None:
    """One verdict a device and round, and one on the end result where the method brings one."""
    models = ("fedd2s_digits",) if method == "fedd2s" else SMALL.models
    store = run_in_memory(prepare(replace(SMALL, method=method, models=models), tmp_path / "work"))
    verdicts = [row.sum for name in REPLACEMENT_METRICS for row in store.history.figures(RUN, name, SPLIT)]
    assert len(verdicts) == SMALL.devices * each
    replaced = sum(verdict > 0 for verdict in verdicts)
    kept = len(verdicts) - replaced
    shown = views.run(store, RUN)
    assert (shown.facts["models_kept"], shown.facts["models_replaced"]) == (kept, replaced)
    for rows in (shown.lists["rounds"], views.devices(store, RUN).lists["devices"]):
        assert sum(row["kept"] for row in rows) == kept
        assert sum(row["replaced"] for row in rows) == replaced
    assert [row["kept"] + row["replaced"] for row in shown.lists["rounds"][:2]] == [SMALL.devices] * 2
    assert [row["kept"] + row["replaced"] for row in views.devices(store, RUN).lists["devices"]] == [each] * 3


@pytest.mark.long
def test_report_counts_verdicts_only_with_validation_data(tmp_path: Path) -> None:
    wanted = replace(SMALL, with_alone=False, with_fedavg=False, rounds=2)
    report = simulate(replace(wanted, out=tmp_path / "with"))
    assert report.models_kept + report.models_replaced == 3 * 2
    without = simulate(replace(wanted, validation_share=0.0, out=tmp_path / "without"))
    assert (without.models_kept, without.models_replaced) == (0, 0)


def test_device_cannot_make_more_of_its_verdicts_than_they_are() -> None:
    store = Store.in_memory()
    store.runs.begin("r", {"run": {"name": "r", "method": "feddkc", "rounds": 1}})
    number = store.runs.start_round("r", ["a", "b", "c"])
    for device, total, count in (("a", 1e300, 10**18), ("b", -5.0, 0), ("c", 0.0, 1)):
        verdict = Metric(name=REPLACEMENT_METRICS[0], split=SPLIT, sum=total, count=count)
        store.history.add_figures("r", number, device, Metrics(metrics=[verdict]))
    facts = views.run(store, "r").facts
    assert (facts["models_kept"], facts["models_replaced"]) == (2, 1)
    store.close()


# --- guards, counted


def cohort_of(store: Store, number: int) -> StoreCohort:
    terms = RoundTerms(
        run="r",
        seed=1,
        quorum=0.5,
        deadline_seconds=60.0,
        devices_per_round=0,
        knowledge_type=np.dtype("float32"),
        steps={},
    )
    return StoreCohort(store, terms, waker=Never(), number=number, completed=0, devices=["a", "b"])


def test_replayed_round_notes_same_text_once_however_long() -> None:
    """The store keeps a bounded part of a text, which is what a replay is held against."""
    store = Store.in_memory()
    for number in (1, 1, 2):
        for text, device in (("x" * 5000, "a"), ("short", "a"), ("short", "b")):
            cohort_of(store, number).event("left", text, device)
    cohort_of(store, 2).event("left", "another", "b", once=True)
    told = [(row.round, row.device, len(row.text)) for row in store.history.events("r", "left")]
    assert told == [(number, *item) for number in (1, 2) for item in (("a", 1000), ("a", 5), ("b", 5))]
    store.close()


class Never:
    """A waker of tests in which nothing is waited for."""

    async def wait(self, seconds: float = 0.0) -> None:
        pytest.fail("waited for a device")

    def wake_other(self) -> None:
        return


def test_fired_guard_is_counted_once_and_other_events_are_not() -> None:
    store = Store.in_memory()
    store.runs.begin("r", {"run": {"name": "r", "method": "feddkc", "rounds": 3}})
    for _ in range(2):
        store.runs.start_round("r", ["a", "b"])
        store.runs.close_short_round("r", store.runs.rounds("r")[-1].number, "quorum")
    for _ in range(2):  # a replayed round says the same again
        cohort_of(store, 1).guard("teacher", "held back", "a")
        cohort_of(store, 1).guard("teacher", "held back", "b")
        cohort_of(store, 2).guard("maturity", "two classes")
    cohort_of(store, 2).event("member-left-out", "not finite", "a")
    store.history.add_event("r", "refused", "a wrong label", number=2)
    kinds = [event.kind for event in store.history.events("r") if event.kind.endswith(GUARD)]
    assert kinds == ["teacher-guard", "teacher-guard", "maturity-guard"]
    assert store.summaries.guards("r", 0, EVERY) == {1: 2, 2: 1}
    shown = views.run(store, "r")
    assert shown.facts["guards_fired"] == 3
    assert [row["guards"] for row in shown.lists["rounds"]] == [2, 1]
    assert [row["kept"] for row in shown.lists["rounds"]] == [None, None]
    store.close()


# --- declining


@pytest.mark.long
def test_device_that_lost_its_teacher_declines_and_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that lost its last writes with the power: the server has the receipt, the device knows nothing of it."""
    take_step = FedDKDDevice._check_step
    lost: list[int] = []

    def forgetful(self: FedDKDDevice, ask: Any) -> None:
        if not lost:
            lost.append(ask.round)
            self.load_state_dict({"round": 0, "step": 0, "teacher_logits": None, "samples": ""})
        take_step(self, ask)

    monkeypatch.setattr(FedDKDDevice, "_check_step", forgetful)
    store = run_in_memory(prepare(replace(SMALL, method="feddkd", rounds=2), tmp_path / "work"))
    (event,) = store.history.events(RUN, "declined")
    assert event.round == 1
    assert "needs a teacher of that round, but it has not trained yet" in event.text
    assert [row.status for row in store.runs.rounds(RUN)] == ["closed", "closed"]
    rows = [store.asks.of_step(RUN, 1, step) for step in (1, 2, 3, 4)]
    asked = [len([ask for ask in asks if ask.status == "answered"]) for asks in rows]
    assert asked == [3, 2, 3, 3], "out for the step; with its committed state, which has the teacher, it goes on"
    assert len(store.asks.of_step(RUN, 2, 2)) == 3, "not for the run"
    assert_no_upload_lost(store)


def test_a_device_that_has_gone_is_not_waited_for(tmp_path: Path) -> None:
    """Else every further step of its round would last until the deadline."""

    store = Store.in_memory()
    store.runs.begin("r", {"run": {"name": "r"}})
    store.devices.register("r", "a", b"", b"")
    store.devices.mark_absent("r", "a", "lease ended")
    store.runs.start_round("r", ["a"])
    cohort = cohort_of(store, 1)

    async def answers() -> list[Any]:
        return [answer async for answer in cohort.ask("train", quorum=0.0, to=["a"])]

    assert asyncio.run(answers()) == []
    (ask,) = store.asks.of_step("r", 1, 1)
    assert (ask.status, ask.reason) == ("out", "device not present")
    store.close()


def _go(store: Store, device: str, how: str) -> None:
    if how == "leaves":
        store.devices.mark_absent("r", device, "device left")
    else:
        revoke_device(store, device, "stolen")


@pytest.mark.parametrize("how", ["leaves", "is revoked"])
def test_device_leaving_while_its_ask_is_made_is_not_waited_for(how: str) -> None:
    """Its payload is ready, that of the next device is being made, nothing is written yet."""
    store = Store.in_memory()
    store.runs.begin("r", {"run": {"name": "r"}})
    for device in ("a", "b"):
        store.devices.register("r", device, b"", b"")
    store.devices.mark_absent("r", "b", "device left")
    store.runs.start_round("r", ["a", "b"])
    made: list[str] = []

    def payload(device: str) -> dict[str, Any]:
        made.append(device)
        if device == "b":
            assert made == ["a", "b"]
            _go(store, "a", how)
        return {}

    async def answers() -> list[Any]:
        return [answer async for answer in cohort_of(store, 1).ask("train", payload, quorum=0.0)]

    assert asyncio.run(answers()) == []
    assert [ask.status for ask in store.asks.of_step("r", 1, 1)] == ["out", "out"]
    store.close()
