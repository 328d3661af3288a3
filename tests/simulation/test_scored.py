"""`score`, `score_every` and `score_rows`: which models a simulation scores, when, and on which rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from support.fleets import MECHANISMS, REPRODUCIBLE, ROUNDS_OF_ANY_SIZE, RUNS, SMALL
from support.long import long_except

from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import DELIVER
from fleetdistill_lab.simulation.checks import check_settings
from fleetdistill_lab.simulation.data.datasets import load_dataset
from fleetdistill_lab.simulation.fleet import simulate
from fleetdistill_lab.simulation.folder import saved_simulation
from fleetdistill_lab.simulation.report.results import FleetReport
from fleetdistill_lab.simulation.show import scored_line
from fleetdistill_lab.simulation.spec.arrays import load_arrays
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.store.store import Store

ROUNDS = 5
EACH = set(range(1, ROUNDS + 1))
FLEET = replace(
    SMALL, devices=4, devices_per_round=2, rounds=ROUNDS, train_limit=120, test_limit=40, models=("digits_linear",)
)


def known(by_device: Mapping[str, Sequence[float | None]]) -> set[int]:
    """Rounds in which any device has an accuracy."""
    return {number for rates in by_device.values() for number, rate in enumerate(rates, 1) if rate is not None}


def trained_in(out: Path) -> dict[str, set[int]]:
    """The rounds that each device answered, but for the delivery at the end."""
    result: dict[str, set[int]] = {}
    with closing(Store.open(out / "work" / "store")) as store:
        for row in store.asks.uploads(RUN):
            if row.step != DELIVER:
                result.setdefault(row.device, set()).add(row.round)
    return result


@pytest.mark.parametrize("method", long_except(["feddkc", "fedavg", "feddkd"], "fedavg"))
@pytest.mark.parametrize(
    ("score", "every", "devices", "whole"),
    [
        ("devices", None, EACH, EACH),
        pytest.param("devices", 3, {3, 5}, EACH, marks=pytest.mark.long),
        pytest.param("sampled", None, EACH, EACH, marks=pytest.mark.long),
        ("sampled", 2, {2, 4, 5}, EACH),
        pytest.param("sampled", 9, {5}, EACH, marks=pytest.mark.long),
        ("global", None, set(), EACH),
        ("global", 2, set(), {2, 4, 5}),
        ("none", None, set(), set()),
    ],
)
def test_models_are_scored_in_the_rounds_asked_for(
    tmp_path: Path, method: str, score: Any, every: int | None, devices: set[int], whole: set[int]
) -> None:
    wanted = replace(FLEET, method=method, score=score, score_every=every, with_alone=True, out=tmp_path)
    if (method, score) == ("feddkc", "global"):
        pytest.skip("feddkc has no global model; see the next test")
    report = simulate(wanted)
    assert known(report.accuracy_by_round) <= devices
    assert known(report.alone_accuracy_by_round) == devices
    assert known({"": report.global_accuracy_by_round}) == (set() if method == "feddkc" else whole)
    if method == "feddkd":
        assert known(report.delivered_accuracy_by_round) == devices
    if score == "devices":
        assert all(None not in (rates[number - 1] for number in devices) for rates in report.accuracy_by_round.values())
    expected = {"models": score, "every": every or 1, "rows": 40 if devices else 0, "test_rows": 40}
    assert report.scored == expected
    written = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert written["scored"] == expected
    assert f"--score {score}" in scored_line(report)
    part = trained_in(tmp_path)
    for device in report.devices:
        has_part = device.name in part and bool(devices)
        assert (device.accuracy_fleet is not None) >= has_part
        assert (device.own_accuracy_fleet is None) == (device.accuracy_fleet is None)
        assert (device.accuracy_alone is not None) == bool(devices)
        if not devices:
            assert device.accuracy_fleet is device.accuracy_trained is None
    assert (report.mean_accuracy_fleet is not None) == bool(devices)
    assert (report.mean_accuracy_alone is not None) == bool(devices)


WITHOUT_GLOBAL_MODEL = {
    *("feddkc", "fedgkt", "fedict"),  # the server's model reads features
    *("fedd2s", "fedper", "fedrep", "fedper_plus", "fedrep_plus"),  # heads stay on the devices
    *("fd", "fedmd", "fedproto", "no_transfer"),  # devices exchange no models
    "fedbn",  # of a model with batch-norm, as the usual one
}


@pytest.mark.parametrize(
    "name", long_except(RUNS, "fedavg", "feddkc", "feddkd with batch-norm on devices", long=MECHANISMS)
)
def test_score_global_scores_a_model_or_is_refused(name: str, tmp_path: Path) -> None:
    """Before anything is written, with the methods that have one."""
    wanted = replace(RUNS[name], score="global", out=tmp_path / "out")
    if wanted.method in WITHOUT_GLOBAL_MODEL or wanted.settings.get("variant") == "bn":
        says = f"which {wanted.method} with these settings does not have; use score sampled or devices.*: .*fedavg"
        with pytest.raises(ConfigurationError, match=says):
            simulate(wanted)
        assert not wanted.out.exists()
    else:
        assert None not in simulate(wanted).global_accuracy_by_round


@pytest.mark.parametrize("method", long_except(REPRODUCIBLE, "fedavg", "feddkc", long=MECHANISMS))
def test_sampled_short_run_has_all_figures_of_trained_devices(tmp_path: Path, method: str) -> None:
    """At most ten rounds on at most 1,000 rows: nothing is left out but models that never trained."""
    wanted = replace(RUNS[method], devices=4, devices_per_round=2, train_limit=max(RUNS[method].train_limit or 0, 160))
    sampled, each = (simulate(replace(wanted, score=score, out=tmp_path / score)) for score in ("sampled", "devices"))
    part = trained_in(tmp_path / "sampled")
    assert part == trained_in(tmp_path / "devices")
    for one, other in zip(sampled.devices, each.devices, strict=True):
        if one.name in part:
            assert replace(one, onnx_file=None) == replace(other, onnx_file=None)
        first = min(part.get(one.name, {wanted.rounds_to_complete + 1})) - 1  # rounds before its first training
        for field in ("accuracy_by_round", "alone_accuracy_by_round"):
            rates, expected = (getattr(report, field).get(one.name, [])[first:] for report in (sampled, each))
            assert rates == expected
        if sampled.delivered_accuracy_by_round != sampled.accuracy_by_round:
            assert sampled.accuracy_by_round[one.name][:first] == [None] * first
    assert sampled.global_accuracy_by_round == each.global_accuracy_by_round
    assert sampled.bytes_by_round[:-1] == each.bytes_by_round[:-1]
    down = (report.bytes_by_round[-1]["down"] for report in (sampled, each))
    assert next(down) == next(down), "also of devices that did not take the final model"


@pytest.mark.parametrize("name", long_except(ROUNDS_OF_ANY_SIZE, "fedavg", "feddkc", long=MECHANISMS))
def test_each_device_that_trained_is_scored_at_the_end(name: str, tmp_path: Path) -> None:
    """Whatever rounds it trained in; with its further variants, if it has some."""
    rows = max(RUNS[name].train_limit or 0, 160)
    wanted = replace(RUNS[name], devices=4, devices_per_round=1, train_limit=rows, rounds=5, score_every=4)
    report = simulate(replace(wanted, out=tmp_path))
    part = trained_in(tmp_path)
    assert any(not rounds & {4, 5} for rounds in part.values()), "a device that trained in no scored round"
    for device in report.devices:
        if device.name in part:
            assert device.accuracy_fleet is not None, device.name
            assert device.further.keys() == report.further.keys()


@pytest.mark.long
def test_device_without_a_part_has_no_accuracy_unless_asked_for(tmp_path: Path) -> None:
    wanted = replace(FLEET, method="feddkc", devices=6, rounds=2)
    reports = {score: simulate(replace(wanted, score=score, out=tmp_path / score)) for score in ("sampled", "devices")}
    part = trained_in(tmp_path / "sampled")
    idle = [device for device in reports["sampled"].devices if device.name not in part]
    assert len(idle) >= 2
    for device in idle:
        assert device.accuracy_fleet is device.accuracy_trained is device.own_accuracy_fleet is None
        assert reports["sampled"].accuracy_by_round[device.name] == [None, None]
        (first,) = set(reports["devices"].accuracy_by_round[device.name])
        assert first is not None
    rates = [device.accuracy_fleet for device in reports["sampled"].devices if device.name in part]
    assert reports["sampled"].mean_accuracy_fleet == pytest.approx(np.mean(rates))  # type: ignore[arg-type]


def test_alone_is_a_mean_over_the_devices_of_the_fleet_s_mean(tmp_path: Path) -> None:
    report = simulate(replace(FLEET, method="feddkc", devices=6, rounds=2, with_alone=True, out=tmp_path))
    alone = {name: float(rates[-1] or 0) for name, rates in report.alone_accuracy_by_round.items()}
    scored = [alone[device.name] for device in report.devices if device.accuracy_fleet is not None]
    assert np.mean(scored) != pytest.approx(np.mean(list(alone.values())))  # of all six
    assert report.mean_accuracy_alone == pytest.approx(np.mean(scored))
    assert [row.accuracy for row in report.comparison if row.name == "alone"] == [report.mean_accuracy_alone]


ONE_KIND: dict[str, Any] = {"devices": 8, "devices_per_round": 2, "train_limit": 240, "predictors": ("space_linear",)}
"""Of eight devices that differ in their rows only, the first one checks in, and some are never made."""
KINDS = ("fedavg", "feddkc", "feddkd", "feddkd with batch-norm on devices", "dafkd", "fedd2s", "classstats")


def one_kind(name: str, **changes: Any) -> Simulation:
    return replace(RUNS[name], **{**ONE_KIND, "models": RUNS[name].models or ("digits_mlp_small",), **changes})


@pytest.mark.parametrize("name", long_except(KINDS, "fedavg"))
@pytest.mark.parametrize("share", [0.0, 0.25], ids=["takes", "chooses"])
def test_all_devices_scores_are_those_of_real_devices(name: str, share: float, tmp_path: Path) -> None:
    """A durable simulation makes all its devices, and each gets the result of the run."""
    wanted = one_kind(name, score="devices", validation_share=share)
    fast, real = (simulate(replace(wanted, durable=durable, out=tmp_path / str(durable))) for durable in (False, True))
    assert len(trained_in(tmp_path / "False")) < 8
    for field in ("accuracy_by_round", "delivered_accuracy_by_round", "global_accuracy_by_round"):
        assert getattr(fast, field) == getattr(real, field), field
    for one, other in zip(fast.devices, real.devices, strict=True):
        for field in ("accuracy_fleet", "accuracy_trained", "own_accuracy_fleet", "own_accuracy_trained", "further"):
            assert getattr(one, field) == getattr(other, field), (one.name, field)
    assert fast.scores == real.scores


@pytest.mark.parametrize("name", long_except(KINDS, "fedavg", "feddkc", "fedd2s"))
def test_sampled_treats_all_devices_without_a_part_alike(name: str, tmp_path: Path) -> None:
    """Whether or not they were made to check in for others."""
    report = simulate(one_kind(name, seed=1, out=tmp_path))
    part = trained_in(tmp_path)
    idle = [device for device in report.devices if device.name not in part]
    assert "device-0" in [device.name for device in idle], "the first one"
    assert len({device.accuracy_fleet is None for device in idle}) == 1
    assert len({device.accuracy_trained is None for device in idle}) == 1


@pytest.mark.parametrize("rounds", [1, 9, 10, 11, 20, 21, 200])
def test_sampled_scores_devices_in_at_most_ten_rounds(rounds: int) -> None:
    every = Simulation(rounds=rounds).rounds_between_scores
    scored = {number for number in range(1, rounds + 1) if number % every == 0 or number == rounds}
    assert rounds == len(scored) if rounds <= 10 else 5 < len(scored) <= 10
    assert Simulation(rounds=rounds, score="devices").rounds_between_scores == 1
    assert Simulation(rounds=rounds, score="global").rounds_between_scores == 1
    assert Simulation(rounds=rounds, score_every=3).rounds_between_scores == 3


@pytest.mark.parametrize(
    ("score", "rows", "of", "expected"),
    [
        ("sampled", None, 999, 999),
        ("sampled", None, 10_000, 1_000),
        ("sampled", 5_000, 10_000, 5_000),
        ("devices", None, 10_000, 10_000),
        ("devices", 100, 10_000, 100),
        ("devices", 100, 60, 60),
    ],
)
def test_device_models_are_scored_on_so_many_rows(score: Any, rows: int | None, of: int, expected: int) -> None:
    assert Simulation(score=score, score_rows=rows).rows_scored(of) == expected


def parted(out: Path, **changes: Any) -> tuple[FleetReport, np.ndarray, np.ndarray]:
    """A simulation that scores devices on a part of 200 rows; with the labels of that part, and of all rows."""
    report = simulate(replace(FLEET, method="feddkc", rounds=2, test_limit=200, out=out, **changes))
    labels, whole = (load_arrays(out / "work" / name)[1] for name in ("scored.npz", "test.npz"))
    return report, labels, whole


@pytest.mark.long
def test_scored_rows_have_the_classes_of_the_test_set(tmp_path: Path) -> None:
    report, labels, whole = parted(tmp_path / "one", score_rows=50)
    assert (len(labels), len(whole)) == (50, 200)
    counts, of = np.bincount(labels, minlength=10), np.bincount(whole, minlength=10)
    assert np.all(np.abs(counts - of / 4) <= 1)
    assert report.scored == {"models": "sampled", "every": 1, "rows": 50, "test_rows": 200}
    assert "50 of the 200 test rows, drawn by class" in scored_line(report)
    for device in report.devices:
        assert device.accuracy_fleet is None or (50 * device.accuracy_fleet) % 1 == pytest.approx(0, abs=1e-9)
    again, same, _ = parted(tmp_path / "again", score_rows=50)
    assert np.array_equal(labels, same)
    assert again.accuracy_by_round == report.accuracy_by_round
    assert again.global_accuracy_by_round == report.global_accuracy_by_round
    assert not np.array_equal(labels, parted(tmp_path / "other", score_rows=50, seed=1)[1])


def test_the_global_model_is_scored_on_all_rows(tmp_path: Path) -> None:
    few, whole = (
        simulate(replace(FLEET, method="fedavg", rounds=2, score_rows=rows, out=tmp_path / str(rows)))
        for rows in (10, 40)
    )
    assert few.global_accuracy_by_round == whole.global_accuracy_by_round
    assert None not in few.global_accuracy_by_round
    assert few.accuracy_by_round != whole.accuracy_by_round
    assert not (tmp_path / "40" / "work" / "scored.npz").exists(), "those are all rows"


@pytest.mark.long
def test_scores_leave_the_training_as_it_is(tmp_path: Path) -> None:
    """Whatever is scored, the same checkpoint and the same bytes of knowledge; figures travel in the envelopes."""
    checkpoints, tensors = set(), list[Any]()
    for score in ("sampled", "devices", "global", "none"):
        report = simulate(replace(FLEET, method="cdkt", rounds=2, score=score, out=tmp_path / score))
        with closing(Store.open(tmp_path / score / "work" / "store")) as store:
            checkpoints.add(store.runs.existing(RUN).checkpoint)
        tensors.append([(row["direction"], row["kind"], row["tensor_bytes"]) for row in report.traffic])
    assert len(checkpoints) == 1
    assert tensors == tensors[:1] * 4


def test_control_without_device_scores_compares_global_models(tmp_path: Path) -> None:
    wanted = replace(FLEET, method="cdkt", rounds=2, score="global", with_fedavg=True, with_alone=True, out=tmp_path)
    report = simulate(wanted)
    assert report.mean_accuracy_fedavg_global is not None
    assert report.mean_accuracy_fedavg_device is None
    assert report.mean_accuracy_alone is None
    assert None not in report.global_accuracy_by_round
    json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)


# --- values


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"score": "all"}, "score is 'all', must be sampled, devices, global or none"),
        ({"score_every": 0}, "score_every is 0, must be at least 1"),
        ({"score_every": -2}, "score_every is -2"),
        ({"score_rows": 0}, "score_rows is 0, must be at least 1"),
        ({"score": "global", "score_rows": 10}, "score_rows counts rows for device models, which score global omits"),
        ({"score": "none", "score_rows": 10}, "which score none omits"),
        ({"export": "some"}, "export is 'some', must be one, best, all, none, or a number"),
        ({"export": 0}, "export is 0, must be"),
        ({"export": -1}, "export is -1, must be"),
        ({"export": "-1"}, "export is -1, must be"),
        ({"score": "global", "export": "best"}, "export best needs the accuracy of device models"),
        ({"score": "none", "export": "best"}, "which score none omits"),
        ({"top_k": 0}, "top_k is 0, must be at least 1"),
        ({"top_k": 5, "score": "none"}, "top_k needs models that are scored"),
    ],
)
def test_value_out_of_range_is_refused_before_any_writing(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as refused:
        check_settings(replace(FLEET, **changes))
    assert says in str(refused.value)
    with pytest.raises(ConfigurationError):
        simulate(replace(FLEET, out=tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()


# --- top k


def top_5_of(path: Path, file: Path) -> float:
    """The accuracy of an exported model, by FedDKC's rule."""
    inputs, labels = load_arrays(file)
    session = onnxruntime.InferenceSession(path)
    (logits,) = session.run(None, {session.get_inputs()[0].name: inputs})
    own = logits[np.arange(len(labels)), labels]
    return float(np.mean((logits > own[:, None]).sum(axis=1) < 5))


@pytest.mark.long
@pytest.mark.parametrize("method", long_except(["feddkc", "fedavg", "feddkd", "classstats", "fedd2s"], "fedavg"))
@pytest.mark.parametrize("score", ["sampled", "devices"])
def test_top_5_accuracies_are_those_of_the_models(method: str, score: Any, tmp_path: Path) -> None:
    shared: dict[str, Any] = {"with_alone": True, "with_fedavg": True, "export": "all", "train_limit": 200}
    wanted = replace(RUNS[method], devices=3, rounds=2, control_rounds=2, top_k=5, score=score, out=tmp_path, **shared)
    report = simulate(wanted)
    for device in report.devices:
        top = top_5_of(tmp_path / str(device.onnx_file), tmp_path / "work" / "test.npz")
        assert device.top_k_fleet == pytest.approx(top)
        for name in ("fleet", "trained", "alone"):
            rate, accuracy = getattr(device, f"top_k_{name}"), getattr(device, f"accuracy_{name}")
            assert accuracy <= rate < 1, "no model of so little training is sure of all"
    rows = {row.name: row for row in report.comparison}
    assert None not in [row.top_k for row in rows.values()]
    for field, row in (("alone", rows["alone"]), ("trained", report.comparison[1])):
        assert row.top_k == pytest.approx(np.mean([getattr(device, f"top_k_{field}") for device in report.devices]))
    if method == "fedavg":
        assert {device.top_k_fleet for device in report.devices} == {rows["FedAvg global"].top_k}
    plain = simulate(replace(wanted, top_k=None, out=tmp_path / "plain"))
    assert plain.traffic == report.traffic, "top-k scores are not sent"
    assert plain.accuracy_by_round == report.accuracy_by_round
    assert [row.accuracy for row in plain.comparison] == [row.accuracy for row in report.comparison]
    assert {row.top_k for row in plain.comparison} == {device.top_k_fleet for device in plain.devices} == {None}


def test_global_score_has_the_top_5_of_the_global_model(tmp_path: Path) -> None:
    report = simulate(replace(FLEET, method="fedavg", rounds=1, score="global", top_k=5, out=tmp_path))
    devices, whole = report.comparison
    assert devices.top_k is None
    assert whole.top_k is not None
    assert whole.top_k >= (whole.accuracy or 1)


def test_top_k_of_all_classes_is_refused_before_writing(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="top_k is 10, must be at least 1 and below 10, the number of classes"):
        simulate(replace(FLEET, top_k=10, out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_resumed_simulation_keeps_its_scores(tmp_path: Path) -> None:
    wanted = replace(FLEET, method="fedavg", rounds=1, score="global", score_every=2, out=tmp_path)
    simulate(wanted)
    saved = saved_simulation(tmp_path)
    assert (saved.score, saved.score_every, saved.score_rows, saved.export) == ("global", 2, None, "one")
    with pytest.raises(ConfigurationError, match="score was 'global', is 'sampled'"):
        simulate(replace(wanted, score="sampled"), if_there="resume")


def test_the_digits_are_few_enough_to_be_scored_whole() -> None:
    """So that a first simulation's accuracies are of the whole test set."""
    rows = len(load_dataset("digits").test_labels)
    assert Simulation().rows_scored(rows) == rows
