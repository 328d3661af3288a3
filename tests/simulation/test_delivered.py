"""What is delivered is what is scored: the accuracy beside a file is that file's, in the end and round after round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
from support.confusions import matrix

from fleetdistill.methods.classstats.exchange import PersonalVariant
from fleetdistill_lab.simulation.data.datasets import load_dataset
from fleetdistill_lab.simulation.fleet import simulate
from fleetdistill_lab.simulation.report.history import read_history
from fleetdistill_lab.simulation.report.results import FleetReport
from fleetdistill_lab.simulation.spec.device import DeviceSpec
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_lab.simulation.spec.score_log import PRODUCT, START, append_scores
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.store.store import Store

SMALL: dict[str, Any] = {"devices": 2, "train_limit": 120, "alpha": 0.3, "with_alone": False, "with_fedavg": False}
BN: dict[str, Any] = {"variant": "bn", "local_epochs": 1, "dkd_lr": 0.5, "divergence_guard": False}


def run(out: Path, method: str, rounds: int = 2, **more: Any) -> FleetReport:
    return simulate(Simulation(method=method, rounds=rounds, out=out, **{**SMALL, **more}))


def accuracy_of(file: Path) -> float:
    data = load_dataset("digits", None, train_limit=None, image_size=None, seed=0)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"input": data.test_images.numpy()})
    return float((logits.argmax(axis=1) == data.test_labels.numpy()).mean())


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("feddkd", BN),
        ("feddkc", {}),
        *(
            pytest.param(method, settings, marks=pytest.mark.long)
            for method, settings in (
                ("fedavg", {}),
                ("feddkd", {"local_epochs": 1}),
                ("dafkd", {"local_epochs": 1, "kd_samples": 64, "generator": "digits_generator", "kd_start_round": 1}),
            )
        ),
    ],
)
def test_the_accuracy_beside_a_file_is_the_files(method: str, settings: dict[str, Any], tmp_path: Path) -> None:
    share = 0.2 if method == "feddkc" else 0.0
    report = run(tmp_path, method, settings=settings, validation_share=share, score="devices", export="all")
    for device in report.devices:
        assert device.accuracy_fleet == pytest.approx(accuracy_of(tmp_path / device.onnx_file), abs=1e-9)  # type: ignore[operator]
        if method == "feddkc":
            continue
        assert device.accuracy_fleet == pytest.approx(report.delivered_accuracy_by_round[device.name][-1], abs=1e-9)
        if settings.get("variant") != "bn":
            assert report.delivered_accuracy_by_round[device.name] == pytest.approx(report.global_accuracy_by_round)
    assert (report.delivered_accuracy_by_round == {}) == (method == "feddkc")


@pytest.mark.long
@pytest.mark.parametrize("score", ["sampled", "devices"])
@pytest.mark.parametrize("method", ["fedavg", "feddkc"])
def test_devices_without_a_file_have_the_same_accuracy(method: str, score: str, tmp_path: Path) -> None:
    every = run(tmp_path / "every", method, score=score, export="all")
    first = run(tmp_path / "first", method, score=score, export=1)
    assert [device.onnx_file for device in first.devices] == ["onnx/device-0.onnx", None]
    result, expected = ([device.accuracy_fleet for device in of.devices] for of in (first, every))
    assert result == pytest.approx(expected, abs=1e-9)


@pytest.mark.long
def test_feddkd_bn_is_scored_with_the_steps_in_every_round(tmp_path: Path) -> None:
    """Without steps and with three: the same local training in round 1, another product in each round."""
    reports = [run(tmp_path / str(j), "feddkd", settings={**BN, "dkd_steps": j}) for j in (0, 3)]
    for number in (0, 1):
        without, with_steps = (
            [rates[number] for rates in report.delivered_accuracy_by_round.values()] for report in reports
        )
        assert without != with_steps
    for report in reports:
        assert report.accuracy_by_round == report.delivered_accuracy_by_round
        assert [device.accuracy_trained for device in report.devices] == [
            device.accuracy_fleet for device in report.devices
        ]


def test_round_delivery_counts_for_the_completed_round_before_it(tmp_path: Path) -> None:
    """Rounds 1, 3 and 4 complete, 2 falls short: its ask brought what round 1 made, and the result is round 4's."""
    store = three_rounds("feddkd", {1: 1, 3: 1, 4: 1})
    spec = DeviceSpec("a", "", 0, 2, "", "", str(tmp_path / "a"), RUN)
    append_scores(spec.scores_file, "a", START, matrix([[0]]))
    for before, value in ((0, 10), (1, 20), (2, 30), (3, 40), (4, 50)):
        append_scores(spec.scores_file, "a", before, matrix([[value]]), PRODUCT)
    history = read_history(store, RUN, [spec])
    assert cells(history.products["a"]) == [30, 40, 50]
    spec.scores_file.unlink()
    append_scores(spec.scores_file, "a", START, matrix([[0]]))
    append_scores(spec.scores_file, "a", 0, matrix([[10]]), PRODUCT)
    assert cells(read_history(store, RUN, [spec]).products["a"]) == [10, 10, 10]
    assert cells(history.devices["a"]) == [0, 0, 0]


def test_fedavgs_devices_have_the_engines_scores(tmp_path: Path) -> None:
    """Every device receives the global model, whose score may be missing for a round."""
    store = three_rounds("fedavg", {1: 5, 3: None, 4: 7})
    specs = [DeviceSpec(name, "", 0, 2, "", "", str(tmp_path / name), RUN) for name in "ab"]
    specs[0].scores_file.touch()
    history = read_history(store, RUN, specs)
    assert [cells(history.products[name]) for name in "ab"] == [[5, None, 7]] * 2
    assert {name: counts.count for name, counts in history.delivered.items()} == {"a": 7, "b": 7}
    assert cells(history.devices["a"]) == [None] * 3, "no training was scored"
    choosing = [replace(spec, validation_file="chooses") for spec in specs]
    assert read_history(store, RUN, choosing).products == {}, "a device that chooses may keep its model"


def three_rounds(method: str, scores: Mapping[int, Any]) -> Store:
    """A store of rounds 1, 3 and 4, of which round 2 fell short; with the global model's matrices of one cell."""
    store = Store.in_memory()
    store.runs.begin(RUN, {"run": {"name": RUN, "method": method, "rounds": 3}})
    for number in (1, 2, 3, 4):
        assert store.runs.start_round(RUN, ["a"]) == number
        if number == 2:
            store.runs.close_short_round(RUN, number, "nobody")
        else:
            figures = {} if scores[number] is None else {"global_confusion": [[0, 0, scores[number]]]}
            store.runs.close_round(RUN, number, b"", [], figures)
    return store


def cells(matrices: Sequence[Any]) -> list[int | None]:
    """The only cell of each matrix."""
    return [None if counts is None else counts.count for counts in matrices]


@pytest.mark.long
@pytest.mark.parametrize("share", [0.0, 0.3], ids=["takes", "chooses"])
def test_a_personal_model_changes_its_predictor(share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the trained one to the closed form of the device's own statistics and back, with the fleet's classes."""
    kept: list[bool] = []

    def better(fleets: PersonalVariant, local: PersonalVariant | None) -> PersonalVariant:
        is_local = local is not None and bool((len(fleets.hits) + int(fleets.space.df)) % 2)
        kept.append(is_local)
        return local if local is not None and is_local else fleets

    monkeypatch.setattr("fleetdistill.methods.classstats.exchange._better", better)
    wanted = {"predictors": ("space_linear", "space_mlp_16"), "validation_share": share, "export": "all"}
    settings = {"predictor": "trained", "predictor_steps": 5}
    kinds = {"devices": 3, "devices_per_round": 1, "train_limit": 150, "test_limit": 20, "alpha": 0.5}
    report = run(tmp_path, "classstats", rounds=6, settings=settings, **wanted, **kinds)
    assert {True, False} <= set(kept)
    assert report.finished
