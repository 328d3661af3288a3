"""The trace of a round: real front, engine and devices, each a process, export to a real OTLP service."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from support.collector import APP, Collector, Received, collecting, environment, silent
from support.processes import free_port, wait_until
from support.small_run import DEVICES, SmallRun, small_run, store_of

from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_server.store.sums import EVERY

pytestmark = pytest.mark.slow
FRONT, ENGINE = "fleetdistill-front", "fleetdistill-engine"
ROUNDS = 4  # the first falls short, since a device keeps out of it


def one(found: Sequence[Received]) -> Received:
    (only,) = found
    return only


def finished(run: SmallRun, collector: Collector) -> None:
    """Runs to the end; waits for the last spans of the front, which has no end."""
    run.finish()
    with store_of(run.place) as store:
        uploads = len(store.asks.uploads(RUN))
    wait_until(lambda: len(collector.spans(name="commit", service=FRONT)) >= uploads, "the front's spans", 30)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Collector:
    """The spans of a run that nobody disturbs."""
    with collecting() as (collector, traced), small_run(tmp_path_factory.mktemp("run") / "w", traced=traced) as run:
        finished(run, collector)
    return collector


def test_a_round_is_one_trace_from_the_ask_to_the_commit(undisturbed: Collector) -> None:
    root = one(undisturbed.spans(name="round", round=3))
    assert (root.service, root.parent, root.failed) == (ENGINE, "", False)
    assert root.attributes == {"run": RUN, "round": 3, "status": "closed", "asks": 2, "answers": 2}
    for device in DEVICES:
        ask = one(undisturbed.spans(name="ask", round=3, device=device))
        assert (ask.service, ask.trace, ask.parent) == (ENGINE, root.trace, root.id)
        assert ask.attributes["run"] == RUN
        assert (ask.attributes["step"], ask.attributes["status"]) == ("train", "answered")
        assert ask.attributes["ask"] >= 1
        answer = one(undisturbed.spans(name="answer", round=3, device=device))
        assert (answer.service, answer.parent) == (APP, ask.id)
        below = {part.name: part for part in undisturbed.spans(parent=answer.id)}
        assert sorted(below) == ["download", "handler", "upload"]
        sent = one(undisturbed.spans(parent=below["download"].id))
        received = one(undisturbed.spans(parent=below["upload"].id))
        commit = one(undisturbed.spans(parent=received.id))
        assert [(part.name, part.service) for part in (sent, received, commit)] == [
            ("send payload", FRONT),
            ("receive upload", FRONT),
            ("commit", FRONT),
        ]
        assert {part.trace for part in (answer, *below.values(), sent, received, commit)} == {root.trace}
        assert received.start <= commit.start <= commit.end <= received.end
        assert {part.attributes["device"] for part in (sent, received, commit)} == {device}


def test_the_engines_phases_are_below_the_round(undisturbed: Collector) -> None:
    root = one(undisturbed.spans(name="round", round=3))
    of_engine = [part.name for part in undisturbed.spans(parent=root.id) if part.name != "ask"]
    assert of_engine == ["asks", "averaging", "checkpoint"]


def test_a_short_round_and_a_declined_ask_are_errors(undisturbed: Collector) -> None:
    root = one(undisturbed.spans(name="round", round=1))
    assert root.failed
    assert root.attributes["status"] == "short"
    asks = {ask.attributes["device"]: ask for ask in undisturbed.spans(name="ask", round=1)}
    assert {device: ask.failed for device, ask in asks.items()} == {"d0": True, "d1": False}
    handler = one([part for part in undisturbed.spans(name="handler") if part.trace == root.trace and part.failed])
    assert handler.attributes["error.type"] == "CannotAnswer"


def test_each_round_has_a_trace_of_its_own(undisturbed: Collector) -> None:
    roots = undisturbed.spans(name="round")
    assert [root.attributes["round"] for root in roots] == list(range(1, ROUNDS + 1))
    assert len({root.trace for root in roots}) == ROUNDS


def test_no_span_has_a_payload_a_secret_or_the_text_of_an_error(undisturbed: Collector) -> None:
    known = {"run", "round", "device", "step", "step_number", "ask", "status", "asks", "answers", "error.type"}
    assert {name for part in undisturbed.spans() for name in part.attributes} <= known
    assert "keeps out of the first round" not in undisturbed.text, "the reason of the device's decline"


@pytest.mark.long
@pytest.mark.parametrize(
    ("point", "killed"),
    [
        pytest.param("asks.after-commit", 1, marks=pytest.mark.long),
        ("answer.after-read", 1),
        pytest.param("close.before-commit", 2, marks=pytest.mark.long),
    ],
)
def test_engine_killed_twice_in_a_round_continues_its_trace(tmp_path: Path, point: str, killed: int) -> None:
    points = {"engine": [f"engine.{point}=kill"] * 2}
    with collecting() as (collector, traced), small_run(tmp_path / "w", points, traced=traced) as run:
        finished(run, collector)
        assert run.kills("engine") == 2
    roots = [root for root in collector.spans(name="round") if root.attributes["round"] >= killed]
    assert [root.attributes["round"] for root in roots] == list(range(killed, ROUNDS + 1)), "each once"
    for root in roots:
        of_round = collector.spans(round=root.attributes["round"])
        assert {part.trace for part in of_round} == {root.trace}
        assert {part.id for part in of_round} >= {part.parent for part in of_round} - {""}
        assert len(collector.spans(name="ask", trace=root.trace)) == root.attributes["asks"]


def assert_undisturbed(run: SmallRun) -> None:
    """Every round ended as it does without traces."""
    with store_of(run.place) as store:
        rounds = store.runs.rounds(RUN)
        used = [answers.used for _, answers in store.summaries.rounds(RUN, 0, EVERY)]
    assert [row.status for row in rounds] == ["short", "closed", "closed", "closed"]
    assert used[1:-1] == [2, 2]


@pytest.mark.long
def test_a_collector_that_is_not_there_costs_spans_and_no_round(tmp_path: Path) -> None:
    with small_run(tmp_path / "w", traced=environment(free_port())) as run:
        run.finish()
        assert_undisturbed(run)


FULL_QUEUE = {"OTEL_BSP_MAX_QUEUE_SIZE": "1", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "1"}


@pytest.mark.long
@pytest.mark.parametrize("queue", [{}, FULL_QUEUE])
def test_collector_that_never_answers_delays_no_round(tmp_path: Path, queue: dict[str, str]) -> None:
    """If front, engine or a device waited for it once, also because a queue is full, the run would take an hour."""
    with silent() as (accepted, variables), small_run(tmp_path / "w", traced=variables | queue) as run:
        run.finish()
        assert_undisturbed(run)
        assert len(accepted) >= 2, "front and engine have connected"
