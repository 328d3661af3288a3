"""The parts of a public set, and sets that cannot be used."""

from __future__ import annotations

import numpy as np
import pytest
from audit.conftest import run_of

from fleetdistill.errors import ConfigurationError, DataError
from fleetdistill_lab.audit.public_set import PublicSet, read_public, split_public
from fleetdistill_lab.simulation.data.datasets import load_dataset

CONTRACT = run_of("fedavg").contract


def rows_of(images) -> set[bytes]:
    return {image.numpy().tobytes() for image in images}


def test_devices_decoys_and_attacker_have_no_common_rows(public: PublicSet) -> None:
    fleet, decoys = rows_of(public.fleet.train_images), rows_of(public.decoys.inputs)
    attacker = rows_of(public.attacker.inputs)
    assert not fleet & decoys
    assert not fleet & attacker
    assert not decoys & attacker
    assert len(fleet) == 200
    assert len(decoys) + len(attacker) == 1797 - 200


def test_devices_get_at_most_half_of_the_set() -> None:
    assert len(split_public(load_dataset("digits"), 10_000, seed=0).fleet.train_labels) == 898


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"inputs": np.zeros((40, 1, 4, 4), np.float32)}, r"shape \[1, 4, 4\], but \[contract\] input_shape is"),
        ({"labels": np.arange(40) % 2 * 19}, "labels up to 19, but .* 10 classes"),
    ],
)
def test_a_set_that_does_not_fit_the_contract(tmp_path, arrays, text) -> None:
    usual = {"inputs": np.zeros((40, 1, 8, 8), np.float32), "labels": np.arange(40) % 2}
    np.savez(tmp_path / "set.npz", **{**usual, **arrays})
    with pytest.raises(DataError, match=text):
        read_public(str(tmp_path / "set.npz"), CONTRACT)


def test_larger_images_are_reduced_to_the_contract(tmp_path) -> None:
    inputs = np.zeros((40, 1, 16, 16), np.float32)
    inputs[:, :, ::2] = 1
    np.savez(tmp_path / "set.npz", inputs=inputs, labels=np.arange(40) % 2)
    read = read_public(str(tmp_path / "set.npz"), CONTRACT)
    assert read.train_images.shape[1:] == (1, 8, 8)
    assert bool((read.train_images == 0.5).all())
    assert len(read.classes) == 10


def test_unknown_names_and_empty_fleets(tmp_path) -> None:
    with pytest.raises(DataError, match=r"expected an \.npz file or one of digits"):
        read_public("nothing", CONTRACT)
    with pytest.raises(ConfigurationError, match="rows is 0"):
        split_public(load_dataset("digits"), 0, seed=0)
    np.savez(tmp_path / "few.npz", inputs=np.zeros((10, 1, 8, 8), np.float32), labels=np.arange(10) % 2)
    with pytest.raises(DataError, match="leaves 3 rows of a class"):
        split_public(read_public(str(tmp_path / "few.npz"), CONTRACT), 4, seed=0)
