"""Describes simulated devices, which are SDK `Device` objects with data from files, and makes them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetdistill import COLUMNS, Device, Event, Runtime, SecureTerms, Server, Signer, Splits, TorchModel
from fleetdistill.clock import Clock
from fleetdistill.deployment.settings import Deployment
from fleetdistill.knowledge import RECEIVED, RESULT
from fleetdistill.link.base import Link
from fleetdistill.link.credentials import AUTHORITIES, DEVICE_FOLDER, IDENTITY
from fleetdistill.methods.classstats_secure.config import CERTIFICATES, ROSTER
from fleetdistill.models import USUAL_PREDICTOR
from fleetdistill.seeds import derive_seed
from fleetdistill.state.directory import Storage
from fleetdistill.state.files import Files
from fleetdistill_lab.simulation.spec.arrays import load_arrays, split_slice
from fleetdistill_lab.simulation.spec.score_log import (
    OPTIMIZER_STEPS,
    OWN,
    PRODUCT,
    TOP_K,
    append_scores,
    append_steps,
    confusion_of,
)

if TYPE_CHECKING:
    from fleetdistill.compute.base import MakeCompute
    from fleetdistill.wire.v1 import contract_pb2
    from fleetdistill_lab.simulation.spec.compute import Shared, SimulatedCompute


_CERTIFICATE_DAYS = 3650.0  # it may be resumed long after its start


@dataclass(frozen=True)
class DeviceSpec:
    """Description of a simulated device.

    Attributes:
        name: Id of the device.
        model: Name of a built-in model, or package.module:factory.
        seed: The simulation's seed; the model's initial weights are derived from it and `name`.
        classes: Number of classes of the contract.
        data_file: Training data, an `.npz` with `inputs` and `labels`, or some of its rows; see `arrays.load_arrays`.
        test_file: Path of the test set, in the same format.
        own_test_file: The device's own rows of the test set; empty if it has none.
        state_dir: Path of the device's state directory.
        run: Name of the run.
        validation_file: Path of the validation data that decide whether the model is replaced; empty for none.
        predictor: Name in `fleetdistill.models.PREDICTORS`, for methods that train a predictor on fixed features.
        attack: Attack of a hostile device, a name in `hostile.ATTACKS`; empty for an honest device.
        modules: Modules that the device's process imports to register methods.
        score_every: Rounds from one score of the device's models on the test set to the next; 0 for no score.
        last_round: Number of the run's last round, which is scored unless `score_every` is 0.
        torch_device: Torch device on which the device trains.
        keys: Who vouches for the device's keys in secure sums, as the run's setting; empty in other runs.
        top_k: k of the top-k accuracy that is logged beside each score; None for none.
    """

    name: str
    model: str
    seed: int
    classes: int
    data_file: str
    test_file: str
    state_dir: str
    run: str
    validation_file: str = ""
    own_test_file: str = ""
    predictor: str = USUAL_PREDICTOR
    attack: str = ""
    modules: tuple[str, ...] = ()
    score_every: int = 1
    last_round: int = 0
    torch_device: str = "cpu"
    top_k: int | None = None
    keys: str = ""

    @property
    def rows(self) -> int:
        """Number of training rows; a private or hostile device declares another number."""
        rows = split_slice(self.data_file)[1]
        return len(load_arrays(self.data_file)[1]) if rows.stop is None else rows.stop - rows.start

    @property
    def scores_file(self) -> Path:
        """Path of the simulation's score log, which its devices share."""
        return Path(self.state_dir).parent / "scores.jsonl"

    @property
    def pki(self) -> Path:
        """Directory of the simulation's CA, if certificates vouch for keys."""
        return Path(self.state_dir).parent / "pki"

    @property
    def top_k_file(self) -> Path:
        """Path of the log of the scores whose predictions are `metrics.top_k_predictions`, which devices share."""
        return Path(self.state_dir).parent / "top_k.jsonl"

    @property
    def steps_file(self) -> Path:
        """Path of the log of the devices' optimiser steps, which they share."""
        return Path(self.state_dir).parent / "steps.jsonl"

    def is_scored(self, number: int) -> bool:
        """Returns whether the device's models are scored after round `number`."""
        return self.score_every > 0 and (number % self.score_every == 0 or number >= self.last_round)


def build_device_model(spec: DeviceSpec, input_shape: tuple[int, ...]):  # type: ignore[no-untyped-def]  # a torch module
    """Builds the device's model with its initial weights, which are the same in every process."""
    from fleetdistill.models import build_model
    from fleetdistill.training.randomness import own_randomness

    with own_randomness(derive_seed(spec.seed, 0, "device model", spec.name)):  # several threads may build models
        return build_model(spec.model, input_shape=input_shape, classes=spec.classes)


def make_device(
    spec: DeviceSpec,
    server: str | Link,
    state: Storage | None = None,
    compute: MakeCompute | None = None,
    clock: Clock | None = None,
) -> Device:
    """Builds the SDK device of a spec, which logs its scores and the steps of its optimisers.

    Args:
        spec: The device.
        server: Address of the server, or the link to it.
        state: The device's state; by default its state directory.
        compute: Makes the compute backend; None for one that shares nothing with other devices.
        clock: Clock of a device in simulated time; by default the machine's.
    """

    def note(event: Event) -> None:
        if OPTIMIZER_STEPS in event.values:
            append_steps(spec.steps_file, spec.name, event.round, event.values)
        if event.kind != "scored":
            return
        split, _, variant = event.values["split"].partition("/")
        file = {"test": spec.scores_file, OWN: spec.scores_file, TOP_K: spec.top_k_file}.get(split)
        if file is None:
            return
        completed = event.round
        if variant in (RECEIVED, RESULT):
            completed -= variant == RECEIVED  # a received model is the previous round's result
            variant = PRODUCT
        confusion = confusion_of(event.values["confusion"], spec.classes)
        append_scores(file, spec.name, completed, confusion, variant, own=split == OWN)

    if spec.keys == CERTIFICATES:
        _enrol(spec, Files(Path(spec.state_dir)) if state is None else state)
    return Device(
        server=Server(server, run=spec.run),
        **_backend(spec, compute),
        state_dir=spec.state_dir if state is None else state,
        device_id=spec.name,
        allow=COLUMNS,
        on_event=note,
        secure=_terms(spec),
        deployment=Deployment(export="never", keep_versions=1),  # nothing rolls back a simulated device
        runtime=Runtime(clock=clock),
    )


def _terms(spec: DeviceSpec) -> SecureTerms | None:
    if spec.keys == CERTIFICATES:
        return SecureTerms(min_devices=3, keys=CERTIFICATES, without_noise=True)
    return SecureTerms(min_devices=3, signer=_signer(spec), without_noise=True) if spec.keys == ROSTER else None


def _enrol(spec: DeviceSpec, files: Files) -> None:
    """Gives a simulated device a certificate of the simulation's CA, once; its link does not use it."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    from fleetdistill_server.security.pki import Authority

    identity, authorities = (f"{DEVICE_FOLDER}/{name}" for name in (IDENTITY, AUTHORITIES))
    if files.load(identity) is not None:
        return
    if files.has_directory:
        (files.directory / DEVICE_FOLDER).mkdir(parents=True, exist_ok=True)
    authority, key = Authority(spec.pki), ec.generate_private_key(ec.SECP256R1())
    form, secret = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, form, secret)
    files.save(authorities, authority.bundle)
    issued = authority.sign_device(key.public_key(), spec.name, "", _CERTIFICATE_DAYS)
    files.save(identity, pem + issued.pem, mode=0o600)


def _signer(spec: DeviceSpec) -> Signer:
    """Returns the key of a simulated device, endorsed by the simulation's roster key; both follow from the seed."""
    from fleetdistill.secure.member import endorse
    from fleetdistill.secure.primitives import verification_key

    roster, key = (hashlib.sha256(f"{name} {spec.seed}".encode()).digest() for name in ("roster", spec.name))
    endorsement = endorse(roster, spec.name, verification_key(key))
    return Signer(key=key, endorsement=endorsement, roster_key=verification_key(roster))


def _backend(spec: DeviceSpec, compute: MakeCompute | None) -> Mapping[str, Any]:
    """Returns the arguments of `Device` for what computes: the model and data, or a worker."""
    if compute is not None:
        return {"worker": compute}
    if spec.attack:
        return {"worker": partial(make_compute, spec)}
    return _computes(spec, load_arrays)


def _computes(spec: DeviceSpec, read: Callable[[str], Any]) -> dict[str, Any]:
    """Returns the arguments `model` and `data` of `TorchCompute`.

    Args:
        spec: The device.
        read: Returns the data of a file.
    """
    data = read(spec.data_file)
    input_shape = data[0].shape[1:] if isinstance(data, tuple) else data.input_shape
    make_model = partial(build_device_model, spec, input_shape)
    return {
        "model": TorchModel(make_model, name=spec.model, predictor=spec.predictor, torch_device=spec.torch_device),
        "data": Splits(
            data,
            test_data=read(spec.test_file) if spec.score_every else None,
            validation_data=read(spec.validation_file) if spec.validation_file else None,
        ),
    }


def make_compute(spec: DeviceSpec, contract: contract_pb2.Contract, shared: Shared | None = None) -> SimulatedCompute:
    """Builds the compute backend of a device.

    Args:
        spec: The device.
        contract: The run's contract.
        shared: What the devices of the process share; None for nothing.
    """
    from fleetdistill_lab.simulation.spec.compute import Shared, SimulatedCompute
    from fleetdistill_lab.simulation.spec.hostile import HostileCompute, flip

    known = shared or Shared()
    computes = _computes(spec, known.samples)
    if spec.own_test_file and spec.score_every:
        computes["own_test"] = known.samples(spec.own_test_file)
    if not spec.attack:
        return SimulatedCompute(contract, known, spec.is_scored, spec.top_k, **computes)
    inputs, labels = load_arrays(spec.data_file)
    computes["data"] = replace(computes["data"], data=(inputs, flip(spec.attack, labels, spec.classes)))
    return HostileCompute(contract, spec.attack, known, spec.is_scored, spec.top_k, **computes)
