"""Data sets of the Hugging Face Hub. In all tests but one a module with the package's names stands in for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fleetdistill.errors import ConfigurationError, DataError
from fleetdistill_lab.simulation.checks import check_settings
from fleetdistill_lab.simulation.data.hugging_face import as_pixels, read_hugging_face
from fleetdistill_lab.simulation.fleet import simulate
from fleetdistill_lab.simulation.spec.settings import Simulation


def grey(value: int, size: int = 8) -> Image.Image:
    return Image.fromarray(np.full((size, size), value, np.uint8))


class Split(dict[str, Any]):
    """Columns of one split, and the types of the columns."""

    def __init__(self, features: dict[str, Any], **columns: Any) -> None:
        super().__init__(columns)
        self.features = features


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], Any]:
    """Puts a module with the names of `datasets` in its place."""

    def install(load: Callable[..., Any]) -> Any:
        module: Any = ModuleType("datasets")
        errors: Any = ModuleType("datasets.exceptions")
        module.Image = type("Image", (), {})
        module.ClassLabel = type("ClassLabel", (), {"names": ["a", "b", "c"]})
        errors.DatasetsError = type("DatasetsError", (Exception,), {})
        module.load_dataset = load
        monkeypatch.setitem(sys.modules, "datasets", module)
        monkeypatch.setitem(sys.modules, "datasets.exceptions", errors)
        return module

    return install


def rows(module: Any, count: int, **more: Any) -> Split:
    """Rows with the labels 0, 1, 2, 0, ... in a column `tag`, and grey images of the row's number in `picture`."""
    features = {"id": object(), "picture": module.Image(), "tag": module.ClassLabel(), **dict.fromkeys(more)}
    return Split(features, picture=[grey(row) for row in range(count)], tag=[row % 3 for row in range(count)], **more)


def test_columns_are_found_by_type_and_clients_are_numbered(stand_in: Any, tmp_path: Path) -> None:
    asked: list[Any] = []
    writers = {"train": ["x", "z", "x", "y", "y", "z"], "test": ["z", "x", "w"]}

    def load(*given: Any, **options: Any) -> dict[str, Split]:
        asked.append((*given, options))
        return {split: rows(module, len(of), writer=of) for split, of in writers.items()}

    module: Any = stand_in(load)
    data = read_hugging_face("hf:someone/letters:small", "writer", tmp_path)
    assert asked == [("someone/letters", "small", {"cache_dir": str(tmp_path)})]
    assert (data.name, data.classes) == ("hf:someone/letters:small", ("a", "b", "c"))
    assert data.train_images.shape == (6, 1, 8, 8)
    np.testing.assert_allclose(data.train_images[:, 0, 0, 0] * 255, np.arange(6), rtol=1e-6)
    assert data.train_labels.tolist() == [0, 1, 2] * 2
    assert data.train_clients is not None
    assert data.train_clients.tolist() == [1, 3, 1, 2, 2, 3]
    assert data.test_clients is not None
    assert data.test_clients.tolist() == [3, 1, 0]


def test_a_folder_of_pictures_is_read_with_the_real_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets", reason="the package datasets is not installed: pip install 'fleetdistill[hf]'")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    for split, each in (("train", 3), ("test", 1)):
        for label, name in enumerate(("a", "b")):
            (tmp_path / "letters" / split / name).mkdir(parents=True)
            for number in range(each):
                grey(100 * label + number).save(tmp_path / "letters" / split / name / f"{number}.png")
    data = read_hugging_face(f"hf:{tmp_path / 'letters'}", data_dir=tmp_path / "cache")
    assert data.classes == ("a", "b")
    assert data.train_labels.tolist() == [0, 0, 0, 1, 1, 1]
    np.testing.assert_allclose(data.train_images[:, 0, 0, 0] * 255, [0, 1, 2, 100, 101, 102], rtol=1e-6)
    assert data.test_labels.tolist() == [0, 1]


def test_without_a_test_split_a_fifth_of_each_class_is_one(stand_in: Any) -> None:
    module: Any = stand_in(lambda *given, **options: {"train": rows(module, 30)})
    data = read_hugging_face("hf:letters")
    assert np.bincount(data.test_labels.numpy()).tolist() == [2, 2, 2]
    assert len(data.train_labels) == 24
    assert data.train_clients is None


def test_a_simulation_runs_on_what_was_loaded(stand_in: Any, tmp_path: Path) -> None:
    writers = [row // 15 for row in range(30)]
    module: Any = stand_in(
        lambda *given, **options: {part: rows(module, 30, writer=writers) for part in ("train", "validation")}
    )
    wanted = Simulation(
        method="fedavg",
        dataset="hf:letters",
        client_column="writer",
        partition="by_client",
        test_part="local_client",
        devices=2,
        rounds=1,
        models=("digits_linear",),
        with_alone=False,
        with_fedavg=False,
        out=tmp_path,
    )
    report = simulate(wanted)
    assert report.dataset == "hf:letters"
    assert [(device.samples, device.own_test_rows) for device in report.devices] == [(15, 15)] * 2


def test_images_of_any_mode_become_grey_or_colour() -> None:
    bits = Image.fromarray(np.array([[False, True]]))
    assert as_pixels([bits], "x").tolist() == [[[0, 255]]]
    palette = Image.fromarray(np.array([[[255, 0, 0], [0, 0, 255]]], np.uint8)).convert("P")
    see_through = Image.fromarray(np.array([[[1, 2, 3, 4], [5, 6, 7, 8]]], np.uint8))
    pixels = as_pixels([palette, see_through, bits], "x")
    assert pixels.shape == (3, 1, 2, 3)
    assert pixels[1].tolist() == [[[1, 2, 3], [5, 6, 7]]]
    assert pixels[2].tolist() == [[[0] * 3, [255] * 3]]


def test_images_of_several_sizes_are_refused() -> None:
    with pytest.raises(DataError, match=r"here: images of 2 sizes \(8x8, 9x9\), expected one"):
        as_pixels([grey(0), grey(0, 9)], "here")


def test_the_missing_package_is_named_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigurationError, match=r"hf:letters needs the package datasets.*'fleetdistill\[hf\]'"):
        simulate(Simulation(dataset="hf:letters", out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (lambda module: {"test": rows(module, 3)}, "hf:letters has the splits test, but no train"),
        (
            lambda module: {"train": Split({"text": object()}, text=[])},
            r"has the columns text \(object\); expected one of type Image and one of type ClassLabel",
        ),
        (
            lambda module: {"train": rows(module, 6), "test": rows(module, 3)},
            "hf:letters has no column writer, but id, picture, tag; set client_column",
        ),
        (
            lambda module: {"train": rows(module, 30, writer=[0] * 30)},
            "hf:letters: train_clients needs separate training and test arrays",
        ),
    ],
)
def test_data_that_cannot_be_used_are_named(stand_in: Any, load: Any, message: str) -> None:
    module: Any = stand_in(lambda *given, **options: load(module))
    with pytest.raises(DataError, match=message):
        read_hugging_face("hf:letters", "writer")


def test_a_set_that_cannot_be_loaded_says_why(stand_in: Any) -> None:
    def load(*given: Any, **options: Any) -> dict[str, Split]:
        raise FileNotFoundError("Dataset 'letters' doesn't exist on the Hub")

    stand_in(load)
    with pytest.raises(DataError, match="cannot load hf:letters: Dataset 'letters' doesn't exist on the Hub"):
        read_hugging_face("hf:letters")


def test_settings_of_the_hub_are_checked() -> None:
    with pytest.raises(ConfigurationError, match="client_column is 'writer', but the data set is not one of"):
        check_settings(Simulation(client_column="writer"))
    with pytest.raises(ConfigurationError, match="dataset is 'hf:', expected hf:NAME or hf:NAME:CONFIG"):
        read_hugging_face("hf:")
