"""`FakeCohort`: a method computes in it what it computes in a run, and it is as strict as a run's cohort."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.fleets import RUNS, prepare, run_in_memory
from support.long import long_except

from fleetdistill.errors import CannotAnswer, QuorumNotReached
from fleetdistill.knowledge import Plan, ProxyKnowledge
from fleetdistill.methods import device_class
from fleetdistill.methods.base import Answer, Ask, DeviceMethod, Local
from fleetdistill.state.state_file import pack_state, unpack_state
from fleetdistill.training.local_training import TensorData
from fleetdistill.training.model import check_local_model, fingerprint
from fleetdistill.training.parameters import take_weights
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_lab.simulation.spec.arrays import load_arrays
from fleetdistill_lab.simulation.spec.device import DeviceSpec, build_device_model
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_server.config.run_config import RunConfig
from fleetdistill_server.engine.contract import build_method
from fleetdistill_server.methods.base import ServerMethod
from fleetdistill_server.testing import FakeCohort, always, play

FIVE = {name: always({"plan": Plan(values={"of": name})}) for name in "edcba"}


def answers_of(cohort: FakeCohort, step: str = "train", payload: Any = None, **how: Any) -> list[str]:
    async def devices() -> list[str]:
        return [answer.device async for answer in cohort.ask(step, payload, **how)]

    return asyncio.run(devices())


def half_of(spec: DeviceSpec, config: RunConfig, server: ServerMethod) -> DeviceMethod:
    """The device half that the simulation's device of this spec has."""
    inputs, labels = load_arrays(spec.data_file)
    model = build_device_model(spec, inputs.shape[1:])
    initial = server.initial()
    if initial is not None:
        take_weights(model.extractor if initial.scope == "extractor" else model, initial)
    data = TensorData(torch.from_numpy(np.float32(inputs)), torch.from_numpy(labels).long())
    taps = check_local_model(model, data.inputs[:2], spec.classes)
    context = server.context
    local = Local(
        model=model,
        taps=taps,
        data=data,
        classes=spec.classes,
        torch_device=torch.device("cpu"),
        proxy=context.proxy,
        proxy_digest=context.proxy_digest,
    )
    settings = config.method_config()
    return device_class(config.run.method)(settings, local)


@pytest.mark.parametrize(
    "name",
    long_except(
        ["fedavg", "cdkt", "feddkc", "feddkd", "fedd2s", "dafkd distilling", "classstats"],
        "classstats",
        "fedavg",
        "feddkc",
    ),
)
def test_a_method_computes_here_what_it_computes_in_a_run(name: str, tmp_path: Path) -> None:
    prepared = prepare(RUNS[name], tmp_path / "work")
    store = run_in_memory(prepared)
    row = store.runs.get(RUN)
    assert row is not None
    expected = unpack_state(store.blobs.get_state(row.checkpoint))
    profiles = {item.id: contract_pb2.DeviceProfile.FromString(item.profile) for item in store.devices.all(RUN)}
    versions = {device: profile.data_version.hex() for device, profile in profiles.items()}
    store.close()

    config, specs, _ = prepared
    server = build_method(config)
    members = {spec.name: half_of(spec, config, server) for spec in specs}
    terms = {"seed": config.run.seed, "knowledge_type": config.contract.knowledge_type, "data_versions": versions}
    play(server, members, config.run.rounds, **terms)
    assert pack_state(unpack_state(pack_state(server.state_dict()))) == pack_state(expected)


def test_answers_come_in_device_order_and_each_has_own_message() -> None:
    cohort = FakeCohort(FIVE)
    payload = lambda device: {"plan": Plan(values={"for": device})}  # noqa: E731
    assert answers_of(cohort, "train", payload) == list("abcde")
    assert [item.device for item in cohort.asked] == list("abcde")
    assert cohort.sent("b") == [{"plan": Plan(values={"for": "b"})}]
    assert cohort.answers("b", "train") == [{"plan": Plan(values={"of": "b"})}]
    assert cohort.sent("b", "learn") == []


def test_a_device_that_does_not_answer_is_out_for_the_round() -> None:
    cohort = FakeCohort(FIVE, silent={("train", "b")})
    assert answers_of(cohort) == list("acde")
    assert cohort.remaining == list("acde")
    assert answers_of(cohort, "learn") == list("acde")
    assert FakeCohort(FIVE).remaining == list("abcde")


def test_a_device_that_declines_is_out_with_its_reason() -> None:
    def decline(ask: Ask) -> Answer:
        raise CannotAnswer("too little memory")

    cohort = FakeCohort({**FIVE, "c": decline})
    assert answers_of(cohort) == list("abde")
    (of_c,) = [item for item in cohort.asked if item.device == "c"]
    assert (of_c.answer, of_c.declined) == (None, "too little memory")


def test_too_few_answers_end_the_round() -> None:
    silent = [("train", "a"), ("train", "b")]
    with pytest.raises(QuorumNotReached, match="3 devices answered, the quorum is 4"):
        answers_of(FakeCohort(FIVE, silent=silent))
    assert answers_of(FakeCohort(FIVE, silent=silent, quorum=0.6)) == list("cde")
    assert answers_of(FakeCohort(FIVE, silent=silent), quorum=0.5) == list("cde")


def test_an_ask_may_be_silent_by_its_number() -> None:
    cohort = FakeCohort(FIVE, silent={(2, "a")})
    assert answers_of(cohort) == list("abcde")
    assert answers_of(cohort) == list("bcde")


def test_unsendable_message_puts_device_out_with_an_event() -> None:
    logits = {name: np.full((1, 2), 1e30 if name == "d" else 0.0) for name in FIVE}
    payload = lambda device: {"knowledge": ProxyKnowledge(valid=True, proxy_digest=b"", logits=logits[device])}  # noqa: E731
    cohort = FakeCohort(FIVE, knowledge_type="float16")
    assert answers_of(cohort, "train", payload) == list("abce")
    assert [(event.kind, event.device) for event in cohort.events] == [("not-asked", "d")]


def test_what_arrives_has_gone_through_the_wire() -> None:
    got: list[Ask] = []

    def note(ask: Ask) -> Answer:
        got.append(ask)
        return Answer(parts=dict(ask.parts), samples=3)

    third = ProxyKnowledge(valid=True, proxy_digest=b"", logits=np.full((1, 2), 1 / 3, np.float32))
    cohort = FakeCohort({"a": note}, knowledge_type="float16")

    async def read() -> tuple[int, Any]:
        (answer,) = [item async for item in cohort.ask("train", {"knowledge": third})]
        return answer.samples, answer.part("knowledge", ProxyKnowledge).logits

    samples, values = asyncio.run(read())
    assert samples == 3
    np.testing.assert_array_equal(values, np.float16(1 / 3))
    np.testing.assert_array_equal(got[0].part("knowledge", ProxyKnowledge).logits, np.float16(1 / 3))
    assert (got[0].round, got[0].step) == (1, "train")


def test_a_device_takes_no_random_numbers_from_the_server() -> None:
    def draw(ask: Ask) -> Answer:
        return Answer(parts={"plan": Plan(values={"drawn": float(torch.rand(()))})}, samples=1)

    cohort = FakeCohort({"a": draw})
    torch.manual_seed(4)
    expected = float(torch.rand(()))
    torch.manual_seed(4)
    answers_of(cohort)
    assert float(torch.rand(())) == expected
    again = FakeCohort({"a": draw})
    answers_of(again)
    assert again.answers("a") == cohort.answers("a")


def test_events_figures_and_fingerprints() -> None:
    cohort = FakeCohort({"a": always({}), "b": always({})}, fingerprints={"a": "f"})
    cohort.event("left-out", "why", "a", once=True)
    cohort.event("left-out", "why", "a", once=True)
    cohort.guard("teacher", "poor")
    assert cohort.kinds == ["left-out", "teacher-guard"]
    cohort.report("loss", {"a": 1.0})
    cohort.report("loss", {"b": 2.0})
    cohort.report("steps", 3)
    assert cohort.figures == {"loss": {"a": 1.0, "b": 2.0}, "steps": 3}
    assert (cohort.model_fingerprint("a"), cohort.model_fingerprint("b")) == ("f", "")


def test_the_fingerprint_of_a_device_half_is_its_local_models(tmp_path: Path) -> None:
    config, specs, _ = prepare(RUNS["fedavg"], tmp_path / "work")
    half = half_of(specs[0], config, build_method(config))
    assert FakeCohort({"a": half}).model_fingerprint("a") == fingerprint(half.local.model)
