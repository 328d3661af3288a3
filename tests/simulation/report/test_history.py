"""Which rounds a device took part in: what it noted, held against the receipts in the store."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.confusions import dense, matrix
from support.fleets import SMALL, prepare, run_in_memory

from fleetdistill_lab.simulation.report.history import read_history
from fleetdistill_lab.simulation.spec.device import DeviceSpec
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_lab.simulation.spec.score_log import START, append_scores
from fleetdistill_server.store.records import Ask
from fleetdistill_server.store.store import Store

FIRST, SECOND, THIRD = (matrix(np.full((2, 2), number)) for number in range(3))


def store_of(method: str, rounds: int) -> Store:
    store = Store.in_memory()
    store.runs.begin(RUN, {"run": {"name": RUN, "method": method, "rounds": rounds}})
    return store


def answered_round(store: Store, steps: list[tuple[str, bool]], *, use: bool = True) -> None:
    """A completed round of device `a`: its steps, and whether it has a receipt for each."""
    number = store.runs.start_round(RUN, ["a"])
    for step_number, (step, receipt) in enumerate(steps, start=1):
        row: dict[str, Any] = {
            "run": RUN,
            "round": number,
            "step_number": step_number,
            "device": "a",
            "step": step,
            "expects": {},
        }
        store.asks.add([Ask(**row, seed=1, deadline_at=1e12)])
        if receipt:
            store.asks.accept_upload(store.asks.of_step(RUN, number, step_number)[0].id, 1, b"", 1, 1)
    used = [row.ask for row in store.asks.uploads(RUN) if use]
    store.runs.close_round(RUN, number, b"", used, {})


def device_a(tmp_path: Path) -> DeviceSpec:
    """It noted a score in both rounds."""
    spec = DeviceSpec("a", "", 0, 2, "", "", str(tmp_path / "a"), RUN)
    for number, confusion in ((START, FIRST), (1, SECOND), (2, THIRD)):
        append_scores(spec.scores_file, "a", number, confusion)
    return spec


def test_score_without_receipt_is_of_a_model_the_device_lacks(tmp_path: Path) -> None:
    store = store_of("feddkc", 2)
    answered_round(store, [("train", False)])
    answered_round(store, [("train", True)])
    history = read_history(store, RUN, [device_a(tmp_path)])
    assert history.took_part == {"a": [False, True]}
    assert [None if item is None else dense(item) for item in history.devices["a"]] == [dense(FIRST), dense(THIRD)]


def test_answer_unused_by_round_has_trained_device_all_the_same(tmp_path: Path) -> None:
    store = store_of("feddkc", 2)
    for use in (False, True):
        answered_round(store, [("train", True)], use=use)
    assert read_history(store, RUN, [device_a(tmp_path)]).took_part == {"a": [True, True]}


def test_the_step_that_is_scored_decides(tmp_path: Path) -> None:
    """FedD2S trains in its second step: what it answered to the first does not tell."""
    store = store_of("fedd2s", 2)
    answered_round(store, [("extract", True), ("learn", False)])
    answered_round(store, [("extract", True), ("learn", True)])
    assert read_history(store, RUN, [device_a(tmp_path)]).took_part == {"a": [False, True]}


def test_further_answer_counts_from_first_round_with_receipt(tmp_path: Path) -> None:
    store, spec = store_of("classstats", 4), device_a(tmp_path)
    for receipt in (True, False, True, False):
        answered_round(store, [("learn", receipt)])
    for number in (2, 3, 4):
        append_scores(spec.scores_file, "a", number, matrix(np.full((2, 2), number)), "personal")
    result = read_history(store, RUN, [spec]).further["personal"]["a"]
    assert [item if item is None else dense(item) for item in result] == [None, None, [[3, 3]] * 2, [[3, 3]] * 2]


@pytest.mark.parametrize("method", ["fedavg", "fedd2s"])
def test_undisturbed_run_has_every_device_in_every_round(method: str, tmp_path: Path) -> None:
    prepared = prepare(replace(SMALL, method=method), tmp_path / "work")
    store = run_in_memory(prepared)
    assert set(map(json.dumps, read_history(store, RUN, prepared[1]).took_part.values())) == {"[true, true]"}
