"""Small real fleets on the digits: the pieces of `simulate`, so that a test can disturb what lies between them."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from fleetdistill.methods import METHODS
from fleetdistill.methods.outside import installed_methods
from fleetdistill.state.state_file import pack_state, unpack_state
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_lab.simulation.data.datasets import load_dataset
from fleetdistill_lab.simulation.data.partition import partition, partition_parameters
from fleetdistill_lab.simulation.links.links import run_over_memory
from fleetdistill_lab.simulation.spec.device import DeviceSpec
from fleetdistill_lab.simulation.spec.plan import RUN, hold_out_proxy, make_run_config, make_specs
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.config.run_config import RunConfig
from fleetdistill_server.store.records import Ask, Upload
from fleetdistill_server.store.round_store import DeviceStates
from fleetdistill_server.store.store import Store

Prepared = tuple[RunConfig, list[DeviceSpec], Path]

SMALL = Simulation(
    method="feddkc",
    devices=2,
    rounds=2,
    train_limit=60,
    test_limit=20,
    torch_device="cpu",
    with_alone=False,
    with_fedavg=False,
)
_DAFKD = {"kd_start_round": 1, "kd_samples": 64, "maturity_guard": False, "local_epochs": 2}
_FEDD2S = {"drop_every": 1, "teacher_guard": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "feddkc in float32": {"method": "feddkc", "knowledge_type": "float32"},
    "feddkc in uint8": {"method": "feddkc", "knowledge_type": "uint8"},
    "cdkt with embeddings": {
        "method": "cdkt",
        "settings": {"knowledge": "repfull"},
        "models": ("cdkt_digits", "cdkt_digits_small"),
    },
    "fedd2s with heads": {"method": "fedd2s", "settings": _FEDD2S, "models": ("fedd2s_digits",)},
    "fedd2s with feature gradients": {
        "method": "fedd2s",
        "settings": {**_FEDD2S, "s2c_mode": "feature_grad"},
        "models": ("fedd2s_digits",),
    },
    "feddkd with batch-norm on devices": {
        "method": "feddkd",
        "settings": {"variant": "bn", "dkd_steps": 2},
        "models": ("digits_cnn_small",),
    },
    "fedrep_plus with a falling cut": {
        "method": "fedrep_plus",
        "settings": {"drop_every": 1},
        "models": ("fedd2s_digits",),
    },
    "classstats in one exchange": {"method": "classstats", "rounds": 1},
    "classstats with a trained predictor": {
        "method": "classstats",
        "settings": {"predictor": "trained", "predictor_steps": 20},
        "predictors": ("space_linear", "space_mlp_16"),
    },
    "classstats teaching the app's network": {
        "method": "classstats",
        "settings": {"own_network": "taught", "own_network_epochs": 2, "drawn_images": 4},
    },
    "classstats with a refined head": {"method": "classstats", "rounds": 1, "settings": {"refine": "gradients"}},
    "classstats_summed with a refined head": {
        "method": "classstats_summed",
        "rounds": 1,
        "settings": {"refine": "gradients"},
        "train_limit": 400,
        "devices": 3,
    },
    "dafkd distilling": {"method": "dafkd", "settings": _DAFKD},
    "dafkd lagged": {"method": "dafkd", "settings": {**_DAFKD, "discriminator_location": "device"}},
    "dafkd exact": {"method": "dafkd", "settings": {**_DAFKD, "discriminator_location": "device", "sync": "exact"}},
    "dafkd on features": {"method": "dafkd", "settings": {**_DAFKD, "generator_level": "feature"}},
}
"""What a simulation changes for a method to send other kinds of messages than it does by default."""
BASELINES = tuple(installed_methods())
"""The lab's methods, which are not built in."""
EVERY_METHOD = sorted({*METHODS, *BASELINES})
DEFAULTS: dict[str, dict[str, Any]] = {
    "classstats_private": {"settings": {"epsilon": 20.0, "dimensions": 32}, "train_limit": 400},
    "classstats_secure": {"settings": {"epsilon": 20.0, "dimensions": 32}, "train_limit": 400, "devices": 3},
    "classstats_summed": {"train_limit": 400, "devices": 3},
    "feddf": {"settings": {"local_epochs": 5}},
    "fedgen": {"settings": {"alpha": 1.0, "beta": 1.0}},
    "fedproto": {"models": ("digits_linear", "digits_cnn_small")},
}
"""What a simulation changes for a method that has no default of a setting, or needs more rows or passes over them, or
models with one size of embeddings.

FedGEN's loss contains two terms with a weight of 10, which a test that bounds every mean loss by 10 does not expect.
"""
SUITED = {
    method: {name: value for name, value in changes.items() if name != "train_limit"}
    for method, changes in DEFAULTS.items()
}
"""The same for a test that says itself how many rows there are."""
RUNS = {
    **{method: replace(SMALL, method=method, **DEFAULTS.get(method, {})) for method in EVERY_METHOD},
    **{name: replace(SMALL, **changes) for name, changes in VARIANTS.items()},
}
"""A short run of every method with its defaults, and of every variant."""
MECHANISMS = (
    "cdkt",
    "classstats",
    "classstats in one exchange",
    "classstats teaching the app's network",
    "classstats with a refined head",
    "classstats with a trained predictor",
    "classstats_summed",
    "dafkd",
    "fedavg",
    "fedd2s",
    "feddf",
    "feddkc",
    "feddkd",
    "fedgen",
    "fedgkt",
    "fedper",
    "fedproto",
    "moon",
    "scaffold",
)
"""Runs that have between them every kind of message, of state on a device and on the server, and of delivered model.

A test that takes seconds a run has these in `make test-all`, and all others in `make matrix`.
"""
HOSTILE = replace(SMALL, method="fedavg", devices=5, train_limit=150, alpha=100.0, hostile=1, attack="scaled")
"""A fleet of which one device is left out of every mean."""
REPRODUCIBLE = [name for name, wanted in RUNS.items() if not wanted.configuration().hides_rows]
"""Runs whose uploads depend on the seed alone; noise and masks come from the operating system."""
ROUNDS_OF_ANY_SIZE = [name for name, wanted in RUNS.items() if not wanted.configuration().sums_securely]
"""Runs in which a round of one or two devices has a result; a secure sum needs three."""


def prepare(wanted: Simulation, work: Path) -> Prepared:
    """Configuration, devices and folder of a simulation, as `simulate` makes them."""
    work.mkdir(parents=True)
    data = load_dataset("digits", train_limit=wanted.train_limit, seed=wanted.seed)
    test_rows = slice(0, wanted.test_limit)
    data = replace(data, test_images=data.test_images[test_rows], test_labels=data.test_labels[test_rows])
    data = hold_out_proxy(wanted, data, work)
    parameters = {"alpha": wanted.alpha} if "alpha" in partition_parameters(wanted.partition_path) else {}
    split = partition(wanted.partition_path, data.train_labels.numpy(), wanted.devices, wanted.seed, **parameters)
    return make_run_config(wanted, data, work), make_specs(wanted, data, split, work), work


def run_in_memory(
    prepared: Prepared, watch: Callable[[Store], None] = lambda store: None, *, durable: bool = False
) -> Store:
    """The undisturbed run that every other one is compared with."""
    return run_over_memory(*prepared, watch, durable=durable)


def outcome(store: Store) -> tuple[bytes, list[tuple[int, str, float, int]]]:
    """What must be the same whatever happened on the way: the last checkpoint, and every accuracy."""
    row = store.runs.get(RUN)
    assert row is not None
    assert row.status == "finished"
    figures = store.history.figures(RUN, "accuracy", "test")
    return _state_without_secrets(store, row.checkpoint), [
        (figure.round, figure.device, figure.sum, figure.count) for figure in figures
    ]


def _state_without_secrets(store: Store, checkpoint: bytes) -> bytes:
    """The last state's digest, with devices' names for the versions of their rows, which depend on their secrets."""
    profiles = {row.id: contract_pb2.DeviceProfile.FromString(row.profile) for row in store.devices.all(RUN)}
    names = {profile.data_version.hex(): device for device, profile in profiles.items() if profile.data_version}
    state = _renamed(unpack_state(store.blobs.get_state(checkpoint)), names)
    return hashlib.sha256(pack_state(state)).digest()


def _renamed(state: Any, names: Mapping[str, str]) -> Any:
    if isinstance(state, str):
        return names.get(state, state)
    if isinstance(state, Mapping):
        return {key: _renamed(value, names) for key, value in state.items()}
    return [_renamed(item, names) for item in state] if isinstance(state, list | tuple) else state


def record(store: Store) -> dict[str, Any]:
    """All that a run leaves in its store but for times and random names; digests stand for the bytes."""
    checkpoint, accuracies = outcome(store)
    rounds = store.runs.rounds(RUN)
    asks = [ask for row in rounds for ask in _asks(store, row.number)]
    uploads = [(*_name(row), row.samples, row.status, row.sha256) for row in store.asks.uploads(RUN)]
    return {
        "checkpoint": checkpoint,
        "accuracies": accuracies,
        "rounds": [(row.number, row.status, row.cohort, row.figures) for row in rounds],
        "asks": [(*_name(ask), ask.expects, ask.seed, ask.status, ask.payload) for ask in asks],
        "uploads": sorted(uploads),
        "events": sorted((row.round, row.device, row.kind, row.text) for row in store.history.events(RUN)),
    }


def _asks(store: Store, number: int) -> Iterator[Ask]:
    for step_number in itertools.count(1):
        if not (asks := store.asks.of_step(RUN, number, step_number)):
            return
        yield from asks


def _name(row: Ask | Upload) -> tuple[int, int, str, str]:
    return row.round, row.step_number, row.step, row.device


def device_files(prepared: Prepared) -> dict[str, bytes]:
    """What the devices keep at the end of a run: their state, and the delivered model, which the app uses."""
    names = ("state.safetensors", "delivered.safetensors")
    return {f"{spec.name}/{name}": _device_file(prepared, spec, name) for spec in prepared[1] for name in names}


def _device_file(prepared: Prepared, spec: DeviceSpec, name: str) -> bytes:
    """A file of a device: from its directory, or from its state in the store if the device had no state directory."""
    file = Path(spec.state_dir) / name
    if file.exists():
        return file.read_bytes()
    with closing(Store.open(Path(prepared[0].server.store))) as store:
        return DeviceStates(store.database).load(spec.name)[name]


def assert_no_upload_lost(store: Store, receipts: set[str] | None = None, run: str = RUN) -> None:
    """Every receipt is used once or reported with a reason; no ask has two answers that count."""
    uploads = store.asks.uploads(run)
    ids = [row.receipt for row in uploads]
    assert len(set(ids)) == len(ids)
    if receipts is not None:
        assert receipts <= set(ids)
    asks = [row.ask for row in uploads if row.quarantined_at is None]
    assert len(set(asks)) == len(asks)
    used = {row.receipt for row in uploads if row.status == "used"}
    reported = {row.receipt for row in uploads if row.status == "reported" and row.reason}
    assert used | reported == set(ids)
    assert not used & reported
