"""`[run] start_from`: a new run begins with the model that another one has reached, or is refused with a sentence."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.driving import DriveDevices
from support.fleets import RUN, RUNS, Prepared, prepare

from fleetdistill.errors import ConfigurationError
from fleetdistill.state.state_file import pack_state
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_lab.simulation.spec.device import make_device
from fleetdistill_server.config.run_config import RunConfig, run_config
from fleetdistill_server.engine import preflight
from fleetdistill_server.engine.contract import build_method, make_contract
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.engine.starting_model import load_starting_model
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.methods.base import ServerMethod
from fleetdistill_server.service.registration import register
from fleetdistill_server.service.run_changes import delete
from fleetdistill_server.store.records import Run
from fleetdistill_server.store.store import Store

TRAINED = ["cdkt", "dafkd", "fedavg", "fedd2s", "feddkc", "feddkd"]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store.open(tmp_path / "store")
    yield made
    made.close()


def config_of(which: str, work: Path, **run: Any) -> RunConfig:
    config = prepare(RUNS[which], work)[0]
    return with_run(config, **run)


def with_run(config: RunConfig, **run: Any) -> RunConfig:
    return config.model_copy(update={"run": config.run.model_copy(update=run)})


def play(store: Store, config: RunConfig) -> ServerMethod:
    """A run with a completed round, whose weights are like no other's."""
    method = build_method(config)
    for network in method.networks().values():
        for number, tensor in enumerate(network.state_dict().values()):
            torch.nn.init.constant_(tensor, number + 0.25) if tensor.is_floating_point() else tensor.zero_()
    name = config.run.name
    register(store, config)
    contract, initial, _ = make_contract(config, method)
    if initial is not None:
        store.blobs.put(initial)
    store.runs.publish_contract(name, contract.SerializeToString())
    state = store.blobs.put_state(pack_state(method.state_dict()))
    store.runs.close_round(name, store.runs.start_round(name, []), state, [], {})
    return method


def row_of(store: Store, name: str) -> Run:
    return store.runs.existing(name)


def assert_same(first: ServerMethod, second: ServerMethod) -> None:
    mine, theirs = first.networks(), second.networks()
    assert mine.keys() == theirs.keys() != set()
    for name, network in mine.items():
        for key, tensor in network.state_dict().items():
            assert torch.equal(tensor, theirs[name].state_dict()[key]), (name, key)


@pytest.mark.parametrize("name", TRAINED)
def test_methods_training_on_server_begin_with_their_own_kind(store: Store, tmp_path: Path, name: str) -> None:
    first = config_of(name, tmp_path / "work", name="first")
    before = play(store, first)
    second = with_run(first, name="second", start_from="first", seed=99)
    method = build_method(second)
    said = load_starting_model(store, second, method)
    assert_same(method, before)
    assert said.startswith("begins with the ")
    assert f" of run 'first' after 1 round, checkpoint {row_of(store, 'first').checkpoint.hex()[:12]}" in said
    initial = make_contract(second, method)[0].initial_weights
    assert initial == contract_pb2.Contract.FromString(row_of(store, "first").contract).initial_weights


def test_methods_of_one_kind_of_model_begin_with_each_others(store: Store, tmp_path: Path) -> None:
    first = config_of("fedavg", tmp_path / "fedavg", name="first")
    before = play(store, first)
    second = config_of("dafkd", tmp_path / "dafkd", name="second", start_from="first")
    second = second.model_copy(update={"model": first.model})
    method = build_method(second)
    assert load_starting_model(store, second, method).startswith("begins with the model of run 'first'")
    mine, theirs = method.networks()["model"].state_dict(), before.networks()["model"].state_dict()
    assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


def changed(config: RunConfig, **sections: dict[str, Any]) -> RunConfig:
    values = config.model_dump(mode="json", by_alias=True, exclude={"proxy"})
    for section, settings in sections.items():
        values[section] = {**values[section], **settings}
    return run_config(values)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": (
        {"model": {"device": "digits_mlp_small"}},
        "the shape of .* in the model is .* in that run and .* in this run; set the same \\[model\\] in both runs",
    ),
    "other classes": ({"contract": {"classes": 9}}, "\\[contract\\] classes is \\['0', .* in that run and \\['0', "),
    "another input shape": (
        {"contract": {"input_shape": [1, 16, 16]}},
        ".contract. input_shape is .1, 8, 8. in that run and .1, 16, 16. in this run",
    ),
    "another kind of model": (
        {"run": {"method": "feddkc"}},
        "feddkc needs a predictor to start from, but fedavg provides model",
    ),
    "a method that trains none": (
        {"run": {"method": "classstats"}},
        "classstats does not train a model on the server; remove start_from",
    ),
    "no such run": ({"run": {"start_from": "frist"}}, "there is no run 'frist'; did you mean 'first'"),
    "a run without a round": ({"run": {"start_from": "young"}}, "that run has not completed a round yet"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_stored(store: Store, tmp_path: Path, name: str) -> None:
    sections, sentence = REFUSED[name]
    config = config_of("fedavg", tmp_path / "work", name="first")
    config = changed(config, model={"device": "digits_cnn_small"}, server={"store": str(tmp_path / "store")})
    play(store, config)
    register(store, with_run(config, name="young"))
    run = {"name": "second", "start_from": "first", **sections.get("run", {})}
    settings = {} if "method" in run else config.method
    wanted = changed(config.model_copy(update={"method": settings}), **{**sections, "run": run})
    with pytest.raises(ConfigurationError, match=rf"\[run\] start_from = '{run['start_from']}': .*{sentence}"):
        preflight.build_run(wanted)
    assert store.runs.names() == ["first", "young"]


def test_a_store_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = config_of("fedavg", tmp_path / "work", start_from="first")
    config = changed(config, server={"store": str(tmp_path / "none")})
    with pytest.raises(ConfigurationError, match=r"\[run\] start_from = 'first': there is no store in .*none"):
        preflight.build_run(config)
    assert not (tmp_path / "none").exists()


def test_a_run_cannot_begin_with_itself() -> None:
    values = {"run": {"name": "r", "start_from": "r"}, "contract": {"classes": 2, "input_shape": [1]}}
    with pytest.raises(ConfigurationError, match=r"^\[run\]: start_from names run 'r' itself; name another run"):
        run_config(values)


def drive(store: Store, prepared: Prepared, config: RunConfig) -> Engine:
    api = DeviceApi(store)
    devices = [make_device(spec, MemoryLink(api)) for spec in prepared[1]]
    try:
        engine = Engine(store, config, DriveDevices(devices, lambda: None), max_short_rounds=3)
        asyncio.run(engine.run())
    finally:
        for device in devices:
            device.close()
    return engine


def test_a_run_that_began_with_another_goes_on_without_it(store: Store, tmp_path: Path) -> None:
    """The engine takes the model when it prepares the run, notes where it is from, and never again looks there."""
    config = config_of("fedavg", tmp_path / "first", name="first")
    config = changed(config, server={"store": str(tmp_path / "store")})
    play(store, config)
    second = with_run(config, name=RUN, start_from="first", rounds=1)
    prepared = prepare(RUNS["fedavg"], tmp_path / "second")
    drive(store, prepared, second)
    (event,) = store.history.events(RUN, "started-from")
    assert event.text.startswith("begins with the model of run 'first' after 1 round, checkpoint ")
    assert (row_of(store, RUN).status, row_of(store, RUN).completed_rounds) == ("finished", 1)
    delete(tmp_path / "store", store, "first")
    drive(store, prepared, with_run(second, rounds=2))
    assert row_of(store, RUN).completed_rounds == 2
    assert len(store.history.events(RUN, "started-from")) == 1
