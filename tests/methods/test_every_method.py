"""The contract that every method fulfils, over the table of methods: a new line there is tested by being there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.fleets import EVERY_METHOD, REPRODUCIBLE, RUN, RUNS, SUITED, prepare, record, run_in_memory
from support.long import long_except
from support.outside import fresh_process
from support.undisturbed import Undisturbed

from fleetdistill import COLUMNS
from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import KINDS
from fleetdistill.methods import METHODS, config_class, config_from_plan, config_to_plan, device_class, example_config
from fleetdistill.state.state_file import unpack_state
from fleetdistill.wire.codec import decode, encode
from fleetdistill_lab.simulation.fleet import simulate
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.config.run_config import RunConfig, run_config
from fleetdistill_server.engine.contract import build_method
from fleetdistill_server.engine.forgetting import ask_to_forget
from fleetdistill_server.methods import SERVER_METHODS, server_class
from fleetdistill_server.methods.traffic import Sizes, answer_kinds, in_round
from fleetdistill_server.store.store import Store


def small_run(method: str) -> RunConfig:
    return run_config(
        {
            "run": {"name": "small", "method": method},
            "contract": {"classes": 10, "input_shape": [1, 8, 8]},
            "model": {"device": "digits_mlp_small"},
            "method": dict(config_class(method).examples),
        }
    )


STATISTICS = ("classstats", "classstats_private", "classstats_secure", "classstats_summed")
ONNX_DIFFERENCE = dict.fromkeys((*STATISTICS, "fedcgs"), 1e-2)
"""Where logits are not of the size 1: those of class statistics and of Gaussian classifiers are of hundreds."""
UNTRAINED = {"classstats_private", "classstats_secure", "classstats_summed", "fedcgs", "fedpft"}
"""Methods whose devices do not train."""
LOSSES = {"classstats": "classstats with a trained predictor"}
"""The run that trains, of a method that does not train by default."""

EVERY_STEP: dict[str, dict[str, Any]] = {
    "classstats": {"refine": "gradients"},
    "classstats_secure": {"keys": "roster"},
    "classstats_summed": {"keys": "roster", "refine": "gradients"},
    "dafkd": {"discriminator_location": "device", "sync": "exact"},
}
"""Settings with which a method asks each of its steps, where it does not by default."""

every_method = pytest.mark.parametrize("method", EVERY_METHOD)


def test_both_tables_name_the_same_methods() -> None:
    assert METHODS.keys() == SERVER_METHODS.keys()


@pytest.mark.parametrize("table", [config_class, device_class, server_class])
def test_unknown_method_is_refused_and_known_ones_are_listed(table: object) -> None:
    listed = f"unknown method 'gossip', expected one of {', '.join(EVERY_METHOD)}"
    with fresh_process(), pytest.raises(ConfigurationError, match=listed):
        table("gossip")  # type: ignore[operator]


@every_method
def test_a_configuration_travels_in_the_contract_unchanged(method: str) -> None:
    config = example_config(method).for_classes(10)
    plan = decode(encode({"config": config_to_plan(config)}))["config"]
    assert config_from_plan(method, plan) == config  # type: ignore[arg-type]


@every_method
def test_contract_setting_of_newer_server_is_refused_with_advice(method: str) -> None:
    plan = config_to_plan(example_config(method).for_classes(10))
    plan = type(plan)(values={**plan.values, "not_yet_invented": 1})
    with pytest.raises(ConfigurationError, match=r"not_yet_invented.*update it"):
        config_from_plan(method, plan)


@every_method
def test_the_server_half_declares_what_it_needs_and_asks(method: str) -> None:
    half = build_method(small_run(method))
    assert set(half.requirements().columns) <= set(COLUMNS)
    assert half.requirements().same_architecture == half.needs(half.config).same_architecture
    assert half.answer_kinds()
    assert all(kind in KINDS for parts in half.answer_kinds().values() for kind in parts.values())


@every_method
def test_the_device_half_has_a_handler_for_every_step(method: str) -> None:
    half, config = device_class(method), example_config(method, **EVERY_STEP.get(method, {})).for_classes(10)
    handled = {step for name in dir(half) for step in getattr(getattr(half, name), "answers_steps", ())}
    asked = answer_kinds(server_class(method).exchanges(config, Sizes()))
    assert asked.keys() == handled - {"deliver"}
    assert half.metrics_steps(config)
    assert set(half.metrics_steps(config)) <= asked.keys()


@pytest.mark.slow
@pytest.mark.parametrize("method", long_except(EVERY_METHOD, "classstats", "fedavg", "feddkc"))
def test_a_small_fleet_learns_and_every_upload_is_used(method: str, tmp_path: Path) -> None:
    """A method of one exchange has learned all in its first round, so that it is held against chance."""
    small: dict[str, Any] = {"rounds": 6, "devices": 3, "train_limit": 400, "with_alone": False, "with_fedavg": False}
    small |= SUITED.get(method, {})
    wanted = Simulation(method=method, seed=4, score="devices", export="all", out=tmp_path, **small)
    report = simulate(wanted)
    config = example_config(method).for_classes(10)
    exchanges = server_class(method).exchanges(config, Sizes())
    asked = sum(item.times for completed in range(6) for item in in_round(exchanges, completed))
    assert report.used_uploads == report.acknowledged_uploads >= 3 * asked
    assert report.refused_uploads == report.reported_uploads == 0
    means = [sum(values) / 3 for values in zip(*report.accuracy_by_round.values(), strict=True)]
    if wanted.one_exchange:
        assert len(set(means)) == 1
        assert [item["up"] + item["down"] > 0 for item in report.bytes_by_round] == [True] + [False] * 5
    assert means[-1] > (0.5 if wanted.one_exchange else means[0]) + 0.1
    assert all(device.onnx_max_difference < ONNX_DIFFERENCE.get(method, 1e-4) for device in report.devices)  # type: ignore[operator]
    assert (tmp_path / "report.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("method", long_except(sorted(set(EVERY_METHOD) & set(REPRODUCIBLE)), "fedavg", "feddkc"))
def test_same_seed_gives_same_fleet_and_other_seed_another(
    method: str, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    first = undisturbed(method)
    again, other = (replace(RUNS[method], seed=RUNS[method].seed + number) for number in (0, 1))
    again_store, other_store = (
        run_in_memory(prepare(wanted, tmp_path / str(number))) for number, wanted in enumerate((again, other))
    )
    assert record(again_store) == first.record
    assert record(other_store)["uploads"] != first.record["uploads"]
    again_store.close()
    other_store.close()


@pytest.mark.parametrize("method", long_except(sorted(set(EVERY_METHOD) - UNTRAINED), "fedavg", "feddkc"))
def test_the_mean_loss_of_every_training_reaches_the_server(method: str, undisturbed: Undisturbed) -> None:
    name = LOSSES.get(method, method)
    store = undisturbed(name).store
    losses = store.history.figures(RUN, "loss", "train")
    told = {(row.round, row.device): row.sum / row.count for row in losses}
    config = RUNS[name].configuration()
    ends = device_class(method).metrics_steps(config)
    assert set(told) == {(row.round, row.device) for row in store.asks.uploads(RUN) if row.step in ends}
    assert len(told) >= 2
    assert all(0 < loss < 10 for loss in told.values())


def test_a_method_that_trains_nothing_tells_of_no_loss(undisturbed: Undisturbed) -> None:
    store = undisturbed("classstats").store
    assert store.history.figures(RUN, "leave_one_out", "train")
    assert not store.history.figures(RUN, "loss", "train")


@pytest.mark.parametrize("method", long_except(EVERY_METHOD, "classstats", "fedavg", "feddkc"))
def test_forgotten_device_is_not_named_in_method_state(method: str, tmp_path: Path) -> None:
    store = run_in_memory(prepare(RUNS[method], tmp_path / "work"))
    forgotten, stays, *_ = (row.id for row in store.devices.all(RUN))
    before = set(words_in(state_of(store)))
    assert {forgotten, stays} <= before or not {forgotten, stays} & before
    assert ask_to_forget(store, RUN, forgotten, served=False)
    assert set(words_in(state_of(store))) & {forgotten, stays} == before & {stays}
    store.close()


def state_of(store: Store) -> Any:
    row = store.runs.get(RUN)
    assert row is not None
    return unpack_state(store.blobs.get_state(row.checkpoint))


def words_in(state: Any) -> Iterator[str]:
    """All keys and strings of a state."""
    if isinstance(state, str):
        yield state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield str(key)
            yield from words_in(value)
    elif isinstance(state, Sequence):
        for value in state:
            yield from words_in(value)


@pytest.mark.parametrize("knowledge_type", ["float16", "float32"])
def test_server_half_knows_element_type_of_its_knowledge(knowledge_type: str) -> None:
    config = small_run("feddkc")
    contract = config.contract.model_copy(update={"knowledge_type": knowledge_type})
    assert build_method(config.model_copy(update={"contract": contract})).context.knowledge_type == knowledge_type
