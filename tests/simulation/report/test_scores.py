"""CDKT-FL's figures of a simulated fleet: hand-worked confusion matrices, and a run's report with all controls."""

from __future__ import annotations

import json
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.confusions import dense, matrix

from fleetdistill.errors import KnowledgeError
from fleetdistill.training.figures import Confusion
from fleetdistill.training.local_training import evaluate
from fleetdistill_lab.simulation.fleet import simulate
from fleetdistill_lab.simulation.report.comparison import bytes_by_round
from fleetdistill_lab.simulation.report.metrics import Margins, accuracy, f1_macro, f1_weighted, fleet_scores
from fleetdistill_lab.simulation.report.scores import fleet_figures, late_figures, margins_in_mix
from fleetdistill_lab.simulation.show import fedavg_lines, global_lines
from fleetdistill_lab.simulation.spec.score_log import START, after_rounds, append_scores, read_scores
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.engine import engine
from fleetdistill_server.store.records import Traffic

SURE_OF_0 = matrix([[10, 0], [4, 1]])  # on a test part with 10 rows of class 0 and 5 of class 1
SURE_OF_1 = matrix([[2, 8], [0, 5]])
SAMPLES = np.array([[30, 10], [0, 20]])  # device 0 has mostly class 0, device 1 class 1 only


def test_a_part_weighs_classes_as_the_device_has_them() -> None:
    """Rates are 1 and .2; device 0 has 30 and 10 samples: 30 + 2 of 40 right."""
    parts = margins_in_mix(SURE_OF_0, SAMPLES)  # [[30, 0], [8, 2]] and [[0, 0], [16, 4]]
    assert parts.hits.tolist() == [[30, 2], [0, 4]]
    assert parts.predicted.tolist() == [[38, 2], [16, 4]]
    assert parts.rows.tolist() == SAMPLES.tolist()
    assert accuracy(parts.part(0)) == pytest.approx(32 / 40)
    assert accuracy(parts.part(1)) == pytest.approx(4 / 20)


def test_figures_by_hand() -> None:
    """C-Spec: .8 and 1. C-Gen on 30 rows of class 0 and 30 of class 1: (30 + 6)/60 = .6 and (6 + 30)/60 = .6."""
    figures = fleet_figures([SURE_OF_0, SURE_OF_1], SAMPLES, SURE_OF_0)["accuracy"]
    by_samples = (32 + 20) / 60
    expected = {"global": 0.6, "c_gen": 0.6, "c_spec": 0.9, "c_spec_samples": by_samples, "c_per": 0.75}
    assert figures == pytest.approx(expected)


@pytest.mark.long
@given(
    counts_kcc=hnp.arrays(np.int64, (3, 2, 2), elements=st.integers(0, 9)),
    samples_jc=hnp.arrays(np.int64, (3, 2), elements=st.integers(0, 9)),
)
def test_figures_without_pair_matrices_equal_those_with_them(counts_kcc: Any, samples_jc: Any) -> None:
    counts_kcc[1:] = counts_kcc[:1] * [
        [[1], [2]]
    ]  # all models are scored on one test set, so the same classes have rows
    counts_kcc[2] = counts_kcc[2][:, ::-1]
    pairs = [_in_class_mix(counts_cc, samples_jc) for counts_cc in counts_kcc]
    models = [matrix(counts_cc) for counts_cc in counts_kcc]
    figures: Any = fleet_figures(models, samples_jc, models[0])
    for name, score in {"accuracy": accuracy, "f1_weighted": f1_weighted, "f1_macro": f1_macro}.items():
        expected = fleet_scores(pairs, pairs[0], score)
        result = [figures[name][item] for item in ("global", "c_gen", "c_spec", "c_spec_samples", "c_per")]
        known = [np.nan if item is None else item for item in result]
        wanted = [expected.global_, expected.c_gen, expected.c_spec, expected.c_spec_samples, expected.c_per]
        assert known == pytest.approx(wanted, nan_ok=True)


def _in_class_mix(counts_cc: Any, samples_jc: Any) -> Margins:
    """The matrices `[J, C, C]` of the definition: the rates of each class times a device's samples of it."""
    rows_c = counts_cc.sum(axis=1, keepdims=True)
    rates_cc = np.divide(counts_cc, rows_c, out=np.zeros(counts_cc.shape), where=rows_c > 0)
    mixed_jcc = samples_jc[:, :, None] * rates_cc
    return Margins(np.diagonal(mixed_jcc, axis1=1, axis2=2), mixed_jcc.sum(axis=1), mixed_jcc.sum(axis=2))


def binary(rows: int, correct: int) -> Any:
    """A model that is right on so many rows of class 0 and takes the others for class 1."""
    return matrix([[correct, rows - correct], [0, 0]])


def test_figures_on_test_rows_of_their_own_by_hand() -> None:
    """Own test sets of 10, 30 and 60 rows with 9, 24 and 30 right; on all 100 rows 40, 50 and 70."""
    own = [binary(10, 9), binary(30, 24), binary(60, 30)]
    union = [binary(100, correct) for correct in (40, 50, 70)]
    figures = fleet_figures(union, np.ones((3, 2), np.int64), binary(100, 60), own)["accuracy"]
    c_spec, c_gen = (0.9 + 0.8 + 0.5) / 3, (0.4 + 0.5 + 0.7) / 3
    expected = {"global": 0.6, "c_gen": c_gen, "c_spec": c_spec, "c_spec_samples": 0.63, "c_per": (c_gen + c_spec) / 2}
    assert figures == pytest.approx(expected)
    assert expected["c_per"] == pytest.approx(0.633333, abs=1e-6)


def test_device_without_test_rows_counts_in_c_gen_only() -> None:
    own = [binary(10, 9), None, binary(60, 30)]
    figures = fleet_figures([binary(70, 35), binary(70, 7), binary(70, 49)], SAMPLES, None, own)["accuracy"]
    assert figures["c_spec"] == pytest.approx((0.9 + 0.5) / 2)
    assert figures["c_gen"] == pytest.approx((0.5 + 0.1 + 0.7) / 3)
    nothing = fleet_figures([binary(70, 35)], SAMPLES[:1], None, [None])["accuracy"]
    assert (nothing["c_spec"], nothing["c_spec_samples"], nothing["c_per"]) == (None, None, None)


def test_f1_on_own_rows_is_of_own_rows_and_of_the_union() -> None:
    """y = 000112, predicted 001122: weighted F1 0.677778, macro 0.655556."""
    known = matrix([[2, 1, 0], [0, 1, 1], [0, 0, 1]])
    perfect = matrix(np.diag([3, 2, 1]))
    figures = fleet_figures([known], np.ones((1, 3), np.int64), known, [perfect])
    weighted = {"global": 0.677778, "c_gen": 0.677778, "c_spec": 1.0, "c_spec_samples": 1.0, "c_per": 0.838889}
    assert figures["f1_weighted"] == pytest.approx(weighted, abs=1e-6)
    assert figures["f1_macro"]["c_gen"] == pytest.approx(0.655556, abs=1e-6)


def test_f1_by_hand() -> None:
    """Device 1's model on part 1: class 1 only, all right, F1 1. Device 0's on part 0: TP 30, FP 8; TP 2, FN 8."""
    figures = fleet_figures([SURE_OF_0, SURE_OF_1], SAMPLES, None)
    first = 30 / 40 * (60 / 68) + 10 / 40 * (4 / 12)
    assert figures["f1_weighted"]["c_spec"] == pytest.approx((first + 1) / 2)
    assert figures["f1_weighted"]["global"] is None
    assert figures["f1_macro"]["c_spec"] == pytest.approx(((60 / 68 + 4 / 12) / 2 + 1) / 2)


def test_a_class_without_test_rows_counts_for_nothing() -> None:
    parts = margins_in_mix(matrix([[4, 1], [0, 0]]), np.array([[10, 90]]))
    assert accuracy(parts.part(0)) == pytest.approx(0.8)


@given(
    counts=hnp.arrays(np.int64, (3, 3), elements=st.integers(0, 50)),
    samples=hnp.arrays(np.int64, (2, 3), elements=st.integers(0, 50)),
)
def test_every_figure_is_a_rate_or_absent(counts: Any, samples: Any) -> None:
    by_score: Any = fleet_figures([matrix(counts)] * 2, samples, matrix(counts))
    for figures in by_score.values():
        assert all(value is None or 0 <= value <= 1 + 1e-12 for value in figures.values())
        assert json.loads(json.dumps(figures, allow_nan=False)) == figures


def test_the_last_line_of_a_round_counts(tmp_path: Path) -> None:
    for number, counts in ((START, SURE_OF_0), (2, SURE_OF_0), (2, SURE_OF_1)):
        append_scores(tmp_path / "scores.jsonl", "a", number, counts)
    noted = read_scores(tmp_path / "scores.jsonl")[""]["a"]
    assert {number: dense(counts) for number, counts in noted.items()} == {
        START: dense(SURE_OF_0),
        2: dense(SURE_OF_1),
    }


@given(rows=st.integers(0, 20), classes=st.integers(1, 300), seed=st.integers(0, 2**32 - 1))
def test_a_line_of_a_score_log_grows_with_the_test_rows_only(rows: int, classes: int, seed: int) -> None:
    labels = np.random.default_rng(seed).integers(0, classes, (2, rows))
    counts = Confusion.of(labels[0], labels[1], classes)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scores.jsonl"
        append_scores(file, "a", 1, counts)
        assert np.array_equal(read_scores(file)[""]["a"][1].cells, counts.cells)
        assert file.stat().st_size <= len('"device": "a", "variant": "", ') + 60 + len("[299, 299, 20], ") * rows


def test_own_rows_are_apart_in_a_score_log(tmp_path: Path) -> None:
    file = tmp_path / "scores.jsonl"
    append_scores(file, "a", 1, SURE_OF_0)
    append_scores(file, "a", 1, SURE_OF_1, own=True)
    for own, counts in ((False, SURE_OF_0), (True, SURE_OF_1)):
        assert read_scores(file, own=own)[""]["a"][1].cells.tolist() == counts.cells.tolist()


def test_device_not_taken_by_round_keeps_previous_model() -> None:
    noted = {START: SURE_OF_0, 3: SURE_OF_1}
    assert [counts is SURE_OF_1 for counts in after_rounds(noted, [1, 3, 4])] == [False, True, True]


def test_late_figures_by_hand() -> None:
    """C-Per is taken per round, then its median over rounds: (.1, .9, .5) has .5, not the mean of other medians."""
    rows = [(0.1, 0.1), (0.9, 0.9), (0.2, 0.8)]
    by_round: Any = [{"c_gen": gen, "c_spec": spec, "c_per": (gen + spec) / 2} for gen, spec in rows]
    assert late_figures(by_round) == pytest.approx(
        {"c_gen_median": 0.2, "c_spec_median": 0.8, "c_per_median": 0.5, "ua_mean": 0.6}
    )
    many: Any = [{"c_gen": 0.0, "c_spec": 0.0, "c_per": 0.0}] * 11 + [{"c_gen": 1.0, "c_spec": 1.0, "c_per": 1.0}] * 9
    assert late_figures(many)["ua_mean"] == pytest.approx(0.9)
    assert late_figures(many)["c_per_median"] == 0


@pytest.mark.parametrize("rounds", [19, 20, 21, 40])
def test_medians_are_over_exactly_the_last_20_rounds(rounds: int) -> None:
    """Round k has the figure k / 100: of rounds 21 to 40 the median is 0.305, of all 19 it is 0.1."""
    by_round: Any = [{"c_gen": k / 100, "c_spec": k / 100, "c_per": k / 100} for k in range(1, rounds + 1)]
    expected = {19: 0.1, 20: 0.105, 21: 0.115, 40: 0.305}[rounds]
    late: Any = late_figures(by_round)
    assert [late[f"{name}_median"] for name in ("c_gen", "c_spec", "c_per")] == pytest.approx([expected] * 3)
    assert late["ua_mean"] == pytest.approx((2 * rounds - 9) / 200)  # over the last 10


@pytest.mark.long
def test_fleet_figures_take_memory_per_device_and_not_per_pair() -> None:
    devices, classes, random = 1000, 10, np.random.default_rng(0)
    device_k = [matrix(counts_cc) for counts_cc in random.integers(1, 9, (devices, classes, classes))]
    samples_jc = random.integers(1, 9, (devices, classes))
    tracemalloc.start()
    try:
        fleet_figures(device_k, samples_jc, None)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 10e6, "three numbers for each pair and class are 240 MB"


def test_a_report_has_all_controls(tmp_path: Path) -> None:
    """FedAvg of the control is FedAvg: the figures of a run of its own with the same data, model and passes."""
    shared: dict[str, Any] = {"devices": 2, "train_limit": 200, "rounds": 2, "seed": 5, "alpha": 0.5}
    models = ("digits_linear", "digits_mlp_small")
    report = simulate(Simulation(method="feddkc", models=models, out=tmp_path / "a", **shared))
    alone_too: dict[str, Any] = {"with_alone": False, "models": ("digits_mlp_small",)}
    fedavg = simulate(Simulation(method="fedavg", out=tmp_path / "b", **alone_too, **shared))
    assert report.fedavg_model == "digits_mlp_small"
    assert report.mean_accuracy_fedavg_global == fedavg.mean_accuracy_fedavg_global
    assert report.mean_accuracy_fedavg_global == fedavg.global_accuracy_by_round[-1]
    assert report.mean_accuracy_fedavg_device == pytest.approx(fedavg.mean_accuracy_trained)
    assert report.mean_own_accuracy_fedavg_device == pytest.approx(fedavg.mean_own_accuracy_trained)
    assert report.scores["fedavg"] == fedavg.scores["fleet"]
    assert report.scores["fleet"]["accuracy"]["c_spec"] == pytest.approx(report.mean_own_accuracy_trained)
    assert report.scores["alone"]["accuracy"]["c_spec"] == pytest.approx(report.mean_own_accuracy_alone)
    own = [(device.own_accuracy_alone, device.own_accuracy_fleet) for device in report.devices]
    means = (report.mean_own_accuracy_alone, report.mean_own_accuracy_fleet)
    assert means == pytest.approx(tuple(np.mean(own, axis=0)))  # type: ignore[arg-type]
    for direction in ("up", "down"):
        total = sum(getattr(device, f"bytes_{direction}") for device in report.devices) / len(report.devices)
        assert sum(item[direction] for item in report.bytes_by_round) == pytest.approx(total)
    assert [sorted(item) for item in report.bytes_by_round] == [["down", "up"]] * 2
    assert "digits_mlp_small on every device (sgd 0.02, 2 local epochs)" in fedavg_lines(report)[0]
    assert fedavg_lines(fedavg) == []
    assert f"{fedavg.global_accuracy_by_round[-1] or 0:.1%}" in global_lines(fedavg)[0]
    assert global_lines(report) == []
    saved = json.loads((tmp_path / "a" / "report.json").read_text())
    assert saved["mean_accuracy_fedavg_global"] == report.mean_accuracy_fedavg_global


def test_bytes_between_completed_rounds_count_with_the_next_one() -> None:
    """Round 2 fell short; 0 is what no round asked for."""

    def row(number: int, device: str, direction: str, size: int) -> Traffic:
        return Traffic(number, device, direction, "", 1, tensor_bytes=size, envelope_bytes=1, sent_bytes=size)

    traffic = [row(0, "a", "down", 9), row(1, "a", "up", 5), row(2, "b", "up", 7), row(3, "a", "up", 3)]
    assert bytes_by_round(traffic, [1, 3], devices=2) == [{"up": 3.0, "down": 5.0}, {"up": 6.0, "down": 0.0}]


def test_no_controls(tmp_path: Path) -> None:
    report = simulate(
        Simulation(
            method="feddkc", devices=2, train_limit=100, rounds=1, with_alone=False, with_fedavg=False, out=tmp_path
        )
    )
    assert (report.mean_accuracy_alone, report.mean_accuracy_fedavg_global, report.fedavg_model) == (None, None, None)
    assert set(report.scores) == {"fleet"}


@pytest.mark.long
@pytest.mark.parametrize("method", ["fedd2s", "dafkd"])
def test_devices_never_taken_are_scored_and_train_alone_as_often(tmp_path: Path, method: str) -> None:
    """One of four devices a round, two rounds: at least two devices never take part and keep their first model."""
    wanted = Simulation(
        method=method,
        devices=4,
        rounds=2,
        train_limit=200,
        alpha=1.0,
        settings={"participation_ratio": 0.25},
        with_fedavg=False,
        score="devices",
        out=tmp_path,
    )
    report = simulate(wanted)
    idle = [device for device in report.devices if len(set(report.alone_accuracy_by_round[device.name])) == 1]
    assert len(idle) >= 2
    for item in idle:
        assert len(set(report.accuracy_by_round[item.name])) == 1
        assert item.accuracy_alone == item.accuracy_trained == report.accuracy_by_round[item.name][0]
    json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)


def test_round_with_unscorable_global_model_is_undone_and_redone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finite weights can be so large that logits are not."""
    scored: list[Any] = []

    def once_not_finite(*given: Any) -> Any:
        scored.append(given)
        if len(scored) == 1:
            raise KnowledgeError("logits are not finite")
        return evaluate(*given)

    monkeypatch.setattr(engine, "evaluate", once_not_finite)
    wanted = Simulation(method="fedavg", devices=2, train_limit=100, rounds=2, with_alone=False, out=tmp_path)
    report = simulate(wanted)
    assert len(scored) == 3
    assert None not in report.global_accuracy_by_round
    for rates in report.delivered_accuracy_by_round.values():
        assert rates == pytest.approx(report.global_accuracy_by_round)
