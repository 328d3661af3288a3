"""A device without PyTorch: what it loads, that it agrees with one that has PyTorch, and what it refuses."""

from __future__ import annotations

import builtins
import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.testing import assert_allclose
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits
from support.devices import compute_of
from support.open_device import open_device
from support.processes import PATIENCE_SECONDS, wait_until

from fleetdistill import COLUMNS, Device
from fleetdistill.compute.light_compute import LightCompute, light_worker
from fleetdistill.compute.light_models import unpack_variants
from fleetdistill.data import Splits
from fleetdistill.errors import ConfigurationError, DataError, ExportError, FleetDistillError, ModelError, WireError
from fleetdistill.knowledge import (
    GENERAL,
    PERSONAL,
    Array,
    ClassSpace,
    HeadGradient,
    LinearHead,
    Metrics,
    NetworkFile,
    Plan,
    SharedStatistics,
)
from fleetdistill.methods.base import Ask, Local
from fleetdistill.methods.classstats.class_space import make_space
from fleetdistill.methods.classstats.config import ClassStatsConfig
from fleetdistill.methods.classstats.device import ClassStatsDevice, RefiningDevice
from fleetdistill.methods.classstats.exchange import SpacePlan
from fleetdistill.methods.classstats.shared_statistics import from_wire, merge
from fleetdistill.models import build_model
from fleetdistill.state.failpoints import VARIABLE
from fleetdistill.state.state_file import unpack_state
from fleetdistill.training.local_training import TensorData
from fleetdistill.training.model import check_local_model, split_sequential
from fleetdistill.wire.codec import decode, encode
from fleetdistill.wire.v1 import contract_pb2, service_pb2
from fleetdistill_lab.simulation.links.links import device_host
from fleetdistill_lab.simulation.report.final_models import FinalModels
from fleetdistill_lab.simulation.spec.device import DeviceSpec
from fleetdistill_server.config.run_config import RunConfig, run_config
from fleetdistill_server.engine.contract import build_method, make_contract
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.service.supervisor import Supervisor
from fleetdistill_server.store.store import Store
from fleetdistill_server.testing import MemoryServer

ROOT = Path(__file__).parents[2]
CHILD = ROOT / "tests/light/light_process.py"
RUN, CLASSES, SHAPE = "light", 10, (1, 8, 8)
ASK = service_pb2.Ask(round=1, step="learn", seed=3)
Pair = tuple[np.ndarray, np.ndarray]


@functools.cache
def digits(part: int) -> Pair:
    """A third of them."""
    whole = load_digits()
    return (whole.images[part::3, None] / 16).astype(np.float32), whole.target[part::3]


def classes_below(limit: int, data: Pair) -> Pair:
    return data[0][data[1] < limit], data[1][data[1] < limit]


def config_of(method: Mapping[str, Any] | None = None, **run: Any) -> RunConfig:
    return run_config(
        {
            "run": {"name": RUN, "method": "classstats", "rounds": 1, "min_devices": 1, **run},
            "contract": {"classes": CLASSES, "input_shape": list(SHAPE)},
            "model": {"extractor": "digits_extractor"},
            "method": dict(method or {}),
            "server": {"torch_device": "cpu", "listen": "127.0.0.1:0"},
        }
    )


class Offered:
    """A run's contract, and the extractor's file that it names."""

    def __init__(self, **method: Any) -> None:
        self.half = build_method(config_of(method))
        self.contract, _, payload = make_contract(config_of(method), self.half)
        assert payload is not None
        self.parts = decode(payload)
        file = self.parts["extractor"]
        assert isinstance(file, NetworkFile)
        self.file = file.onnx.tobytes()

    def worker(self, data: Any = None, **more: Any) -> LightCompute:
        """With its extractor."""
        made = light_worker(Splits(digits(0) if data is None else data, **more))(self.contract)
        assert isinstance(made, LightCompute)
        made.take_payload(self.contract.extractor_file, self.parts)
        return made


@pytest.fixture(scope="module")
def offered() -> Offered:
    return Offered()


def torch_half(data: Pair, kind: type[ClassStatsDevice] = ClassStatsDevice, **settings: Any) -> ClassStatsDevice:
    """The device half with PyTorch on the same rows."""
    module = build_model("digits_linear")
    tensors = TensorData(torch.from_numpy(data[0]), torch.from_numpy(data[1]))
    local = Local(
        model=module,
        taps=check_local_model(module),
        data=tensors,
        classes=CLASSES,
        torch_device=torch.device("cpu"),
    )
    return kind(ClassStatsConfig(**settings), local)


def space_of(*data: Pair) -> ClassSpace:
    """What the server makes of devices with these rows, as it travels."""
    parts = []
    for item in data:
        sent = torch_half(item).handle(Ask(round=1, step="summarise", seed=1)).parts["statistics"]
        result = decode(encode({"statistics": sent}))["statistics"]
        assert isinstance(result, SharedStatistics)
        parts.append(from_wire(result))
    space = decode(encode({"space": make_space(merge(parts), 0.1)}))["space"]
    assert isinstance(space, ClassSpace)
    return space


@pytest.fixture(scope="module")
def space() -> ClassSpace:
    return space_of(digits(0), digits(1))


def lesson(space: ClassSpace, merge: int = 5) -> dict[str, Any]:
    plan = SpacePlan(merge=merge, counted=True, draw_seed=1).to_wire()
    return decode(encode({"plan": plan, "space": space}))


def learned(worker: LightCompute, space: ClassSpace, allow: Any = COLUMNS) -> Any:
    work = worker.answer(ASK, lesson(space), allow)
    assert work.replacement is not None
    worker.deliver(work.replacement)
    return work


# --- what it loads


def environment(**more: str) -> dict[str, str]:
    paths = os.pathsep.join(str(ROOT / name) for name in ("client_sdk", "server", "tests"))
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **more}


def save(data: Pair, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    np.savez(folder / "data.npz", inputs=data[0], labels=data[1])
    return folder


def test_a_whole_exchange_loads_no_torch(offered: Offered, space: ClassSpace, tmp_path: Path) -> None:
    save(digits(0), tmp_path)
    (tmp_path / "contract.bin").write_bytes(offered.contract.SerializeToString())
    (tmp_path / "extractor.onnx").write_bytes(offered.file)
    np.savez(tmp_path / "space.npz", **vars(space))
    done = subprocess.run(
        [sys.executable, str(CHILD), "played", str(tmp_path)], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads((tmp_path / "modules.json").read_text()))
    assert not loaded & {"torch", "torchvision", "onnx", "safetensors", "fleetdistill_server"}
    assert {"numpy", "onnxruntime", "fleetdistill"} <= loaded
    assert (answers_in(tmp_path)[GENERAL].argmax(axis=1) == digits(0)[1]).mean() > 0.97


def answers_in(folder: Path) -> dict[str, Array]:
    with np.load(folder / "logits.npz") as arrays:
        return dict(arrays)


# --- over gRPC


@contextlib.contextmanager
def serving(work: Path, method: Mapping[str, Any] | None = None, **run: Any) -> Iterator[int]:
    """A server of its own; gives its port."""
    config = config_of(method, **run)
    config = config.model_copy(update={"server": config.server.model_copy(update={"store": str(work / "store")})})
    supervisor = Supervisor(config, log=work / "server.log")
    thread = threading.Thread(target=supervisor.serve)
    thread.start()
    try:
        wait_until(lambda: supervisor.port is not None, "the server to listen")
        assert supervisor.port is not None
        yield supervisor.port
    finally:
        supervisor.stop()
        thread.join()


def start_light(folder: Path, port: int, **more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(CHILD), "served", str(folder), f"127.0.0.1:{port}"]
    return subprocess.Popen(command, env=environment(**more))


def events_in(folder: Path) -> list[list[Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def spec_of(name: str, data: Pair, work: Path) -> DeviceSpec:
    file = work / f"{name}.npz"
    np.savez(file, inputs=data[0], labels=data[1])
    return DeviceSpec(
        name=name,
        model="digits_linear",
        seed=1,
        classes=CLASSES,
        data_file=str(file),
        test_file=str(file),
        state_dir=str(work / name),
        run=RUN,
        validation_file="",
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", [{}, pytest.param({"refine": "gradients"}, marks=pytest.mark.long)])
def test_light_device_gets_same_space_and_answers_as_with_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: dict[str, Any]
) -> None:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    own = save(digits(0), tmp_path / "light")
    specs = [spec_of("twin", digits(0), tmp_path), spec_of("other", digits(1), tmp_path)]
    with serving(tmp_path, method, min_devices=3) as port, device_host(specs, port, 1) as host:
        light = start_light(own, port)
        assert {process.wait(PATIENCE_SECONDS) for process in (light, host)} == {0}
    assert not set(json.loads((own / "modules.json").read_text())) & {"torch", "onnx", "safetensors"}
    _, spaces, _ = unpack_variants((own / "state/state.safetensors").read_bytes())
    for spec in specs:
        state = unpack_state((Path(spec.state_dir) / "state.safetensors").read_bytes())["method"]["space"]
        assert state["labels"] == spaces["space"].labels
        for name in ("directions", "origin", "centres", "counts", "df"):
            assert np.array_equal(state[name].numpy(), getattr(spaces["space"], name)), name
        assert state["leverage"] == spaces["space"].leverage
    assert spaces["space"].is_refined == bool(method)
    with contextlib.closing(Store.open(tmp_path / "store")) as store:
        exported = FinalModels(store, config_of(method, min_devices=3)).export(specs[0], tmp_path, [PERSONAL])
    assert exported is not None
    result = answers_in(own)
    assert sorted(result) == [GENERAL, PERSONAL]
    for name, logits in result.items():
        session = onnxruntime.InferenceSession(str(tmp_path / exported.variants[name]))
        assert_same(session.run(["logits"], {"input": digits(0)[0]})[0], logits)
    kinds = [kind for kind, _, _ in events_in(own)]
    assert kinds.count("extractor") == 1
    assert [kind for kind in kinds if kind in ("delivered", "finished")] == ["delivered", "finished"]


def assert_same(expected: Array, found: Array) -> None:
    """To a thousandth of the logits' scale; other classes only where the first two are as near as that."""
    close = 1e-3 * np.abs(expected).max()
    assert_allclose(found, expected, atol=close)
    two = np.sort(expected, axis=1)[:, -2:]
    differs = found.argmax(axis=1) != expected.argmax(axis=1)
    assert not (differs & (two[:, 1] - two[:, 0] > close)).any()


def fetched_in(own: Path) -> set[tuple[str, int]]:
    """Names of the payloads that a device keeps, each with the time when it was written."""
    return {(path.name, path.stat().st_mtime_ns) for path in (own / "state/downloads").iterdir()}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "point",
    [
        "device.first-state.after-save=kill",
        "device.outbox.after-manifest=kill",
        "device.upload.after-receipt=kill@2",
        "device.promote.between-renames=kill@2",
    ],
)
def test_killed_at_any_moment_it_goes_on_from_its_directory(point: str, tmp_path: Path) -> None:
    own = save(digits(0), tmp_path / "light")
    with serving(tmp_path) as port:
        killed = start_light(own, port, **{VARIABLE: point})
        assert killed.wait(PATIENCE_SECONDS) == -signal.SIGKILL
        kept = fetched_in(own)
        assert start_light(own, port).wait(PATIENCE_SECONDS) == 0
    assert kept & fetched_in(own), "the extractor's file is kept, and fetched once"
    kinds = [kind for kind, _, _ in events_in(own)]
    told = 0 if "first-state" in point else 1  # killed before the worker is ready, the app is not told of the file
    assert kinds.count("extractor") == told
    begun = [text for kind, _, text in events_in(own) if kind == "ask" and text.startswith("round")]
    assert len(begun) == (3 if "first-state" in point else 2), "an answer in the outbox is not made again"
    assert kinds[-1] == "finished"
    assert (answers_in(own)[PERSONAL].argmax(axis=1) == digits(0)[1]).mean() > 0.97


@pytest.mark.long
@pytest.mark.slow
def test_the_example_runs_without_torch(tmp_path: Path) -> None:
    hidden = "import runpy; from support.without_torch import TORCH, block; block(*TORCH)"
    code = f"{hidden}; runpy.run_path({str(ROOT / 'examples/light_device.py')!r}, run_name='__main__')"
    with serving(tmp_path) as port:
        own = ["--server", f"127.0.0.1:{port}", "--state-dir", str(tmp_path / "pi"), "--part", "0/3"]
        command = [sys.executable, "-c", code, *own]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    assert "delivered" in done.stdout
    known = re.findall(r"the (\w+) model classifies ([\d.]+)%", done.stdout)
    assert [name for name, _ in known] == [GENERAL, PERSONAL]
    assert all(float(share) > 80 for _, share in known), "59 digits of writers that it has not seen"


# --- answers, verdicts, metrics


def test_it_answers_as_a_device_with_torch_does(offered: Offered, space: ClassSpace) -> None:
    half, worker = torch_half(digits(0)), offered.worker()
    half.handle(Ask(round=1, step="learn", seed=3, parts=lesson(space)))
    work = learned(worker, space)
    unseen = digits(2)[0]
    for name, model in half.variants().items():
        with torch.no_grad():
            expected = model.eval()(torch.from_numpy(unseen)).numpy()
        result = worker.delivered_models()[name]
        assert_same(expected, result(unseen))
    figures = {metric.name: metric for metric in work.answer.parts["metrics"].metrics}
    for metric in half.figures:
        assert asdict(figures[metric.name]) == asdict(metric)


def test_it_sends_what_a_device_with_torch_sends(offered: Offered) -> None:
    ask = Ask(round=1, step="summarise", seed=1)
    sent = torch_half(digits(0)).handle(ask).parts["statistics"]
    work = offered.worker().answer(service_pb2.Ask(round=1, step="summarise"), {}, COLUMNS)
    own = work.answer.parts["statistics"]
    assert isinstance(own, SharedStatistics)
    assert isinstance(sent, SharedStatistics)
    assert work.answer.samples == len(digits(0)[1])
    assert own.labels == sent.labels
    for name in ("counts", "df"):
        assert np.array_equal(getattr(own, name), getattr(sent, name))
    assert own.means is not None
    assert sent.means is not None
    assert_allclose(own.means.astype(float), sent.means.astype(float), atol=2e-3)


def test_it_sums_gradients_as_a_device_with_torch_does() -> None:
    made = Offered(refine="gradients")
    rng = np.random.default_rng(0)
    size = 256
    head = LinearHead(
        labels=list(range(CLASSES)),
        counts=np.full(CLASSES, 50),
        mean=np.zeros(size, np.float16),
        weights=rng.normal(0, 0.1, (CLASSES, size + 1)).astype(np.float16),
    )
    parts = decode(encode({"head": head, "plan": Plan(values={"left_out": [3]})}))
    half = torch_half(digits(0), RefiningDevice, refine="gradients")
    sent = half.handle(Ask(round=1, step="refine", seed=1, parts=parts)).parts["gradient"]
    work = made.worker().answer(service_pb2.Ask(round=1, step="refine"), parts, COLUMNS)
    own = work.answer.parts["gradient"]
    assert isinstance(own, HeadGradient)
    assert isinstance(sent, HeadGradient)
    assert own.rows == sent.rows == (digits(0)[1] != 3).sum()
    assert own.loss == pytest.approx(sent.loss, rel=1e-4)
    expected = sent.gradient * sent.scale
    assert_allclose(own.gradient * own.scale, expected, atol=1e-3 * np.abs(expected).max())


def test_no_gradients_leave_a_device_of_another_run(offered: Offered) -> None:
    with pytest.raises(FleetDistillError, match="the run has no refined head"):
        offered.worker().answer(service_pb2.Ask(round=1, step="refine"), {}, COLUMNS)


def test_before_the_first_space_there_is_no_answer(offered: Offered, tmp_path: Path) -> None:
    store = Store.in_memory()
    store.runs.begin(RUN, config_of().fixed_part())
    store.blobs.put(encode(offered.parts))
    store.runs.publish_contract(RUN, offered.contract.SerializeToString())
    link = MemoryLink(DeviceApi(store))
    with open_device(server=link, worker=light_worker(digits(0)), state_dir=tmp_path, export="never") as device:
        with pytest.raises(ModelError, match=r"no model yet; .*the first delivery provides it.*'delivered'"):
            _ = device.model
        assert GENERAL not in device.models
        with pytest.raises(ModelError, match="no 'general' model yet; the first delivered round adds it"):
            device.models[GENERAL]
    store.close()


class CountingLink(MemoryLink):
    """Notes which payloads are asked for."""

    def __init__(self, api: DeviceApi) -> None:
        super().__init__(api)
        self.wanted: list[bytes] = []

    def download(self, identity: Any, sha256: bytes, first_byte: int) -> Any:
        self.wanted.append(sha256)
        return super().download(identity, sha256, first_byte)


def test_each_kind_of_device_fetches_what_it_works_with(tmp_path: Path) -> None:
    config, store = config_of({"features": "model"}), Store.in_memory()
    contract, initial, file = make_contract(config, build_method(config))
    store.runs.begin(RUN, config.fixed_part())
    for payload in (initial, file):
        assert payload is not None
        store.blobs.put(payload)
    store.runs.publish_contract(RUN, contract.SerializeToString())
    kinds: dict[str, Any] = {
        "light": {"worker": light_worker(digits(0))},
        "torch": {"model": build_model("digits_cnn_small"), "data": digits(0)},
    }
    for name, expected in (("light", contract.extractor_file), ("torch", contract.initial_weights)):
        link = CountingLink(DeviceApi(store))
        for fetched in ([expected], []):  # a new device; the same one started again
            link.wanted.clear()
            with open_device(server=link, state_dir=tmp_path / name, device_id=name, **kinds[name]) as device:
                compute_of(device)
            assert link.wanted == fetched
    store.close()


@pytest.mark.parametrize("has_the_weights", [True, False])
def test_weights_that_the_app_has_are_not_downloaded(tmp_path: Path, has_the_weights: bool) -> None:
    config, store = config_of({"features": "model"}), Store.in_memory()
    method = build_method(config)
    contract, initial, _ = make_contract(config, method)
    assert initial is not None
    store.runs.begin(RUN, config.fixed_part())
    store.blobs.put(initial)
    store.runs.publish_contract(RUN, contract.SerializeToString())
    model, link = build_model("digits_cnn_small"), CountingLink(DeviceApi(store))
    expected = method.context.extractor().state_dict()
    if has_the_weights:
        check_local_model(model).extractor.load_state_dict(expected)
    with open_device(server=link, model=model, data=digits(0), state_dir=tmp_path, device_id="d") as device:
        compute_of(device)
    assert link.wanted == ([] if has_the_weights else [contract.initial_weights])
    saved = unpack_state((tmp_path / "state.safetensors").read_bytes())["model"]
    first = next(iter(expected))
    assert torch.equal(next(value for key, value in saved.items() if key.endswith(first)), expected[first])
    store.close()


def test_the_first_answer_is_taken_and_a_worse_one_is_not(space: ClassSpace) -> None:
    worker = Offered(own_statistics_guard=False).worker(validation_data=digits(2))
    first = learned(worker, space)
    assert first.replacement.replaced
    assert first.replacement.accuracy_in_use is None
    assert first.replacement.text.startswith(f"the variant in use is {first.replacement.variant!r}: ")
    assert first.replacement.text.endswith("on validation data, none before")
    before = worker.delivered_model()(digits(2)[0])
    poor = replace(space, centres=np.roll(space.centres, 1, axis=0))
    second = learned(worker, poor)
    assert not second.replacement.replaced
    assert second.delivered is None
    assert np.array_equal(worker.delivered_model()(digits(2)[0]), before)


def test_what_is_in_use_is_the_better_one(offered: Offered, space: ClassSpace) -> None:
    worker = offered.worker(classes_below(2, digits(0)), validation_data=classes_below(2, digits(2)))
    work = learned(worker, space)
    result = {name: counts.accuracy for name, counts in work.scores.items()}
    expected = PERSONAL if result["validation/personal"] > result["validation"] else GENERAL
    assert work.replacement.variant == expected
    assert worker.delivered_model() is worker.delivered_models()[expected]


@pytest.mark.parametrize(("allow", "told_by_class"), [(("metrics",), False), (("metrics", "counts"), True)])
def test_figures_by_class_leave_only_with_consent(
    offered: Offered, space: ClassSpace, allow: tuple[str, ...], told_by_class: bool
) -> None:
    work = learned(offered.worker(test_data=digits(1), validation_data=digits(2)), space, allow)
    sent = work.answer.parts["metrics"]
    assert isinstance(sent, Metrics)
    names = {(metric.name, metric.split) for metric in sent.metrics}
    assert {("accuracy", "test"), ("personal/accuracy", "validation"), ("leave_one_out", "train")} <= names
    assert {("replaced", "validation"), ("picked/general", "validation")} <= names
    assert any(metric.by_class for metric in sent.metrics) is told_by_class


def test_without_consent_no_figure_leaves(offered: Offered, space: ClassSpace) -> None:
    work = learned(offered.worker(test_data=digits(1)), space, ("class_statistics", "counts"))
    assert work.answer.parts == {}
    assert set(work.scores) == {"test", "test/personal"}, "the app is told"


def test_device_allowed_to_train_reports_closed_form_answer(space: ClassSpace) -> None:
    trains = Offered(predictor="trained", own_network="taught")
    work = learned(trains.worker(), space)
    assert work.answer.notes["closed_form_instead"] == 1


def test_a_restart_goes_on_with_the_same_answers(offered: Offered, space: ClassSpace) -> None:
    worker = offered.worker(validation_data=digits(2))
    learned(worker, space)
    again = offered.worker(validation_data=digits(2))
    again.restore(worker.state(), worker.delivered_state())
    for name, model in worker.delivered_models().items():
        assert np.array_equal(again.delivered_models()[name](digits(2)[0]), model(digits(2)[0]))
    assert again.state() == worker.state()
    held = again.delivered_model()
    work = learned(again, space)
    assert work.replacement.accuracy_in_use == work.replacement.accuracy
    assert again.delivered_model() is held, "the app's model is filled, not replaced"


def test_a_damaged_state_is_said_to_be(offered: Offered, space: ClassSpace) -> None:
    worker = offered.worker()
    learned(worker, space)
    saved = worker.state()
    for damaged in (b"", saved[:-40], b"\0" * 100, saved.replace(b"outline", b"outlaws")):
        with pytest.raises(FleetDistillError, match="saved state is damaged"):
            offered.worker().restore(damaged, None)


# --- what it refuses


@pytest.mark.parametrize("first", ["light", "torch"])
def test_a_directory_of_the_other_kind_of_device_is_not_damaged(tmp_path: Path, first: str) -> None:

    def device_of(kind: str, part: int) -> Device:
        light = {"worker": light_worker(digits(part))}
        torch_ = {"model": build_model("digits_linear"), "data": digits(part)}
        return open_device(server=server.link(), state_dir=tmp_path, **(light if kind == "light" else torch_))

    def turns(device: Device) -> None:
        device.replace_data()  # so that the run asks
        for _ in range(20):
            device.step(0)

    settings = {
        "run": {"name": RUN, "method": "classstats", "rounds": 0, "min_devices": 1},
        "contract": {"classes": CLASSES, "input_shape": list(SHAPE)},
    }
    with MemoryServer(settings) as server:
        with device_of(first, 0) as device:
            turns(device)
            assert device.version == 1
        kind, other = ("without", "torch") if first == "light" else ("with", "light")
        with device_of(other, 1) as device, pytest.raises(ModelError, match=f"is that of a device {kind} PyTorch"):
            turns(device)


def test_it_wants_the_extractor_alone(offered: Offered) -> None:
    contract = contract_pb2.Contract.FromString(offered.contract.SerializeToString())
    contract.initial_weights, contract.proxy_digest = b"i" * 32, b"p" * 32
    assert light_worker(digits(0))(contract).wanted_payloads() == [contract.extractor_file]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"method": "fedavg"},
            "has method 'fedavg'; without PyTorch, only classstats, classstats_private, classstats_secure, .*summed",
        ),
        ({"extractor_file": b""}, "provides no extractor file.*must update it"),
    ],
)
def test_a_run_that_it_cannot_take_part_in_is_refused(offered: Offered, changes: dict[str, Any], says: str) -> None:
    contract = contract_pb2.Contract.FromString(offered.contract.SerializeToString())
    for name, value in changes.items():
        setattr(contract, name, value)
    with pytest.raises(ConfigurationError, match=says):
        light_worker(digits(0))(contract)


def changed(at: tuple[int, ...], value: float) -> np.ndarray:
    inputs = digits(0)[0].copy()
    inputs[at] = value
    return inputs


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([1, 2], r"data: row 0 of list is of type int, expected \(input, label\)"),
        ((digits(0)[0].transpose(0, 2, 3, 1), digits(0)[1]), r"have shape \[8, 8, 1\].*transpose\(0, 3, 1, 2\)"),
        (
            (digits(0)[0][:, 0], digits(0)[1]),
            r"inputs have shape \[8, 8\], but .* expects \[1, 8, 8\]; reshape them with inputs.reshape\(-1, 1, 8, 8\)",
        ),
        ((digits(0)[0].astype(np.uint8), digits(0)[1]), "the inputs are uint8, expected floats; scale images"),
        ((digits(0)[0], digits(0)[1][1:]), "599 inputs but 598 labels"),
        ((digits(0)[0], digits(0)[1] * 1.0), "the labels are float64"),
        ((digits(0)[0], digits(0)[1] - 1), "label -1 at row 0 is negative"),
        ((digits(0)[0], digits(0)[1] + 1), r"label 10 at row 3 is outside \[0, 10\)"),
        ((changed((4, 0, 1, 1), np.nan), digits(0)[1]), "NaN or infinity, first at row 4"),
        ((changed((4, 0, 1, 1), 255), digits(0)[1]), r"images in \[0, 1\], got 0 to 255"),
    ],
)
def test_data_that_do_not_fit_are_refused(offered: Offered, data: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        light_worker(lambda: data)(offered.contract)


def test_it_says_which_data_do_not_fit(offered: Offered) -> None:
    with pytest.raises(DataError, match="validation_data: the data is of type str"):
        light_worker(Splits(digits(0), validation_data="x"))(offered.contract)


# --- hostile files and spaces


def file_of(
    nodes: list[Any] | None = None,
    weights: list[Any] | None = None,
    inputs: tuple[str, ...] = ("input",),
    opset: str = "",
) -> bytes:
    """An ONNX file of a few operators; by default one that gives the input as it is."""
    graph = helper.make_graph(
        nodes or [helper.make_node("Flatten", ["input"], ["features"])],
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *SHAPE]) for name in inputs],
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, None)],
        weights or [],
    )
    imports = [helper.make_opsetid("", 18), *([helper.make_opsetid(opset, 1)] if opset else [])]
    made = helper.make_model(graph, opset_imports=imports)
    made.ir_version = 9
    return bytes(made.SerializeToString())


def outside(location: str) -> Any:
    result = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[64, 4], data_location=TensorProto.EXTERNAL)
    result.external_data.add(key="location", value=location)
    return result


def constant(name: str, array: Any) -> Any:
    return numpy_helper.from_array(np.asarray(array), name)


FLATTEN = helper.make_node("Flatten", ["input"], ["flat"])
WEIGHED = [FLATTEN, helper.make_node("MatMul", ["flat", "w"], ["features"])]
INNER = helper.make_graph(
    [helper.make_node("Identity", ["w"], ["out"])],
    "inner",
    [],
    [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)],
    [outside("data.npz")],
)
HOSTILE: dict[str, tuple[bytes, str]] = {
    "not ONNX": (b"not a file of ONNX at all", "not a valid ONNX file"),
    "empty": (b"", "cannot be loaded"),
    "text": (b"\x7fELF" + bytes(1000), "not a valid ONNX file"),
    "cut off": (file_of()[:-10], "not a valid ONNX file"),
    "a number where the graph is": (b"\x38\x01", "not a valid ONNX file"),
    "weights of a file": (file_of(WEIGHED, [outside("data.npz")]), "refers to external weights"),
    "weights of memory": (file_of(WEIGHED, [outside("*/_ORT_MEM_ADDR_/*")]), "refers to external weights"),
    "weights outside within a branch": (
        file_of(
            [FLATTEN, helper.make_node("If", ["c"], ["w"], then_branch=INNER, else_branch=INNER), WEIGHED[1]],
            [constant("c", np.array(True))],
        ),
        "refers to external weights",
    ),
    "a library's operator": (
        file_of([helper.make_node("Gelu", ["input"], ["features"], domain="com.microsoft")], opset="com.microsoft"),
        "operator of domain 'com.microsoft'",
    ),
    "two inputs": (file_of(inputs=("input", "more")), "has 2 inputs and 1 outputs"),
    "another input's name": (
        file_of([helper.make_node("Flatten", ["x"], ["features"])], inputs=("x",)),
        "expected 'input'",
    ),
    "a shape that is not the run's": (
        file_of([helper.make_node("Reshape", ["input", "s"], ["features"])], [constant("s", np.array([-1, 9]))]),
        r"does not accept inputs of shape \[1, 8, 8\]",
    ),
    "one row for all": (
        file_of([helper.make_node("ReduceSum", ["input", "a"], ["features"], keepdims=1)], [constant("a", [0])]),
        "expected one row for each input",
    ),
    "no axis of features": (
        file_of([helper.make_node("ReduceSum", ["input", "a"], ["features"], keepdims=0)], [constant("a", [1, 2, 3])]),
        "expected one row for each input",
    ),
    "whole numbers": (
        file_of([FLATTEN, helper.make_node("Cast", ["flat"], ["features"], to=TensorProto.INT64)]),
        "int64",
    ),
    "no numbers": (file_of(WEIGHED, [constant("w", np.ones((64, 0), "f"))]), "expected one row"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_file_is_refused(offered: Offered, what: str) -> None:
    data, says = HOSTILE[what]
    worker = light_worker(digits(0))(offered.contract)
    with pytest.raises(WireError, match=says):
        worker.take_payload(b"", {"extractor": NetworkFile(onnx=np.frombuffer(data, np.uint8))})
    assert not worker.has_payload(b"")


def test_every_cut_and_flip_of_file_raises_only_our_errors(offered: Offered) -> None:
    rng = np.random.default_rng(0)
    plain = file_of(WEIGHED, [constant("w", np.ones((64, 4), "f"))])
    for number in range(60):
        data = bytearray(plain[: rng.integers(len(plain))] if number % 3 == 0 else plain)
        for at in rng.integers(max(len(data), 1), size=number % 3):
            data[at] ^= 1 << rng.integers(8)
        worker = light_worker(digits(0))(offered.contract)
        with contextlib.suppress(FleetDistillError):
            worker.take_payload(b"", {"extractor": NetworkFile(onnx=np.frombuffer(bytes(data), np.uint8))})
            worker.answer(service_pb2.Ask(round=1, step="summarise"), {}, COLUMNS)


def test_features_that_are_not_finite_decline_the_ask(offered: Offered) -> None:
    nodes = [FLATTEN, helper.make_node("Log", ["flat"], ["features"])]
    worker = light_worker(digits(0))(offered.contract)
    file = NetworkFile(onnx=np.frombuffer(file_of(nodes), np.uint8))
    worker.take_payload(b"", {"extractor": file})
    with pytest.raises(WireError, match="gives features of row 0 that are not finite"):
        worker.answer(service_pb2.Ask(round=1, step="summarise"), {}, COLUMNS)


@pytest.mark.parametrize("parts", [{}, {"extractor": Plan(values={})}])
def test_a_payload_without_a_file_is_refused(offered: Offered, parts: Any) -> None:
    with pytest.raises(WireError, match="expected a NetworkFile"):
        light_worker(digits(0))(offered.contract).take_payload(b"", parts)


def test_a_file_of_other_features_than_the_contract_s_is_refused(offered: Offered) -> None:
    given = Offered(features="model")
    worker = light_worker(digits(0))(given.contract)
    profile = worker.profile(COLUMNS)
    assert profile.extractor_fingerprint == given.contract.extractor_fingerprint != ""
    assert [feature.name for feature in profile.features] == ["cut"]
    with pytest.raises(WireError, match="has 1296 features per input, but the contract declares"):
        worker.take_payload(b"", offered.parts)
    worker.take_payload(b"", given.parts)


@pytest.mark.parametrize(
    "changes",
    [
        {"directions": np.full((256, 9), np.nan, np.float16)},
        {"labels": [0] * 10},
        *(
            pytest.param(changes, marks=pytest.mark.long)
            for changes in (
                {"directions": np.zeros((12, 9), np.float16)},
                {"centres": np.zeros((10, 3), np.float16)},
                {"labels": list(range(1, 11))},
                {"df": np.array(0)},
                {"shrinkage": np.array(2.0)},
                {"counts": np.zeros(10, np.int32)},
            )
        ),
    ],
    ids=str,
)
def test_a_hostile_space_is_refused_and_changes_nothing(
    offered: Offered, space: ClassSpace, changes: dict[str, Any]
) -> None:
    worker = offered.worker()
    learned(worker, space)
    before = worker.state(), worker.delivered_model()(digits(1)[0])
    with pytest.raises(WireError, match="the class space"):
        worker.answer(ASK, {**lesson(space), "space": replace(space, **changes)}, COLUMNS)
    assert worker.state() == before[0]
    assert np.array_equal(worker.delivered_model()(digits(1)[0]), before[1])


def test_a_space_of_some_classes_gives_all_of_them_a_logit(offered: Offered) -> None:
    some = classes_below(4, digits(0))
    worker = offered.worker(some)
    learned(worker, space_of(some))
    result = worker.delivered_models()[GENERAL](digits(1)[0])
    assert result.shape == (len(digits(1)[1]), CLASSES)
    assert (result[:, :4].min(axis=1) > result[:, 4:].max(axis=1)).all()


@pytest.mark.parametrize("step", ["deliver", "train"])
def test_a_step_that_it_does_not_know_is_declined(offered: Offered, step: str) -> None:
    with pytest.raises(WireError, match=f"does not support step '{step}'"):
        offered.worker().answer(service_pb2.Ask(round=1, step=step), {}, COLUMNS)


@pytest.mark.parametrize("inputs", [np.zeros(SHAPE, "f"), np.zeros((2, 3, 8, 8), "f"), np.float32(1)])
def test_inputs_of_another_shape_are_refused(offered: Offered, space: ClassSpace, inputs: Any) -> None:
    worker = offered.worker()
    learned(worker, space)
    with pytest.raises(DataError, match=r"expected \[samples, 1, 8, 8\]; a single image is a batch of 1"):
        worker.delivered_model()(inputs)


# --- export


@pytest.mark.long
@pytest.mark.parametrize("classes_known", [CLASSES, 4])
def test_both_answers_are_exported_and_agree(offered: Offered, tmp_path: Path, classes_known: int) -> None:
    data = classes_below(classes_known, digits(0))
    worker = offered.worker(data, validation_data=digits(2))
    work = learned(worker, space_of(data))
    report = worker.export(tmp_path / "model.onnx", 3)
    assert report.path == tmp_path / "model.onnx"
    assert report.samples == 64
    for name, model in worker.delivered_models().items():
        file = tmp_path / f"{name}.onnx"
        metadata = {prop.key: prop.value for prop in onnx.load(file).metadata_props}
        assert metadata["answer"] == name
        assert (metadata["run"], metadata["round"], metadata["classes"]) == (RUN, "3", "10")
        for batch in (digits(1)[0][:1], digits(1)[0]):
            logits = onnxruntime.InferenceSession(str(file)).run(["logits"], {"input": batch})[0]
            assert_same(model(batch), logits)
    in_use = work.replacement.variant
    assert (tmp_path / "model.onnx").read_bytes() == (tmp_path / f"{in_use}.onnx").read_bytes()


def test_without_onnx_an_export_says_what_to_install(
    offered: Offered, space: ClassSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = offered.worker()
    learned(worker, space)
    known = builtins.__import__

    def without_onnx(name: str, *more: Any, **named: Any) -> Any:
        if name.partition(".")[0] == "onnx":
            raise ModuleNotFoundError("No module named 'onnx'", name="onnx")
        return known(name, *more, **named)

    monkeypatch.setattr(builtins, "__import__", without_onnx)
    with pytest.raises(ExportError, match=r"pip install 'fleetdistill\[onnx\]', or use Deployment\(export=\"never\"\)"):
        worker.export(tmp_path / "model.onnx", 1)
    assert list(tmp_path.iterdir()) == []


def test_the_file_of_a_given_extractor_serves_too(tmp_path: Path) -> None:
    given = Offered(features="model")
    worker = given.worker()
    summary = worker.answer(service_pb2.Ask(round=1, step="summarise"), {}, COLUMNS).answer.parts["statistics"]
    result = decode(encode({"statistics": summary}))["statistics"]
    assert isinstance(result, SharedStatistics)
    learned(worker, make_space(from_wire(result), 0.1))
    module = split_sequential(torch.nn.Sequential(given.half.fixed.extractor, torch.nn.Flatten()), 1)  # type: ignore[attr-defined]
    with torch.no_grad():
        expected = module.eval()(torch.from_numpy(digits(1)[0])).numpy()
    assert_allclose(worker.delivered_model().extractor.of(digits(1)[0]), expected, atol=1e-5)
    assert (worker.delivered_models()[GENERAL](digits(1)[0]).argmax(axis=1) == digits(1)[1]).mean() > 0.8
    worker.export(tmp_path / "model.onnx", 1)
