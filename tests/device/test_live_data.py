"""Data that change while the device runs: what is read, which ids are sent, and what happens without samples."""

from __future__ import annotations

import random
import re
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from device.sdk_fleet import RUN, Fleet, equal, knowledge_of, make_device, tiny_data, tiny_model, weights
from support.open_device import open_device
from support.processes import PATIENCE_SECONDS, wait_until
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, SubsetRandomSampler, TensorDataset

from fleetdistill import Splits, Step, TorchModel
from fleetdistill.compute.torch_compute import TorchCompute
from fleetdistill.data import Augmented
from fleetdistill.data.samples import read_samples
from fleetdistill.errors import ConfigurationError, DataError, NoSamplesError, StateError
from fleetdistill.models import build_model
from fleetdistill.testing import EventLog, ManualClock
from fleetdistill.training.local_training import evaluate, train_epochs
from fleetdistill.training.tensor_data import tensor_data_of
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.testing import MemoryServer

Item = tuple[np.ndarray, int]


def items(rows: int = 24, seed: int = 0) -> list[Item]:
    inputs, labels = tiny_data(rows, seed)
    return list(zip(inputs, labels.tolist(), strict=True))


class Listed(Dataset[Item]):
    """A map-style Dataset over a list."""

    def __init__(self, kept: list[Item]) -> None:
        self.kept = kept

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, row: int) -> Item:
        return self.kept[row]


class Named(Listed):
    """A Dataset whose samples have ids."""

    def __init__(self, kept: list[Item], names: list[Any]) -> None:
        super().__init__(kept)
        self.names = names

    def sample_id(self, row: int) -> Any:
        return self.names[row]


class Streamed(IterableDataset[Item]):
    def __iter__(self) -> Iterator[Item]:
        return iter(items())


class Noisy(Listed):
    """Every read adds noise, from torch's or from another generator."""

    def __init__(self, kept: list[Item], draw: Callable[[], float]) -> None:
        super().__init__(kept)
        self.draw = draw

    def __getitem__(self, row: int) -> Item:
        values, label = self.kept[row]
        return np.asarray(values + self.draw(), np.float32), label


def torch_noise() -> float:
    return 0.1 * float(torch.randn(()))


def collated(batch: list[Item]) -> tuple[Tensor, list[int]]:
    return torch.from_numpy(np.stack([values for values, _ in batch])), [label for _, label in batch]


def mapped(folder: Path, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    inputs, labels = tiny_data()
    file = np.memmap(folder / "inputs.bin", dtype, "w+", shape=inputs.shape)
    file[:] = inputs
    file.flush()
    return np.memmap(folder / "inputs.bin", dtype, "r", shape=inputs.shape), labels


def samples_of(fleet: Fleet) -> int:
    row = fleet.store.devices.get(RUN, "d")
    assert row is not None
    return contract_pb2.DeviceProfile.FromString(row.profile).samples


def texts(events: EventLog, kind: str) -> list[str]:
    return [event.text for event in events if event.kind == kind]


def answer(fleet: Fleet, device: Any) -> list[int]:
    """Lets a device answer an ask; returns the sample ids that it sent."""
    fleet.ask("d")
    device.step(0)
    return [int(item) for item in knowledge_of(fleet).sample_ids]


def wait_for(fleet: Fleet, answers: int) -> None:
    wait_until(lambda: len(fleet.store.asks.uploads(RUN)) == answers, f"{answers} answers")


# --- forms


FORMS: dict[str, Callable[[Path], Any]] = {
    "a function": lambda folder: tiny_data,
    "tensors": lambda folder: tuple(map(torch.from_numpy, tiny_data())),
    "a TensorDataset": lambda folder: TensorDataset(*map(torch.from_numpy, tiny_data())),
    "a list of pairs": lambda folder: items(),
    "a Dataset": lambda folder: Listed(items()),
    "a Subset": lambda folder: Subset(Listed([*items(), *items(6, seed=1)]), range(24)),
    "an iterable Dataset": lambda folder: Streamed(),
    "a DataLoader": lambda folder: DataLoader(Listed(items()), batch_size=5),
    "a shuffled DataLoader": lambda folder: DataLoader(Listed(items()), batch_size=5, shuffle=True),
    "a DataLoader of a stream": lambda folder: DataLoader(Streamed(), batch_size=5),
    "a DataLoader with its own collation": lambda folder: DataLoader(
        Listed(items()),
        collate_fn=lambda batch: (torch.from_numpy(np.stack([x for x, _ in batch])), [y for _, y in batch]),
    ),
    "a memory-mapped array": mapped,
    "reversed views": lambda folder: tuple(array[::-1].copy()[::-1] for array in tiny_data()),
    "mirrored rows": lambda folder: (tiny_data()[0][:, ::-1].copy()[:, ::-1], tiny_data()[1]),
    "a function of a Dataset": lambda folder: lambda: Listed(items()),
    "a generator function": lambda folder: lambda: (item for item in items()),
    "Augmented without a change": lambda folder: Augmented(tiny_data(), lambda one: one),
    "Augmented of a function": lambda folder: Augmented(tiny_data, lambda one: one),
}


def learned(state_dir: Path, data: Any, **changes: Any) -> tuple[dict[str, Tensor], np.ndarray, list[int]]:
    """Weights, features sent and sample ids after a round on some data."""
    fleet = Fleet()
    with make_device(fleet, state_dir, data=data, **changes) as device:
        ids = answer(fleet, device)
        result = weights(device), np.array(knowledge_of(fleet).features["cut"]), ids
    fleet.store.close()
    return result


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_same_samples_gives_the_same_result(tmp_path: Path, form: str) -> None:
    of_arrays, of_form = learned(tmp_path / "a", tiny_data()), learned(tmp_path / "b", FORMS[form](tmp_path))
    assert equal(of_arrays[0], of_form[0])
    assert np.array_equal(of_arrays[1], of_form[1])
    assert of_arrays[2] == of_form[2] == list(range(24))


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_mapped_array_of_other_type_is_converted_batch_by_batch(tmp_path: Path, dtype: str) -> None:
    inputs, labels = mapped(tmp_path, dtype)
    whole = learned(tmp_path / "a", (np.asarray(inputs, np.float32).copy(), labels))
    assert equal(whole[0], learned(tmp_path / "b", (inputs, labels))[0])


def test_a_mapped_array_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    """64 MB on the disk; reading, an epoch of training and an evaluation take less than half of that."""
    inputs = np.memmap(tmp_path / "inputs.bin", np.float32, "w+", shape=(2048, 8192))
    inputs[:, 0] = np.arange(len(inputs)) % 2
    model = torch.nn.Linear(8192, 2)
    tracemalloc.start()
    try:
        data = tensor_data_of(read_samples((inputs, np.arange(len(inputs)) % 2)))
        train_epochs(
            model,
            data,
            epochs=1,
            batch_size=64,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss=lambda logits_bc, labels_b, rows_b: torch.nn.functional.cross_entropy(logits_bc, labels_b),
            generator=torch.Generator().manual_seed(0),
            device="cpu",
        )
        counts = evaluate(model, data, 2, batch_size=64)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert counts.accuracy == 1
    assert most < inputs.nbytes / 2


# --- samples that come and go


def test_known_samples_keep_ids_new_get_new_and_missing_vanish(fleet: Fleet, tmp_path: Path) -> None:
    kept = items()
    with make_device(fleet, tmp_path, data=kept) as device:
        assert answer(fleet, device) == list(range(24))
        del kept[3:8]
        kept[:0] = items(2, seed=9)
        assert answer(fleet, device) == [24, 25, 0, 1, 2, *range(8, 24)]
        assert samples_of(fleet) == 21
        same = device.model
        random.Random(0).shuffle(kept)
        before = answer(fleet, device)
        assert sorted(before) == [0, 1, 2, *range(8, 26)]
        assert device.model is same
    with make_device(fleet, tmp_path, data=lambda: kept) as device:
        assert answer(fleet, device) == before, "ids survive a restart"
        kept.insert(0, items()[4])
        assert answer(fleet, device) == [26, *before], "a sample that returns is a new one"


def test_equal_samples_have_different_ids(fleet: Fleet, tmp_path: Path) -> None:
    with make_device(fleet, tmp_path, data=items(4) * 3) as device:
        ids = answer(fleet, device)
    assert len(set(ids)) == 12


def test_the_teacher_follows_its_sample_when_rows_move(fleet: Fleet, tmp_path: Path) -> None:
    """The server's logits for an id reach the same sample after the rows changed their order."""
    kept = items()
    with make_device(fleet, tmp_path, data=kept) as device:
        answer(fleet, device)
        before = knowledge_of(fleet)
        sent = dict(zip(before.sample_ids.tolist(), np.asarray(before.labels).tolist(), strict=True))
        kept.reverse()
        answer(fleet, device)
        again = knowledge_of(fleet)
    assert dict(zip(again.sample_ids.tolist(), np.asarray(again.labels).tolist(), strict=True)) == sent


def test_the_app_may_name_its_samples(fleet: Fleet, tmp_path: Path) -> None:
    data = Named(items(), [f"photo {row}" for row in range(24)])
    with make_device(fleet, tmp_path, data=data) as device:
        assert answer(fleet, device) == list(range(24))
        data.kept[2] = (np.ones(4, np.float32), 1)  # edited, but the same photo
        data.names[5] = 5  # another photo
        assert answer(fleet, device) == [0, 1, 2, 3, 4, 24, *range(6, 24)]
        data.names[5] = "photo 4"
        fleet.ask("d")
        device.step(0)
        assert not fleet.store.asks.open_ids()
        assert len(fleet.store.asks.uploads(RUN)) == 2, "ids must be unique: the device declined"


def test_unusable_sample_declines_ask_until_it_is_gone(fleet: Fleet, tmp_path: Path) -> None:
    kept, events = items(), EventLog()
    with make_device(fleet, tmp_path, events, data=kept) as device:
        answer(fleet, device)
        kept.append((np.full(4, np.nan, np.float32), 0))
        fleet.ask("d")
        assert device.step(0) is Step.DECLINED
        assert "NaN or infinity, first at row 24" in texts(events, "dropped")[-1]
        del kept[-1]
        assert answer(fleet, device) == list(range(24))


@pytest.mark.parametrize("replaced", [True, False])
def test_corrected_data_take_part_after_a_new_start(fleet: Fleet, tmp_path: Path, replaced: bool) -> None:
    """Data whose reading ended the background thread, at its first turn and after a replacement."""
    good, bad = items(), [(np.full(4, np.nan, np.float32), 0)]
    now = [bad]
    with make_device(fleet, tmp_path, data=lambda: now[0]) as device:
        for answers in (1, 2):
            device.start()
            with pytest.raises(DataError, match="NaN or infinity, first at row 0"):
                device.join(PATIENCE_SECONDS)
            now[0] = good
            if replaced:
                device.replace_data(good)
            fleet.ask("d")
            device.start()
            wait_for(fleet, answers)
            device.stop()
            assert device.join(PATIENCE_SECONDS)
            now[0] = bad
            device.replace_data(lambda: now[0])


# --- no samples


def test_device_without_samples_waits_and_joins_once_it_has_some(fleet: Fleet, tmp_path: Path) -> None:
    kept: list[Item] = []
    events, clock = EventLog(), ManualClock()
    with make_device(fleet, tmp_path, events, data=kept, clock=clock) as device:
        for _ in range(3):
            assert device.step(0) is Step.WAITED
        with pytest.raises(NoSamplesError, match="data has no samples;"):
            _ = device.model
        assert fleet.store.devices.get(RUN, "d") is None
        assert [event.kind for event in events] == ["no-samples"]
        kept.extend(items(6))
        assert answer(fleet, device) == list(range(6))


def test_losing_all_samples_leaves_the_round_and_not_the_run(fleet: Fleet, tmp_path: Path) -> None:
    kept, events = items(), EventLog()
    with make_device(fleet, tmp_path, events, data=lambda: kept, clock=ManualClock()) as device:
        answer(fleet, device)
        model = device.model
        kept.clear()
        fleet.ask("d")
        assert device.step(0) is Step.DECLINED
        assert "no samples" in texts(events, "dropped")[-1]
        assert not fleet.store.asks.open_ids()
        fleet.ask("d")
        assert [device.step(0), device.step(0)] == [Step.WAITED, Step.WAITED]
        assert len(texts(events, "no-samples")) == 1
        assert device.model is model
        kept.extend(items(5, seed=4))
        assert device.step(0) is Step.ANSWERED
        assert samples_of(fleet) == 5


def test_a_restarted_device_whose_samples_are_gone_waits(fleet: Fleet, tmp_path: Path) -> None:
    with make_device(fleet, tmp_path) as device:
        answer(fleet, device)
    with make_device(fleet, tmp_path, data=tiny_data(0), clock=ManualClock()) as device:
        assert device.step(0) is Step.WAITED
        assert device.model is not None


# --- augmentation


def test_augmented_data_train_on_draws_and_send_sample_knowledge(tmp_path: Path) -> None:
    seen: list[Tensor] = []

    def transform(one: Tensor) -> Tensor:
        seen.append(one + 0.1 * torch.randn(4))
        return seen[-1]

    data = Augmented(tiny_data(), transform)
    first = learned(tmp_path / "a", data)
    assert len({tuple(item.tolist()) for item in seen}) == len(seen) >= 48, "each epoch has new draws"
    again = learned(tmp_path / "b", data)
    assert equal(first[0], again[0]), "a repeated ask gives the same bits"
    assert equal(first[0], learned(tmp_path / "d", lambda: data)[0]), "also when a function returns them"
    plain = learned(tmp_path / "c", tiny_data())
    assert not equal(first[0], plain[0])
    assert first[2] == plain[2]


@pytest.mark.parametrize("data", [tiny_data(), items()], ids=["arrays", "items"])
def test_another_transform_of_the_same_samples_is_used(data: Any) -> None:
    def first(one: Tensor) -> Tensor:
        return one

    def second(one: Tensor) -> Tensor:
        return one

    known = read_samples(Augmented(data, first))
    assert read_samples(Augmented(data, first), known) is known
    changed = read_samples(Augmented(data, second), known)
    assert (changed.transform, changed.digest) == (second, known.digest)
    assert read_samples(data, changed).transform is None


def test_random_dataset_keeps_its_ids_and_draws_anew_in_training(tmp_path: Path) -> None:
    data = Noisy(items(), torch_noise)
    first, again = learned(tmp_path / "a", data), learned(tmp_path / "b", data)
    assert equal(first[0], again[0])
    assert np.array_equal(first[1], again[1]), "knowledge does not depend on a draw"
    fleet = Fleet()
    with make_device(fleet, tmp_path / "c", data=data) as device:
        assert answer(fleet, device) == answer(fleet, device) == list(range(24))
    fleet.store.close()


def test_reading_data_leaves_the_host_s_random_numbers_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    read_samples(Noisy(items(), torch_noise))
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(
    ("transform", "says"),
    [
        (lambda one: one[:2], r"returns torch.float32 \[2\], expected float32 \[4\]"),
        (lambda one: one.double(), r"returns torch.float64"),
        (lambda one: one.no_such(), "transform of Augmented fails with AttributeError"),
    ],
)
def test_a_transform_that_does_not_fit_declines_the_ask(
    fleet: Fleet, tmp_path: Path, transform: Callable[[Tensor], Tensor], says: str
) -> None:
    events = EventLog()
    with make_device(fleet, tmp_path, events, data=Augmented(tiny_data(), transform)) as device:
        fleet.ask("d")
        device.step(0)
    assert re.search(says, events.of("dropped").text)


def test_data_that_the_method_cannot_use_replace_nothing(tmp_path: Path) -> None:
    """The answer for the previous data must not pass for that of the new ones."""
    settings: dict[str, Any] = {
        "run": {"method": "classstats", "rounds": 0},
        "contract": {"classes": 10, "input_shape": [1, 8, 8]},
    }
    images = np.random.default_rng(0).random((120, 1, 8, 8), dtype=np.float32)
    few, all_classes = np.arange(120) % 5, np.arange(120) % 10
    events = EventLog()
    with (
        MemoryServer(settings) as server,
        open_device(
            server=server.link(),
            model=lambda: build_model("digits_mlp_small"),
            data=(images, few),
            state_dir=tmp_path,
            on_event=events.append,
        ) as device,
    ):
        while device.version < 1:
            device.step(0)
        device.replace_data((images * 255, all_classes))
        for _ in range(3):
            with pytest.raises(
                DataError, match=r"^data: scattering needs images in \[0, 1\], got .* in a simulation, add --set"
            ):
                device.step(0)
        answered = events.kinds().count("answered")
        device.replace_data((images, all_classes))
        while device.version < 2:
            device.step(0)
        assert events.kinds().count("answered") > answered
        digests = [entry.sha256 for entry in device.ledger.entries if entry.step == "summarise"]
        assert len(set(digests)) == len(digests) == 2


# --- errors at construction


class Broken(Listed):
    """Row 3 cannot be read."""

    def __getitem__(self, row: int) -> Any:
        if row == 3:
            raise OSError("no such file")
        return super().__getitem__(row)


INPUTS, LABELS = tiny_data()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("photos/", "data: the data is of type str; pass a tuple"),
        (iter(items()), "which can be read only once; pass a function"),
        ((np.zeros((2, 4), np.uint8), LABELS[:2]), "the inputs are uint8, expected floats; scale images"),
        ((INPUTS, LABELS * 1.0), "the labels are float64 of shape .*; number the classes from 0"),
        ((INPUTS, np.eye(3, dtype=int)[LABELS]), r"of shape \[24, 3\], .*; labels.argmax\(axis=1\) makes them"),
        ((LABELS, INPUTS), r"inputs and labels are swapped; pass \(inputs, labels\)"),
        ((INPUTS, LABELS[1:]), "24 inputs but 23 labels"),
        ((INPUTS, LABELS - 1), "label -1 at row 0 is negative"),
        ((np.where(INPUTS > 2, np.inf, INPUTS), LABELS), "NaN or infinity, first at row"),
        (([[1.0, 2.0], [3.0]], LABELS[:2]), "all inputs need one shape"),
        ((np.array([None, "a"]), LABELS[:2]), "array of dtype object"),
        (
            [(np.zeros(4, np.float32), 0), (np.zeros(3, np.float32), 0)],
            r"the input in row 1 of list has shape \[3\], expected \[4\] as in row 0; all inputs need one shape",
        ),
        ([(np.zeros(4, np.float32), 0.5)], "the label in row 0 of list is of type float, expected an integer"),
        ([{"image": 1}], r"row 0 of list is of type dict, expected \(input, label\)"),
        ([("a.png", 0)], "the input in row 0 of list is of type str, expected a tensor or an array of floats"),
        (([], []), r"the data is a tuple of 2 items \(list, list\), expected \(inputs, labels\)"),
        (([[0.1, 0.2]], [0]), r"tuple of 2 items \(list, list\).*convert lists with numpy.asarray"),
        ((INPUTS, LABELS, LABELS), r"tuple of 3 items \(ndarray, ndarray, ndarray\)"),
        (INPUTS, r"the data is one array of shape \[24, 4\]; pass a tuple \(inputs, labels\)"),
        (Broken(items()), "row 3 of Broken raised OSError: no such file; fix or remove the sample"),
        (Noisy(items(), random.random), "a sample changes each time it is read.*sample_id"),
        (DataLoader(Listed(items()), sampler=SubsetRandomSampler([1, 2])), "SubsetRandomSampler selects samples"),
        (Listed([(np.zeros(4, np.float32), 0, 1)]), "row 0 of Listed is of type tuple of 3 items, expected"),  # type: ignore[list-item]
        (Named(items(), []), "sample_id of Named raised IndexError"),
    ],
)
def test_data_that_cannot_work_are_an_error_at_construction(fleet: Fleet, tmp_path: Path, data: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        make_device(fleet, tmp_path / "d", data=data)
    assert not (tmp_path / "d").exists()
    with make_device(fleet, tmp_path / "d") as device, pytest.raises(DataError, match=says):
        device.replace_data(data)


def test_errors_of_the_apps_code_name_it(fleet: Fleet, tmp_path: Path) -> None:
    class Camera:
        def __iter__(self) -> Iterator[Any]:
            yield from items()[:2]
            raise ValueError("no light")

    def load() -> Any:
        raise KeyError("image")

    broken: dict[str, Any] = {
        "row 2 of Camera raised ValueError: no light; fix or remove": Camera(),
        "the function load raised KeyError: 'image'; fix it; while it cannot read it may raise OSError or": load,
        "data: the function returned an object of type NoneType; pass a tuple": lambda: None,
    }
    for at, (says, data) in enumerate(broken.items()):
        with make_device(fleet, tmp_path / str(at), data=data) as device, pytest.raises(DataError, match=says):
            device.step(0)


class Camera:
    """Data that cannot be read at first: a function, and an iterable."""

    def __init__(self) -> None:
        self.works = False

    def __iter__(self) -> Iterator[Item]:
        yield from items()[:2]
        if not self.works:
            raise OSError("no light")

    def read(self) -> list[Item]:
        return list(self)


@pytest.mark.parametrize("form", ["function", "iterable", "test data"])
def test_data_that_cannot_be_read_at_first_are_read_again(fleet: Fleet, tmp_path: Path, form: str) -> None:
    """As data that cannot be read later, which decline an ask; before the first check-in there is none."""
    camera, events, clock = Camera(), EventLog(), ManualClock()
    forms: dict[str, dict[str, Any]] = {
        "function": {"data": camera.read},
        "iterable": {"data": camera},
        "test data": {"test_data": camera.read},
    }
    with make_device(fleet, tmp_path, events, clock=clock, **forms[form]) as device:
        assert [device.step(0), device.step(0)] == [Step.WAITED] * 2
        with pytest.raises(NoSamplesError, match="raised OSError: no light"):
            _ = device.model
        (text,) = texts(events, "no-samples")
        assert text.endswith("; the device reads the data again")
        assert "raised OSError: no light" in text
        camera.works = True
        fleet_ids = answer(fleet, device)
    assert fleet_ids == list(range(24 if form == "test data" else 2))


def test_replaced_data_that_cannot_be_read_are_read_again(fleet: Fleet, tmp_path: Path) -> None:
    camera, events, clock = Camera(), EventLog(), ManualClock()
    with make_device(fleet, tmp_path, events, clock=clock) as device:
        answer(fleet, device)
        device.replace_data(camera.read)
        assert device.step(0) is Step.WAITED
        assert "raised OSError: no light" in texts(events, "no-samples")[0]
        camera.works = True
        answer(fleet, device)
        assert samples_of(fleet) == 2


def test_data_are_not_replaced_if_this_cannot_be_recorded(fleet: Fleet, tmp_path: Path) -> None:
    """After a crash, the device would not know of the new data."""
    with make_device(fleet, tmp_path / "state") as device:
        device.tick()
        (tmp_path / "state").rename(tmp_path / "moved")
        with pytest.raises(StateError, match="cannot be used"):
            device.replace_data()
        (tmp_path / "moved").rename(tmp_path / "state")
        device.replace_data()


def test_unreadable_data_decline_the_ask_of_a_known_device(fleet: Fleet, tmp_path: Path) -> None:
    camera, events = Camera(), EventLog()
    camera.works = True
    with make_device(fleet, tmp_path, data=camera.read) as device:
        answer(fleet, device)
    camera.works = False
    with make_device(fleet, tmp_path, events, data=camera.read) as device:
        device.step(0)
        fleet.ask("d")
        assert device.step(0) is Step.DECLINED
        assert "raised OSError: no light" in texts(events, "dropped")[0]


def test_test_and_validation_data_are_checked_at_construction(fleet: Fleet, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="validation_data: the data is of type str"):
        make_device(fleet, tmp_path, validation_data="x")


def test_a_transform_must_be_a_function() -> None:
    with pytest.raises(ConfigurationError, match="expected a function of one input tensor"):
        Augmented(tiny_data(), 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("one_class", [True, False], ids=["one class", "one sample"])
def test_one_class_or_one_sample_is_enough(fleet: Fleet, tmp_path: Path, one_class: bool) -> None:
    inputs, labels = tiny_data()
    data = (inputs[labels == 1], labels[labels == 1]) if one_class else (inputs[:1], labels[:1])
    with make_device(fleet, tmp_path, data=data) as device:
        assert answer(fleet, device) == list(range(len(data[1])))


def test_worker_that_uses_pytorch_reads_its_own_data_again(fleet: Fleet, tmp_path: Path) -> None:
    kept = items()

    def worker(contract: contract_pb2.Contract) -> TorchCompute:
        return TorchCompute(contract, model=TorchModel(tiny_model), data=Splits(kept))

    with make_device(fleet, tmp_path, worker=worker, model=None, data=None, test_data=None) as device:
        assert len(answer(fleet, device)) == 24
        del kept[20:]
        assert len(answer(fleet, device)) == 20
