"""Data sets and models of your own in a simulation: what is read, refused, kept and resumed; over both links."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.outside import EXAMPLES
from typer.testing import CliRunner

from fleetdistill.errors import ConfigurationError, DataError, RefusedError
from fleetdistill.models import path_of
from fleetdistill_lab import Simulation, simulate
from fleetdistill_lab.simulation.data.datasets import Dataset
from fleetdistill_lab.simulation.data.own import digest_of, own_dataset, read_dataset, save_dataset
from fleetdistill_lab.simulation.folder import open_folder, saved_simulation
from fleetdistill_server.cli.app import app

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(60, 6)).astype(np.float32)
LABELS = np.arange(60) % 3
INPUTS[:, 0] += 2 * LABELS
SPLIT = {
    "train_inputs": INPUTS[:45],
    "train_labels": LABELS[:45],
    "test_inputs": INPUTS[45:],
    "test_labels": LABELS[45:],
}


@pytest.fixture(autouse=True)
def with_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def small(out: Path, **changes: Any) -> Simulation:
    wanted = Simulation(
        method="feddkc",
        dataset={**SPLIT, "classes": ["red", "green", "blue"]},  # type: ignore[dict-item]
        models=["own_model:narrow", "own_model:wide"],
        extractor="own_model:extractor",
        server_model="own_model:server_model",
        partition="iid",
        devices=2,
        rounds=2,
        torch_device="cpu",
        with_alone=False,
        with_fedavg=False,
        out=out,
    )
    return replace(wanted, **changes)


def test_pair_of_arrays_gives_fifth_of_each_class_to_test_part() -> None:
    data = own_dataset((INPUTS, LABELS))
    assert (len(data.train_labels), len(data.test_labels)) == (48, 12)
    assert data.test_labels.bincount().tolist() == [4, 4, 4]
    rows = torch.cat([data.train_images, data.test_images])
    assert sorted(rows.tolist()) == sorted(INPUTS.tolist()), "every row once, as it was"
    assert digest_of(data) == digest_of(own_dataset({"inputs": INPUTS, "labels": LABELS}))
    assert data.classes == ("0", "1", "2")


def test_bytes_are_scaled_and_floats_are_not() -> None:
    images = np.array([[[[0, 51]]], [[[255, 102]]]], np.uint8)
    part: dict[str, Any] = {
        "train_inputs": images,
        "train_labels": [0, 1],
        "test_inputs": images,
        "test_labels": [0, 1],
    }
    assert own_dataset(part).train_images.flatten().tolist() == pytest.approx([0, 0.2, 1, 0.4])
    floats = own_dataset({**part, "train_inputs": 3.0 * images, "test_inputs": images})
    assert floats.train_images.flatten().tolist() == [0, 153, 765, 306]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": (
        {},
        "the data set has no train_inputs, train_labels, test_inputs, test_labels; give inputs and labels, or",
    ),
    "no labels": ({"inputs": INPUTS}, "the data set has no labels"),
    "a name too many": ({**SPLIT, "images": INPUTS}, "the data set has unknown arrays images"),
    "text": (
        {"inputs": np.array([["a"]]), "labels": [0]},
        "inputs of dtype <U1 and shape [1, 1], expected floating-point or uint8",
    ),
    "lengths": (
        {**SPLIT, "test_labels": LABELS},
        "the test set has labels of dtype int64 and shape [60], expected one integer for each",
    ),
    "float labels": ({**SPLIT, "train_labels": LABELS[:45] / 2}, "the training set has labels of dtype float64"),
    "negative": (
        {**SPLIT, "train_labels": LABELS[:45] - 1},
        "the training set has label -1, expected integers",
    ),
    "not finite": (
        {**SPLIT, "test_inputs": INPUTS[45:] + float("inf")},
        "the test set has non-finite inputs",
    ),
    "shapes": ({**SPLIT, "test_inputs": INPUTS[45:, :5]}, "training samples have shape [6], but test samples [5]"),
    "classes": (
        {**SPLIT, "classes": ["a", "b"]},
        "classes has 2 names, 2 of them unique, and the largest",
    ),
    "clients": (
        {**SPLIT, "train_clients": [1]},
        "train_clients is int64 of shape [1], expected an integer",
    ),
    "test clients": (
        {**SPLIT, "train_clients": [1] * 45, "test_clients": [1]},
        "test_clients is int64 of shape [1], expected an integer for each of 15 test rows",
    ),
    "test clients only": ({**SPLIT, "test_clients": [1] * 15}, "has test_clients but no train_clients"),
    "few rows": ({"inputs": INPUTS[:6], "labels": LABELS[:6]}, "6 rows are too few to split off a fifth"),
}


@pytest.mark.parametrize("name", WRONG)
def test_arrays_that_are_no_data_set_are_refused_with_reason(name: str) -> None:
    arrays, sentence = WRONG[name]
    with pytest.raises(DataError) as result:
        own_dataset(arrays)
    assert sentence in str(result.value)


@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        (lambda file: None, "there is no file"),
        (lambda file: file.write_bytes(b"not a zip"), "cannot read"),
        (lambda file: file.write_bytes(b"PK\3\4 broken"), "data.npz"),
        (lambda file: np.savez(file, inputs=np.array([{}], object), labels=LABELS), "cannot read"),
        (lambda file: np.savez(file, inputs=INPUTS), "the data set has no labels"),
    ],
)
def test_a_file_that_is_no_data_set_is_refused_and_named(
    write: Callable[[Path], None], sentence: str, tmp_path: Path
) -> None:
    file = tmp_path / "data.npz"
    write(file)
    told = CliRunner().invoke(app, ["simulate", "--dataset", str(file), "--out", str(tmp_path / "out")])
    assert (told.exit_code, told.stdout) == (1, "")
    assert str(file) in told.stderr
    assert sentence in told.stderr
    assert not (tmp_path / "out").exists()


def test_refused_device_leaves_no_folder(tmp_path: Path) -> None:
    """Its extractor is not the run's, which the device's check-in finds."""
    out = tmp_path / "out"
    with pytest.raises(RefusedError, match=r"the device has \[64\], run 'simulation' has \[6\]"):
        simulate(small(out, method="fedcgs", models=("own_model:narrow",), extractor="identity"))
    assert not out.exists()


def test_unusable_simulation_settings_are_refused_before_begin(tmp_path: Path) -> None:
    out = tmp_path / "out"
    wrong = {
        r"samples of own-data have shape \[6\], but the built-in models read images .*; give your own device": {
            "models": (),
            "extractor": "",
        },
        r"\[model\] extractor: shape \(6,\) must be channels, height, width": {"extractor": ""},
        r"\[model\] server: .*'own_model' has no function 'absent'": {"server_model": "own_model:absent"},
        r"'own_model:server_model' is called with input_shape, but": {"extractor": "own_model:server_model"},
        r"device model 'digits_linear' with inputs of shape \[6\]: shape \(6,\) must be channels, height, width": {
            "models": ("digits_linear",)
        },
        r"image_size is 4, but samples of own-data have shape \[6\]": {"image_size": 4},
    }
    for sentence, changes in wrong.items():
        with pytest.raises(ConfigurationError, match=sentence):
            simulate(small(out, **changes))  # type: ignore[arg-type]
        assert not out.exists(), sentence


def test_a_function_that_no_other_process_can_import_is_refused() -> None:
    def local(input_shape: Any, classes: int) -> None: ...

    for function in (local, lambda input_shape, classes: None):
        with pytest.raises(ConfigurationError, match="is not a function at the top level of a module"):
            Simulation(models=[function])


def test_functions_are_models_by_their_path() -> None:
    import own_model  # type: ignore[import-not-found]

    wanted = Simulation(models=[own_model.narrow, "digits_linear"], extractor=own_model.extractor)
    assert wanted.models == ("own_model:narrow", "digits_linear")
    assert wanted.extractor == "own_model:extractor"
    assert path_of(own_model.wide) == "own_model:wide"


def test_clients_are_saved_with_a_data_set(tmp_path: Path) -> None:
    train_clients, test_clients = np.arange(45) % 4, np.arange(15) % 4
    arrays: dict[str, Any] = {**SPLIT, "train_clients": train_clients}
    data = own_dataset({**arrays, "test_clients": test_clients})
    save_dataset(data, tmp_path / "data.npz")
    again = read_dataset(tmp_path / "data.npz")
    assert again.test_clients is not None
    assert again.test_clients.tolist() == test_clients.tolist()
    assert digest_of(again) == digest_of(data) != digest_of(own_dataset(arrays))


def test_own_data_are_kept_and_resumed_without_the_file(tmp_path: Path) -> None:
    file, out = tmp_path / "blobs.npz", tmp_path / "out"
    np.savez(file, **SPLIT, classes=["red", "green", "blue"])  # type: ignore[arg-type]
    with open_folder(small(out, dataset=read_dataset(file)), "refuse"):
        pass
    digest = digest_of(read_dataset(file))
    file.unlink()
    saved = saved_simulation(out).dataset
    assert isinstance(saved, Dataset)
    assert (saved.name, digest_of(saved)) == ("blobs", digest)
    told = CliRunner().invoke(app, ["simulate", "--resume", "--out", str(out)])
    assert told.exit_code == 0, told.stderr
    report = json.loads((out / "report.json").read_text())
    assert (report["dataset"], report["class_names"]) == ("blobs", ["red", "green", "blue"])
    np.savez(file, **{**SPLIT, "train_inputs": INPUTS[:45] + 1}, classes=["red", "green", "blue"])  # type: ignore[arg-type]
    told = CliRunner().invoke(app, ["simulate", "--resume", "--out", str(out), "--dataset", str(file)])
    assert told.exit_code == 1
    assert "began with other settings: dataset was" in told.stderr


@pytest.mark.slow
def test_own_data_and_models_give_the_same_over_both_links(tmp_path: Path) -> None:
    memory, grpc = (simulate(small(tmp_path / link, link=link)) for link in ("memory", "grpc"))
    assert [device.model for device in grpc.devices] == ["own_model:narrow", "own_model:wide"]
    assert memory.accuracy_by_round == grpc.accuracy_by_round
    assert memory.global_accuracy_by_round == grpc.global_accuracy_by_round
    assert grpc.class_names == ["red", "green", "blue"]
