"""Initialises a new run with the model of another run in the store (`[run] start_from`)."""

from __future__ import annotations

from pathlib import Path

from fleetdistill.errors import ConfigurationError, FleetDistillError
from fleetdistill.knowledge import ModelParameters, Weights
from fleetdistill.state.state_file import unpack_state
from fleetdistill.wire.codec import decode
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.config.run_config import RunConfig, run_config
from fleetdistill_server.engine.contract import build_method
from fleetdistill_server.methods.base import ServerMethod
from fleetdistill_server.store.location import has_store
from fleetdistill_server.store.records import Run
from fleetdistill_server.store.store import Store
from fleetdistill_server.texts import counted


def load_starting_model(store: Store, config: RunConfig, method: ServerMethod) -> str:
    """Loads the networks of the run that [run] start_from names into a new run's server half.

    Args:
        store: Store that contains both runs.
        config: Configuration of the new run, with [run] start_from set.
        method: Server half of the new run; changes in place.

    Returns:
        A sentence that names the networks and the checkpoint that they come from.

    Raises:
        ConfigurationError: The store has no run of this name, or the run has no model yet or a model that does not
            fit this run.
    """
    name = config.run.start_from
    try:
        source = _source(store, config)
        theirs = run_config({**source.config, "server": {"torch_device": "cpu"}, "proxy": {}})
        _check_alike(config, theirs)
        other = build_method(theirs)
        other.load_state_dict(unpack_state(store.blobs.get_state(source.checkpoint)))
        taken = _copy_networks(method, other, config.run.method, theirs.run.method)
        _copy_initial(method, _initial_of(store, source))
    except FleetDistillError as error:
        raise ConfigurationError(f"[run] start_from = {name!r}: {error}") from error
    done = counted(source.completed_rounds, "round")
    return f"begins with {taken} of run {name!r} after {done}, checkpoint {source.checkpoint.hex()[:12]}"


def check_in_store(config: RunConfig, method: ServerMethod) -> None:
    """Checks [run] start_from against the store on disk before the new run is registered.

    Raises:
        ConfigurationError: There is no store, or its run cannot be used; see `load_starting_model`.
    """
    if not config.run.start_from:
        return
    directory = Path(config.server.store)
    if not has_store(directory):
        raise ConfigurationError(
            f"[run] start_from = {config.run.start_from!r}: there is no store in {directory}; check [server] store"
        )
    store = Store.open(directory)
    try:
        load_starting_model(store, config, method)
    finally:
        store.close()


def _source(store: Store, config: RunConfig) -> Run:
    run = store.runs.existing(config.run.start_from)
    if not run.completed_rounds:
        raise ConfigurationError("that run has not completed a round yet")
    return run


def _check_alike(config: RunConfig, theirs: RunConfig) -> None:
    """Raises ConfigurationError unless both runs have the same input shape and the same classes in the same order."""
    for setting, mine, other in (
        ("input_shape", config.contract.input_shape, theirs.contract.input_shape),
        ("classes", config.contract.class_names(), theirs.contract.class_names()),
    ):
        if mine != other:
            raise ConfigurationError(f"[contract] {setting} is {other} in that run and {mine} in this run")


def _copy_networks(method: ServerMethod, other: ServerMethod, mine: str, theirs: str) -> str:
    wanted, there = method.networks(), other.networks()
    if not wanted:
        raise ConfigurationError(f"{mine} does not train a model on the server; remove start_from")
    first = next(iter(wanted))
    if first not in there:
        text = f"{mine} needs a {first} to start from, but {theirs} provides {', '.join(there) or 'no network'}"
        raise ConfigurationError(f"{text}; choose a run that has a {first}")
    both = [name for name in wanted if name in there]
    for name in both:
        try:
            wanted[name].load_state_dict(there[name].state_dict())
        except RuntimeError as error:
            ours, its = (_shapes(item[name].state_dict()) for item in (wanted, there))
            key = next(key for key in sorted(ours.keys() | its.keys()) if ours.get(key) != its.get(key))
            text = f"the shape of {key} in the {name} is {its.get(key)} in that run and {ours.get(key)} in this run"
            raise ConfigurationError(f"{text}; set the same [model] in both runs") from error
    return " and ".join(f"the {name}" for name in both)


def _shapes(state: dict[str, object]) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in state.items() if hasattr(value, "shape")}


def _initial_of(store: Store, run: Run) -> ModelParameters | None:
    """Returns the weights that a run's devices started from; None if the run's method distributes none."""
    sha256 = contract_pb2.Contract.FromString(run.contract).initial_weights
    part = decode(store.blobs.open(sha256)).get("initial") if sha256 else None
    return part if isinstance(part, ModelParameters) else None


def _copy_initial(method: ServerMethod, initial: ModelParameters | None) -> None:
    """Copies the devices' initial weights if they are not part of the method's networks."""
    own = method.initial()
    if own is None or not method.keeps_initial:
        return
    if initial is None or Weights.of(initial).tensors != Weights.of(own).tensors:
        raise ConfigurationError(
            "the devices of that run started from a different model; set the same [model] in both runs"
        )
    method.given_initial = initial
