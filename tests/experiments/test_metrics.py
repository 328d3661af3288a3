"""The metrics of an experiment are of the models that their titles name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from sklearn.metrics import accuracy_score, f1_score

from fleetdistill_lab import Simulation, simulate
from fleetdistill_lab.experiments.metrics import METRICS, Report, Target, read_metrics


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose devices end with another model than that of their last training."""
    folder = tmp_path_factory.mktemp("metrics") / "out"
    simulate(
        Simulation(
            method="fedavg",
            models=("digits_mlp_small",),
            devices=10,
            partition="class_shards",
            classes_per_device=2,
            rounds=2,
            with_alone=False,
            with_fedavg=False,
            out=folder,
        )
    )
    return folder


@pytest.fixture(scope="module")
def report(out: Path) -> Report:
    result: Report = json.loads((out / "report.json").read_text())
    return result


def test_spread_is_that_of_the_accuracies_whose_mean_is_printed(report: Report) -> None:
    rates = np.array([device["own_accuracy_fleet"] for device in report["devices"]])
    found = read_metrics(report, None)
    assert found["own_accuracy"] == pytest.approx(rates.mean())
    assert found["own_worst"] == pytest.approx(rates.min())  # a tenth of ten devices
    assert found["own_std"] == pytest.approx(rates.std())
    assert found["own_jain"] == pytest.approx(rates.sum() ** 2 / (10 * (rates**2).sum()))
    trained = np.array([device["own_accuracy_trained"] for device in report["devices"]])
    assert trained.min() > rates.min(), "the models after local training are others"


def test_f1_is_that_of_the_model_at_the_end_on_the_test_set(out: Path, report: Report) -> None:
    """All devices end with the global model; the file of one of them gives the same."""
    (file,) = (out / "onnx").glob("*.onnx")
    with np.load(out / "work" / "test.npz") as test:
        inputs, labels = test["inputs"], test["labels"]
    predicted = onnxruntime.InferenceSession(file).run(["logits"], {"input": inputs.astype(np.float32)})[0].argmax(1)
    found = read_metrics(report, None)
    assert found["accuracy"] == pytest.approx(accuracy_score(labels, predicted))
    present = sorted({*labels.tolist(), *predicted.tolist()})
    for name in ("macro", "weighted"):
        expected = f1_score(labels, predicted, average=name, labels=present, zero_division=0)
        assert found[f"f1_{name}"] == pytest.approx(expected)
    assert found["c_gen_f1_macro"] != pytest.approx(found["f1_macro"])


def test_last_rounds_have_a_median_and_quartiles(report: Report) -> None:
    curves = [dict(zip(("c_gen", "c_spec", "c_per"), of, strict=True)) for of in ((0.2, 0.9, 0.5), (0.4, 0.8, 0.7))]
    given = {**report, "figures_by_round": curves, "global_accuracy_by_round": [0.1, *[0.3] * 10, *[0.7] * 10]}
    found = read_metrics(given, None)
    assert [found[f"{name}_median"] for name in ("global", "c_gen", "c_spec", "c_per")] == pytest.approx(
        [0.5, 0.3, 0.85, 0.6]
    )
    assert [found[f"{name}_quartiles"] for name in ("global", "c_gen", "c_spec", "c_per")] == pytest.approx(
        [0.4, 0.1, 0.05, 0.1]
    )


def test_targets_may_be_of_a_data_set(report: Report) -> None:
    given = {**report, "global_accuracy_by_round": [0.5, 0.9, 0.8]}
    target = Target(level={"mnist": 0.2, "digits": 0.6}, second_level=0.95)
    found = read_metrics(given, target)
    assert (found["rounds_to_target"], found["rounds_to_second_target"]) == (2, None)
    found = read_metrics(given, Target(level=0.9, second_level={"digits": 0.5}))
    assert (found["rounds_to_target"], found["rounds_to_second_target"]) == (2, 1)


def test_f1_of_each_figure_is_read(report: Report) -> None:
    found, scores = read_metrics(report, None), report["scores"]["fleet"]
    for name in ("global", "c_gen", "c_spec", "c_per"):
        for mean in ("weighted", "macro"):
            assert found[f"{name}_f1_{mean}"] == scores[f"f1_{mean}"][name] is not None
    assert found["c_spec_samples"] == scores["accuracy"]["c_spec_samples"] is not None


def test_titles_name_the_model() -> None:
    for name in ("accuracy", "own_accuracy", "own_worst", "own_jain", "f1_macro", "f1_weighted"):
        assert "model at the end" in METRICS[name].title
