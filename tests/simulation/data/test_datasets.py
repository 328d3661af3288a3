"""Data sets: shapes, ranges, sources and what is said when one cannot be had."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fleetdistill.errors import ConfigurationError, DataError
from fleetdistill_lab.simulation.data.datasets import DATASETS, Dataset, load_dataset, stratified_rows


def _write(folder: Path, name: str, **changes: Any) -> Path:
    """A tiny set on disk: pixel p of image i is i, label i mod 10."""
    shape = (4, 4, 3) if name == "cifar10" else (4, 4)
    arrays: dict[str, Any] = {}
    for part, count in (("train", 40), ("test", 10)):
        images = np.arange(count, dtype=np.uint8).reshape(count, *(1 for _ in shape))
        arrays[f"{part}_images"] = np.broadcast_to(images, (count, *shape)).copy()
        arrays[f"{part}_labels"] = np.arange(count, dtype=np.int64) % 10
    arrays = {key: value for key, value in (arrays | changes).items() if value is not None}
    file = folder / name / f"{name}.npz"
    file.parent.mkdir(parents=True)
    np.savez(file, **arrays)
    return file


def _check_parts(data: Dataset) -> None:
    for images, labels in ((data.train_images, data.train_labels), (data.test_images, data.test_labels)):
        assert (images.dtype, labels.dtype, images.ndim) == (torch.float32, torch.int64, 4)
        assert len(images) == len(labels)
        assert images.is_contiguous()
        assert float(images.min()) == 0
        assert 0 <= int(labels.min()) <= int(labels.max()) < len(data.classes)


class TestDigits:
    def test_split_is_stratified_and_always_the_same(self) -> None:
        pytest.importorskip("sklearn", reason="scikit-learn brings the digits")
        data, again = load_dataset("digits"), load_dataset("Digits", seed=5)
        _check_parts(data)
        assert (data.train_images.shape, data.test_images.shape) == ((1437, 1, 8, 8), (360, 1, 8, 8))
        assert float(data.train_images.max()) == 1
        assert torch.equal(data.train_images, again.train_images)
        train, test = (torch.bincount(part) for part in (data.train_labels, data.test_labels))
        assert int((test - 0.2 * (train + test)).abs().max()) < 1

    def test_a_limit_keeps_class_shares_and_depends_on_the_seed(self) -> None:
        pytest.importorskip("sklearn", reason="scikit-learn brings the digits")
        first, same, other = (load_dataset("digits", train_limit=200, seed=seed) for seed in (1, 1, 2))
        assert len(first.train_labels) == 200
        assert len(first.test_labels) == 360
        assert torch.bincount(first.train_labels).tolist() in [[20] * 10, torch.bincount(other.train_labels).tolist()]
        assert torch.equal(first.train_images, same.train_images)
        assert not torch.equal(first.train_images, other.train_images)
        assert len(load_dataset("digits", train_limit=10**6).train_labels) == 1437


def test_stratified_rows_by_hand() -> None:
    """60, 30 and 10 rows; 7 of 100 would be 4.2, 2.1 and 0.7: the largest remainder goes to the last class."""
    labels = np.repeat([0, 1, 2], [60, 30, 10])
    rows = stratified_rows(labels, 7, 0)
    assert np.bincount(labels[rows]).tolist() == [4, 2, 1]
    assert (np.diff(rows) > 0).all()


class TestFiles:
    @pytest.mark.parametrize("name", ["fashion-mnist", "fashion_mnist", "FashionMNIST"])
    def test_a_folder_is_read(self, tmp_path: Path, name: str) -> None:
        _write(tmp_path, "fashion_mnist")
        data = load_dataset(name, tmp_path)
        _check_parts(data)
        assert (data.name, data.classes[9]) == ("fashion-mnist", "Ankle boot")
        assert data.train_images.shape == (40, 1, 4, 4)
        assert float(data.train_images[39, 0, 2, 3]) == pytest.approx(39 / 255)

    def test_colour_channels_come_first(self, tmp_path: Path) -> None:
        images = np.zeros((40, 4, 5, 3), dtype=np.uint8)
        images[7, 1, 2] = (51, 102, 255)
        _write(tmp_path, "cifar10", train_images=images)
        data = load_dataset("cifar-10", tmp_path)
        assert data.train_images.shape == (40, 3, 4, 5)
        assert data.train_images[7, :, 1, 2].tolist() == pytest.approx([0.2, 0.4, 1.0])

    def test_the_variable_counts_unless_a_folder_is_given(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _write(tmp_path / "a", "mnist")
        _write(tmp_path / "b", "mnist", test_labels=np.full(10, 3))
        monkeypatch.setenv("FLEETDISTILL_DATA", str(tmp_path / "a"))
        assert load_dataset("mnist").test_labels.tolist() == list(range(10))
        assert load_dataset("mnist", str(tmp_path / "b")).test_labels.tolist() == [3] * 10

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"test_labels": None}, "test_labels"),
            ({"train_images": np.zeros((40, 4, 4), dtype=np.float32)}, "mnist, train part: the images are float32"),
            ({"train_images": np.zeros((40, 16), dtype=np.uint8)}, r"shape \[40, 16\]"),
            ({"test_labels": np.zeros(9, dtype=np.int64)}, r"mnist, test part.*shape \[9\]"),
            ({"test_labels": np.full(10, 10)}, r"in \[10, 10\], expected \[0, 10\)"),
            ({"train_labels": np.array([None] * 40)}, "cannot read"),  # needs pickle
        ],
    )
    def test_a_file_with_other_contents_is_refused(self, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
        _write(tmp_path, "mnist", **changes)
        with pytest.raises(DataError, match=message):
            load_dataset("mnist", tmp_path)

    def test_a_damaged_file_is_named(self, tmp_path: Path) -> None:
        file = _write(tmp_path, "mnist")
        whole = file.read_bytes()
        for broken in (b"", b"PK\x03\x04 and more", whole[: len(whole) // 2], whole[:300] + b"\xff" * 50 + whole[350:]):
            file.write_bytes(broken)
            with pytest.raises(DataError, match=r"mnist\.npz"):
                load_dataset("mnist", tmp_path)

    def test_images_are_averaged_down(self, tmp_path: Path) -> None:
        """Each pixel of the smaller image is the mean of its square."""
        images = np.zeros((40, 4, 4), dtype=np.uint8)
        images[0] = [[0, 4, 8, 8], [8, 4, 8, 8], [0, 0, 255, 255], [0, 0, 255, 255]]
        _write(tmp_path, "mnist", train_images=images)
        data = load_dataset("mnist", tmp_path, image_size=2)
        assert data.test_images.shape == (10, 1, 2, 2)
        np.testing.assert_allclose(255 * data.train_images[0, 0], [[4, 8], [0, 255]], rtol=1e-6)

    @pytest.mark.parametrize("size", [0, 5])
    def test_size_that_images_cannot_be_averaged_to_is_refused(self, tmp_path: Path, size: int) -> None:
        _write(tmp_path, "mnist")
        with pytest.raises(ConfigurationError, match=f"image_size is {size}, must be 1 to 4"):
            load_dataset("mnist", tmp_path, image_size=size)

    def test_a_set_that_tells_its_clients_keeps_them_with_their_rows(self, tmp_path: Path) -> None:
        """Pixels are the row numbers, so each row's client can be told from its image."""
        _write(tmp_path, "femnist_digits", train_clients=np.arange(40) % 3)
        data = load_dataset("femnist-digits", tmp_path, train_limit=20)
        assert data.train_clients is not None
        numbers = (255 * data.train_images[:, 0, 0, 0]).round().long()
        assert torch.equal(data.train_clients, numbers % 3)
        part = data.with_training_rows(np.array([4, 7]))
        assert part.train_clients is not None
        assert torch.equal(part.train_clients, (numbers % 3)[[4, 7]])
        assert torch.equal(part.train_labels, data.train_labels[[4, 7]])

    def test_clients_of_test_images_stay_with_their_rows(self, tmp_path: Path) -> None:
        _write(tmp_path, "femnist_digits", train_clients=np.arange(40) % 3, test_clients=np.arange(10) % 4)
        data = load_dataset("femnist-digits", tmp_path, train_limit=20)
        assert data.test_clients is not None
        assert data.test_clients.tolist() == (np.arange(10) % 4).tolist()
        part = data.with_test_rows(np.array([7, 2]))
        assert part.test_clients is not None
        assert part.test_clients.tolist() == [3, 2]
        assert torch.equal(part.test_images, data.test_images[[7, 2]])
        assert torch.equal(part.test_labels, data.test_labels[[7, 2]])

    @pytest.mark.parametrize(
        ("clients", "found"), [(np.arange(39), r"int64 of shape \[39\]"), (np.zeros(40), r"float64 of shape \[40\]")]
    )
    def test_clients_that_do_not_fit_the_images_are_refused(self, tmp_path: Path, clients: Any, found: str) -> None:
        _write(tmp_path, "femnist_digits", train_clients=clients)
        expected = f"femnist-digits, train part: the clients are {found}, expected integers, one for each of 40 images"
        with pytest.raises(DataError, match=expected):
            load_dataset("femnist-digits", tmp_path)

    def test_a_set_that_cannot_be_downloaded_says_where_to_put_it(self, tmp_path: Path) -> None:
        with pytest.raises(
            DataError, match=r"femnist_digits\.npz does not exist, and torchvision does not have it; create the file"
        ):
            load_dataset("femnist-digits", tmp_path)


class TestDownload:
    def test_a_missing_file_is_downloaded_into_the_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[tuple[Path, bool]] = []

        def source(root: Path, train: bool, download: bool) -> SimpleNamespace:
            assert download
            calls.append((root, train))
            return SimpleNamespace(data=torch.full((6, 4, 4), 255, dtype=torch.uint8), targets=torch.arange(6))

        monkeypatch.setattr("torchvision.datasets.MNIST", source)
        data = load_dataset("mnist", tmp_path)
        assert calls == [(tmp_path, True), (tmp_path, False)]
        assert (data.train_images.shape, float(data.train_images.mean())) == ((6, 1, 4, 4), 1.0)

    def test_arrays_and_lists_as_cifar10_has_them(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        part = SimpleNamespace(data=np.zeros((6, 4, 4, 3), dtype=np.uint8), targets=list(range(6)))
        monkeypatch.setattr("torchvision.datasets.CIFAR10", lambda root, train, download: part)
        assert load_dataset("cifar10", tmp_path).train_images.shape == (6, 3, 4, 4)

    def test_letters_are_torchvisions_split_and_begin_at_0(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def source(root: Path, train: bool, download: bool, split: str) -> SimpleNamespace:
            assert split == "letters"
            return SimpleNamespace(data=torch.zeros(26, 4, 4, dtype=torch.uint8), targets=torch.arange(1, 27))

        monkeypatch.setattr("torchvision.datasets.EMNIST", source)
        data = load_dataset("emnist-letters", tmp_path)
        assert data.train_labels.tolist() == list(range(26))
        assert (data.classes[0], data.classes[-1]) == ("A", "Z")

    def test_channels_first_and_labels_as_svhn_has_them(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def source(root: Path, split: str, download: bool) -> SimpleNamespace:
            data = np.zeros((10, 3, 4, 5), dtype=np.uint8)
            data[:, 2, 1, 3] = 255
            return SimpleNamespace(data=data, labels=np.arange(10) if split == "train" else np.zeros(10, np.int64))

        monkeypatch.setattr("torchvision.datasets.SVHN", source)
        data = load_dataset("svhn", tmp_path)
        assert data.train_images.shape == (10, 3, 4, 5)
        assert data.train_images[0].nonzero().tolist() == [[2, 1, 3]]
        assert (data.train_labels.tolist(), data.test_labels.tolist()) == (list(range(10)), [0] * 10)

    def test_without_a_folder_the_users_cache_is_used(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("FLEETDISTILL_DATA", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        _write(tmp_path / "fleetdistill", "mnist")
        assert len(load_dataset("mnist").train_labels) == 40

    @pytest.mark.parametrize(
        "error", [RuntimeError("Error downloading:\nTried 2 places\n"), OSError("no route to host")]
    )
    def test_a_failed_download_says_where_to_put_the_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
    ) -> None:
        def source(*args: object, **kwargs: object) -> None:
            raise error

        monkeypatch.setattr("torchvision.datasets.FashionMNIST", source)
        with pytest.raises(DataError, match=r"fashion_mnist\.npz does not exist .*--data-dir") as caught:
            load_dataset("fashion-mnist", tmp_path)
        assert " ".join(str(error).split()) in str(caught.value)

    def test_a_folder_that_does_not_exist_is_not_created(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"mnist: the folder .*mistyped does not exist; create it, or"):
            load_dataset("mnist", tmp_path / "mistyped")
        assert not (tmp_path / "mistyped").exists()


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(DataError, match="unknown data set 'imagenet', expected one of digits, fashion-mnist, mnist"):
        load_dataset("imagenet")


def test_a_limit_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="train_limit is 0"):
        load_dataset("digits", train_limit=0)


@pytest.mark.parametrize(
    ("name", "train", "test"),
    [
        ("fashion-mnist", (60_000, 1, 28, 28), (10_000, 1, 28, 28)),
        ("mnist", (60_000, 1, 28, 28), (10_000, 1, 28, 28)),
    ],
)
def test_the_real_sets(name: str, train: tuple[int, ...], test: tuple[int, ...]) -> None:
    folder, plain = os.environ.get("FLEETDISTILL_DATA"), name.replace("-", "_")
    if not folder or not (Path(folder) / plain / f"{plain}.npz").is_file():
        pytest.skip(f"FLEETDISTILL_DATA does not lead to {plain}/{plain}.npz")
    data = load_dataset(name)
    _check_parts(data)
    assert (tuple(data.train_images.shape), tuple(data.test_images.shape)) == (train, test)
    assert float(data.train_images.max()) == 1
    assert len(DATASETS[name]) == int(data.train_labels.max()) + 1
