"""`Device.preview`: exactly what an answer contains, before anything leaves and without changing anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from device.sdk_fleet import RUN, Fleet, make_device, tiny_data
from support.devices import state_of
from support.hostile_server import LyingLink, terms
from support.open_device import open_device
from support.private_fleet import PrivateFleet, RowsWorker, state_files
from torch import nn

from fleetdistill import COLUMNS, Step
from fleetdistill.compute import light_worker
from fleetdistill.device.preview import Histogram
from fleetdistill.errors import ConfigurationError, DeviceBusyError
from fleetdistill.knowledge import ProxySet
from fleetdistill.methods import METHODS
from fleetdistill.training.model import split_sequential
from fleetdistill.wire.codec import decode, encode
from fleetdistill_server.intake.memory_link import MemoryLink


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_preview_has_names_shapes_types_and_bytes_of_real_answer(fleet: Fleet, tmp_path: Path) -> None:
    with make_device(fleet, tmp_path) as device:
        preview = device.preview()
        assert device.ledger.totals.messages == {"check-in": 1}
        assert not fleet.store.asks.uploads(RUN)
        fleet.ask("d")
        device.step(0)
        (sent,) = [entry for entry in device.ledger.entries if entry.kind == "answer"]
    (upload,) = fleet.store.asks.uploads(RUN)
    real = fleet.store.blobs.open(upload.sha256)
    shown = [
        (tensor.name, tensor.dtype, tensor.shape, tensor.bytes) for part in preview.parts for tensor in part.tensors
    ]
    assert shown == [(slot.path, slot.dtype.name, slot.shape, slot.nbytes) for slot in real.slots]
    assert {part.name: list(part.columns) for part in preview.parts} == sent.columns
    assert (preview.bytes, preview.samples, preview.step) == (sent.bytes, sent.samples, "train")
    assert preview.columns == ("features", "labels", "logits", "metrics")
    assert [part.kind for part in preview.parts] == [part.WhichOneof("kind") for part in real.parts.parts]


def test_a_preview_shows_each_tensors_histogram_and_the_figures(fleet: Fleet, tmp_path: Path) -> None:
    with make_device(fleet, tmp_path) as device:
        preview = device.preview()
    tensors = {tensor.name: tensor for part in preview.parts for tensor in part.tensors}
    labels = tensors["knowledge/labels"].histogram
    assert (sum(labels.counts), labels.edges[0], labels.edges[-1]) == (24, 0.0, 2.0)
    assert [count for count in labels.counts if count] == [8, 8, 8]
    metrics = preview.parts[1].values["metrics"]
    assert {metric["split"] for metric in metrics} == {"test", "train"}
    assert [metric["count"] for metric in metrics] == [9, 9, 48]
    text = str(preview)
    assert text.startswith("run 'sdk', feddkc, step 'train': ")
    assert "knowledge/labels  int32 [24]  96 bytes  0 [" in text
    assert "\n  metrics: name accuracy, split test, sum " in text
    assert text.count("\n  metrics: name ") == 3
    assert "{" not in text


def test_a_bin_with_few_values_can_be_seen() -> None:
    assert str(Histogram([1, 0, 1000], [0.0, 1.0, 2.0, 3.0])) == "0 [▁ █] 3"


def test_preview_changes_nothing_and_next_answer_is_the_same(fleet: Fleet, tmp_path: Path) -> None:
    def answered(directory: Path, *, previews: int) -> Any:
        other = Fleet()
        with make_device(other, directory) as device:
            for _ in range(2):
                device.step(0)
                other.ask("d")
                assert device.step(0) is Step.ANSWERED
                before, weights = contents(directory), device.model.state_dict()
                kept = {name: tensor.clone() for name, tensor in weights.items()}
                for _ in range(previews):
                    device.preview()
                assert contents(directory) == before
                assert all(torch.equal(tensor, kept[name]) for name, tensor in device.model.state_dict().items())
            parts = [
                decode(other.store.blobs.open(upload.sha256))["knowledge"] for upload in other.store.asks.uploads(RUN)
            ]
            return [part.logits.tobytes() for part in parts], state_of(device)  # type: ignore[attr-defined]

    assert answered(tmp_path / "a", previews=0) == answered(tmp_path / "b", previews=2)


def test_a_preview_has_only_allowed_columns(fleet: Fleet, tmp_path: Path) -> None:
    with make_device(fleet, tmp_path) as device:
        device.allow = ("features", "logits", "labels")
        assert device.preview().columns == ("features", "labels", "logits")


def test_a_preview_is_refused_while_the_device_works(fleet: Fleet, tmp_path: Path) -> None:
    refused: list[str] = []

    def show(event: Any) -> None:
        with pytest.raises(DeviceBusyError) as error:
            device.preview()
        refused.append(str(error.value))

    fleet.ask("d")
    with make_device(fleet, tmp_path, on_event=show) as device:
        device.step(0)
    assert refused


def test_a_private_preview_has_noise_and_spends_nothing(tmp_path: Path) -> None:
    fleet = PrivateFleet()
    given: dict[str, Any] = {"worker": Previewing, "device_id": "d", "export": "never"}
    with open_device(server=MemoryLink(fleet.api), state_dir=tmp_path, **given) as device:
        first, second = device.preview(), device.preview()
        assert state_files(tmp_path) == {}
        assert first.private
        assert (first.samples, first.columns) == (1, ("class_statistics", "counts"))
        assert [part.kind for part in first.parts] == ["class_sums"]
        assert histograms(first) != histograms(second), "each has noise of its own"
        fleet.ask()
        device.step(0)
    assert set(state_files(tmp_path)) == {"privacy.json", "released.npz"}


class Previewing(RowsWorker):
    def first_ask(self) -> Any:
        from fleetdistill.methods.base import Ask

        return Ask(round=1, step="summarise", seed=0)


def histograms(preview: Any) -> list[Any]:
    return [tensor.histogram for part in preview.parts for tensor in part.tensors]


def test_a_worker_without_preview_is_told_what_to_add(tmp_path: Path) -> None:
    given: dict[str, Any] = {"worker": RowsWorker, "export": "never"}
    with (
        open_device(server=MemoryLink(PrivateFleet().api), state_dir=tmp_path, **given) as device,
        pytest.raises(ConfigurationError, match="RowsWorker has no preview; define first_ask"),
    ):
        device.preview()


def test_a_light_device_has_a_preview_too(tmp_path: Path) -> None:
    fleet = PrivateFleet()
    images = np.random.default_rng(0).random((30, 1, 8, 8), np.float32)
    given: dict[str, Any] = {"worker": light_worker((images, np.arange(30) % 3)), "export": "never"}
    with open_device(server=MemoryLink(fleet.api), state_dir=tmp_path, **given) as device:
        preview = device.preview()
    assert preview.private
    assert preview.columns == ("class_statistics", "counts")


# --- every method


SETTINGS: dict[str, dict[str, Any]] = {
    "classstats": {"features": "model", "dimensions": 0},
    "classstats_private": {"features": "model"},
    "classstats_secure": {"features": "model"},
    "classstats_summed": {"features": "model", "dimensions": 0},
    "dafkd": {"kd_samples": 4, "generator": "embedding_generator", "noise_dim": 3},
}
CONTAINS = {
    "cdkt": ("logits", "metrics"),
    "classstats": ("class_statistics", "counts"),
    "classstats_private": ("class_statistics", "counts"),
    "classstats_secure": ("class_statistics", "counts"),
    "classstats_summed": ("class_statistics", "counts"),
    "dafkd": ("metrics", "parameters"),
    "fedavg": ("metrics", "parameters"),
    "fedd2s": ("features", "labels", "metrics"),
    "feddkc": ("features", "labels", "logits", "metrics"),
    "feddkd": ("metrics", "parameters"),
}


def test_the_table_has_every_method() -> None:
    assert CONTAINS.keys() == METHODS.keys()


@pytest.mark.parametrize("method", sorted(CONTAINS))
def test_every_method_has_a_preview(method: str, tmp_path: Path) -> None:
    proxy = encode({"proxy": ProxySet(name="p", licence="none", inputs=tiny_data(6)[0], labels=tiny_data(6)[1])})
    link = LyingLink(terms=terms(method, SETTINGS.get(method)))
    if method == "cdkt":
        link.terms.contract.proxy_digest, link.terms.contract.proxy_samples = link.holds(proxy), 6
    with open_device(
        server=link,
        model=model,
        data=tiny_data(),
        state_dir=tmp_path,
        allow=COLUMNS,
        export="never",
    ) as device:
        preview = device.preview()
    assert set(preview.columns) <= set(CONTAINS[method])
    assert set(preview.columns) >= set(CONTAINS[method]) - {"metrics"}
    assert preview.method == method
    assert not link.uploads
    if method == "classstats":
        assert preview.parts[0].values == {"classes": [0, 1, 2]}
        assert "\n  classes: [0, 1, 2]" in str(preview)


def model() -> nn.Module:
    torch.manual_seed(0)
    return split_sequential(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), 2)
