"""`[run] start_from`: a new run begins with the model that another run of the store has reached."""

from __future__ import annotations

import json
from pathlib import Path

from fleetdistill.errors import ConfigurationError, FleetDistillError
from fleetdistill.knowledge import ModelParameters, Weights
from fleetdistill.state.state_file import unpack_state
from fleetdistill.wire.codec import decode
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.config.run_config import RunConfig, run_config
from fleetdistill_server.engine.contract import build_method
from fleetdistill_server.methods.base import ServerMethod
from fleetdistill_server.store.database import Row
from fleetdistill_server.store.run_names import no_such_run
from fleetdistill_server.store.store import Store


def begin_with(store: Store, config: RunConfig, method: ServerMethod) -> str:
    """Gives the server half of a new run the networks of the run that [run] start_from names.

    Args:
        store: Of both runs.
        config: Of the new run, which names another one.
        method: Its server half; changes in place.

    Returns:
        What was taken from where, in a sentence.

    Raises:
        ConfigurationError: There is no such run, it has no model yet, or its model is not of this run's kind.
    """
    name = config.run.start_from
    try:
        row = _source(store, config)
        theirs = run_config({**json.loads(row["config"]), "server": {"torch_device": "cpu"}, "proxy": {}})
        _check_alike(config, theirs)
        other = build_method(theirs)
        other.load_state_dict(unpack_state(store.blobs.get_state(row["checkpoint"])))
        taken = _take_networks(method, other, config.run.method, theirs.run.method)
        _take_initial(method, _initial_of(store, row))
    except FleetDistillError as error:
        raise ConfigurationError(f"[run] start_from = {name!r}: {error}") from error
    done = row["completed_rounds"]
    return f"begins with {taken} of run {name!r} after {done} rounds, checkpoint {row['checkpoint'].hex()[:12]}"


def check_in_store(config: RunConfig, method: ServerMethod) -> None:
    """The same with the store as it is on the disk, before the run is in it. Raises ConfigurationError."""
    if not config.run.start_from:
        return
    directory = Path(config.server.store)
    if not (directory / "store.sqlite").exists():
        raise ConfigurationError(
            f"[run] start_from = {config.run.start_from!r}: there is no store in {directory} to take a run from"
        )
    store = Store.open(directory)
    try:
        begin_with(store, config, method)
    finally:
        store.close()


def _source(store: Store, config: RunConfig) -> Row:
    name = config.run.start_from
    row = store.runs.get(name)
    if row is None:
        raise ConfigurationError(no_such_run(name, store.runs.names()))
    if not row["completed_rounds"]:
        raise ConfigurationError("it has completed no round yet")
    return row


def _check_alike(config: RunConfig, theirs: RunConfig) -> None:
    """A model is about inputs of one shape and about classes in one order."""
    for setting, mine, other in (
        ("input_shape", config.contract.input_shape, theirs.contract.input_shape),
        ("classes", config.contract.class_names(), theirs.contract.class_names()),
    ):
        if mine != other:
            raise ConfigurationError(f"its [contract] {setting} is {other}, this run's is {mine}")


def _take_networks(method: ServerMethod, other: ServerMethod, mine: str, theirs: str) -> str:
    wanted, there = method.networks(), other.networks()
    if not wanted:
        raise ConfigurationError(f"{mine} trains no model on the server that it could begin with")
    first = next(iter(wanted))
    if first not in there:
        raise ConfigurationError(f"{mine} begins with a {first}, and {theirs} has {', '.join(there) or 'none'}")
    both = [name for name in wanted if name in there]
    for name in both:
        try:
            wanted[name].load_state_dict(there[name].state_dict())
        except RuntimeError as error:
            ours, its = (_shapes(one[name].state_dict()) for one in (wanted, there))
            differ = next(key for key in sorted(ours.keys() | its.keys()) if ours.get(key) != its.get(key))
            text = f"its {name} has {differ} {its.get(differ, 'not')}, this run's has it {ours.get(differ, 'not')}"
            raise ConfigurationError(f"{text}; name the same [model]") from error
    return " and ".join(f"the {name}" for name in both)


def _shapes(state: dict[str, object]) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in state.items() if hasattr(value, "shape")}


def _initial_of(store: Store, row: Row) -> ModelParameters | None:
    """What the devices of that run started from."""
    sha256 = contract_pb2.Contract.FromString(row["contract"]).initial_weights
    part = decode(store.blobs.open(sha256)).get("initial") if sha256 else None
    return part if isinstance(part, ModelParameters) else None


def _take_initial(method: ServerMethod, initial: ModelParameters | None) -> None:
    """For a method whose server half does not hold what devices start from."""
    own = method.initial()
    if own is None or not method.keeps_initial:
        return
    if initial is None or Weights.of(initial).tensors != Weights.of(own).tensors:
        raise ConfigurationError("its devices started from another model; name the same [model]")
    method.given_initial = initial
