"""The models that simulated devices have at the end: rebuilt from the devices' states, scored and exported.

A simulated device neither scores its last model nor exports it, because only the report knows which ones are wanted.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property
from pathlib import Path

from torch import nn

from fleetdistill.deployment.versions import Versions
from fleetdistill.knowledge import GENERAL
from fleetdistill.state.files import Files
from fleetdistill.state.memory import MemoryStorage
from fleetdistill.state.state_file import unpack_state
from fleetdistill.state.weights import load_state
from fleetdistill.training.local_training import as_tensor_data, evaluate
from fleetdistill.training.randomness import without_app
from fleetdistill.training.tensor_data import tensor_data_of
from fleetdistill.wire.codec import Payload, decode
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_lab.simulation.report.history import FleetHistory, shares_global_model
from fleetdistill_lab.simulation.report.metrics import accuracy_or_none
from fleetdistill_lab.simulation.report.outcome import ExportedModel
from fleetdistill_lab.simulation.spec.arrays import load_arrays
from fleetdistill_lab.simulation.spec.compute import Shared, SimulatedCompute, top_k_counts
from fleetdistill_lab.simulation.spec.device import DeviceSpec, make_compute
from fleetdistill_lab.simulation.spec.score_log import DELIVERED, GLOBAL, START, append_scores
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.config.run_config import RunConfig
from fleetdistill_server.engine.contract import build_method
from fleetdistill_server.store.round_store import DeviceStates
from fleetdistill_server.store.states import RoundStatus
from fleetdistill_server.store.store import Store


class FinalModels:
    """Rebuilds the models of a run's devices from the states in the store or in the state directories.

    Args:
        store: Store of the run.
        config: Configuration of the run.
    """

    def __init__(self, store: Store, config: RunConfig) -> None:
        self._store, self._config = store, config
        self._states = DeviceStates(store.database)
        self._contract = contract_pb2.Contract.FromString(store.runs.existing(config.run.name).contract)
        self._shared = Shared()
        self._computes: dict[tuple[str, str], SimulatedCompute] = {}

    def score(self, specs: Iterable[DeviceSpec], trained: Mapping[str, AbstractSet[int]]) -> None:
        """Logs the scores of the devices' models on the test set; omits devices without a model from the fleet.

        Args:
            specs: The devices.
            trained: Rounds in which each device trained.
        """
        with without_app():
            for spec in specs:
                files = self._files(spec)
                delivered = load_state(files, "delivered.safetensors")
                if delivered is None:
                    continue
                compute = self._compute_like(spec, files)
                if len(compute.delivered_models()) > 1:
                    self._score_variants(spec, files, max(trained[spec.name], default=0))
                else:
                    self._log(spec, compute, compute.unpack_model(delivered), START, DELIVERED)

    def _score_variants(self, spec: DeviceSpec, files: Files, last: int) -> None:
        """Logs the scores of a device's variants under its last training, unless that was scored.

        With validation data the app may have an earlier model.
        """
        is_missing = last > 0 and not spec.is_scored(last)
        if not is_missing and not spec.validation_file:
            return
        compute = self._compute(spec, files)
        if spec.validation_file:
            self._log(spec, compute, compute.delivered_model(), START, DELIVERED)
        for name, model in compute.method.variants().items() if is_missing else ():
            self._log(spec, compute, model, last, "" if name == GENERAL else name)

    def _log(self, spec: DeviceSpec, compute: SimulatedCompute, model: nn.Module, number: int, variant: str) -> None:
        """Logs the scores of a device's model on the test set, and on the device's own rows of it."""
        append_scores(spec.scores_file, spec.name, number, compute.score(model).confusion, variant)
        if spec.top_k is not None:
            append_scores(spec.top_k_file, spec.name, number, compute.score_top_k(model).confusion, variant)
        if spec.own_test_file:
            counts = compute.score_on(model, self._shared.samples(spec.own_test_file))
            append_scores(spec.scores_file, spec.name, number, counts.confusion, variant, own=True)

    def score_global(self, specs: Iterable[DeviceSpec]) -> None:
        """Logs the scores of the global model, if there is one, on each device's own rows of the test set.

        On the test set the engine has scored it.
        """
        tested = [spec for spec in specs if spec.own_test_file]
        model = _global_model(self._store, self._config) if tested else None
        if model is None:
            return
        for spec in tested:
            rows = tensor_data_of(self._shared.samples(spec.own_test_file))
            counts = evaluate(model, rows, spec.classes)
            append_scores(spec.scores_file, spec.name, START, counts.confusion, GLOBAL, own=True)

    def export(self, spec: DeviceSpec, out: Path, further: Iterable[str]) -> ExportedModel | None:
        """Writes a device's models as ONNX to `onnx` in a folder; returns None if the device has never trained.

        Args:
            spec: The device.
            out: The folder.
            further: Variants to write besides the general one, if the device has several.
        """
        files = self._files(spec)
        if files.load("state.safetensors") is None:
            return None
        version = Versions(files, 1).in_use()
        compute = self._compute(spec, files)
        (out / "onnx").mkdir(parents=True, exist_ok=True)
        with without_app(), tempfile.TemporaryDirectory() as folder:
            report = compute.export(Path(folder) / "model.onnx", 0 if version is None else version.round)
            written = {path.stem: path for path in Path(folder).iterdir()}
            names = {
                variant: f"onnx/{spec.name}-{variant}.onnx" for variant in (GENERAL, *further) if variant in written
            }
            file = f"onnx/{spec.name}.onnx"
            for variant, name in {"model": file, **names}.items():
                shutil.copyfile(written[variant], out / name)
        return ExportedModel(file, report.max_difference, names)

    @cached_property
    def _proxy(self) -> Payload | None:
        return build_method(self._config).context.proxy_payload

    def _files(self, spec: DeviceSpec) -> Files:
        directory = Path(spec.state_dir)
        return Files(directory) if directory.is_dir() else MemoryStorage(directory, self._states.load(spec.name))

    def _compute_like(self, spec: DeviceSpec, files: Files) -> SimulatedCompute:
        """Returns a compute backend of a device with the same model; it unpacks the models of both."""
        kind = spec.model, spec.predictor
        if kind not in self._computes:
            self._computes[kind] = self._compute(spec, files)
        return self._computes[kind]

    def _compute(self, spec: DeviceSpec, files: Files) -> SimulatedCompute:
        compute = make_compute(spec, self._contract, self._shared)
        if self._proxy is not None and self._proxy.sha256 in compute.wanted_payloads():
            compute.take_payload(self._proxy.sha256, decode(self._proxy))
        state = load_state(files, "state.safetensors")
        assert state is not None  # checked by the callers
        compute.restore(state, load_state(files, "delivered.safetensors"))
        return compute


def log_top_k_of_global_model(store: Store, config: RunConfig, spec: DeviceSpec) -> None:
    """Logs the top-k score of the global model after the last completed round; needs at least one.

    Args:
        store: Store of the run.
        config: Configuration of the run.
        spec: Any of the run's devices.
    """
    model = _global_model(store, config)
    if model is None or spec.top_k is None:
        return
    data = as_tensor_data(load_arrays(config.evaluation.data), spec.classes)
    last = max(item.number for item in store.runs.rounds(config.run.name) if item.status is RoundStatus.CLOSED)
    append_scores(spec.top_k_file, "", last, top_k_counts(model, data, spec.top_k, spec.classes).confusion, GLOBAL)


def _global_model(store: Store, config: RunConfig) -> nn.Module | None:
    """Returns a run's global model after the last completed round, of which there is one; None for other methods."""
    method = build_method(config)
    method.load_state_dict(unpack_state(store.blobs.get_state(store.runs.existing(config.run.name).checkpoint)))
    return method.global_model()


def devices_to_export(wanted: Simulation, specs: Sequence[DeviceSpec], history: FleetHistory) -> list[DeviceSpec]:
    """Returns the devices whose models `Simulation.export` asks for, among those that have trained."""
    trained = [spec for spec in specs if any(history.took_part[spec.name])]
    if isinstance(wanted.export, int):
        return trained[: wanted.export]
    if wanted.export in ("all", "none"):
        return trained if wanted.export == "all" else []
    chosen: dict[str, DeviceSpec] = {}
    if shares_global_model(wanted.method, specs):  # the last devices of the last round have taken it for sure
        trained = [spec for spec in reversed(trained) if history.took_part[spec.name][-1]]
    for spec in trained:
        known = chosen.setdefault(spec.model, spec)
        if wanted.export == "best" and _rate(history, spec) > _rate(history, known):
            chosen[spec.model] = spec
    return list(chosen.values())


def _rate(history: FleetHistory, spec: DeviceSpec) -> float:
    """Returns the accuracy of the model of a device's app; -1 if it was not scored."""
    counts = history.delivered.get(spec.name)
    rate = accuracy_or_none(history.devices[spec.name][-1] if counts is None else counts)
    return -1.0 if rate is None else rate
