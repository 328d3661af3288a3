"""What an operator sees of secure sums: of a run in which devices drop out, and of several sums in a round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support.summed_run import RUN, make_summed_run
from typer.testing import CliRunner

from fleetdistill.methods.classstats_secure.exchange import STEPS
from fleetdistill.state.state_file import unpack_state
from fleetdistill_console.metrics.runs import RunsCollector
from fleetdistill_server.cli.app import app
from fleetdistill_server.figures import SumFigures
from fleetdistill_server.operations.source import LocalStore
from fleetdistill_server.store.records import Ask
from fleetdistill_server.store.retention import needed
from fleetdistill_server.store.store import Store
from fleetdistill_server.store.traffic import Counted
from fleetdistill_server.texts import SUMS_UNREVIEWED
from fleetdistill_server.views import runs as views

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_summed_run(tmp_path_factory.mktemp("summed"))


@pytest.fixture
def store(directory: Path) -> Iterator[Store]:
    one = Store.open(directory)
    yield one
    one.close()


@pytest.mark.long
def test_a_run_shows_who_dropped_out_of_its_sums(store: Store) -> None:
    failed, made = views.run(store, RUN).lists["secure_sums"]
    steps = ("round", "sum", "asked", "keys", "boxes", "inputs", "signatures", "shares")
    assert [failed[name] for name in steps] == [1, None, 5, 5, 3, None, None, None]
    assert [made[name] for name in steps] == [2, None, 5, 5, 5, 4, None, 4]
    assert failed["status"] == "failed: 3 of 5 devices answered secure_shares, 4 were needed"
    assert made["status"] == "made"
    assert [row["dropped"] for row in (failed, made)] == [
        "device-3, device-4 at secure_shares",
        "device-4 at secure_input",
    ]
    for row in (failed, made):  # of five devices that sent keys, floor(10 / 3) + 1 must give shares
        assert (row["min_devices"], row["threshold"], row["noise_shares"]) == (4, 4, 4)


def test_the_record_of_a_sum_names_its_session_and_roster(store: Store) -> None:
    """The id begins with the name under which the merge has the sum; a device keeps it in secure_ended.json."""
    failed, made = views.run(store, RUN).lists["secure_sums"]
    state: Any = unpack_state(store.blobs.get_state(store.runs.existing(RUN).checkpoint))
    assert list(state["parts"]) == [f"sum {made['sid'][:16]}"]
    assert failed["sid"] != made["sid"]
    for row in (failed, made):
        assert [len(bytes.fromhex(row[name])) for name in ("sid", "roster")] == [32, 32]


def test_the_payloads_of_a_sum_are_gone_with_its_round(store: Store) -> None:
    """The run keeps its newest round's other payloads: here the class space that it has sent."""
    held = {item.sha256 for item in store.blobs.held()}
    sent = {step: {ask.payload for ask in store.asks.of_run(RUN) if ask.step == step} for step in (*STEPS, "learn")}
    answers = {item.sha256 for item in store.asks.uploads(RUN) if item.step in STEPS}
    assert len(answers) > 10
    assert sent["learn"] <= held
    assert not held & answers.union(*(sent[step] for step in STEPS))
    assert not needed(store).payloads & answers


def test_a_short_round_has_no_figures_but_its_sums(store: Store) -> None:
    short, closed = store.runs.rounds(RUN)
    assert short.figures.keys() == {"secure_sums"}
    assert closed.figures.keys() > {"secure_sums", "strength"}


def test_bytes_of_a_sum_are_its_messages_and_headers(store: Store) -> None:
    kinds = ("secure_message", "envelope")
    for row in views.run(store, RUN).lists["secure_sums"]:
        for direction in ("up", "down"):
            sent = [
                item.sent_bytes
                for item in store.history.traffic_by_kind(RUN)
                if (item.round, item.direction) == (row["round"], direction) and item.kind in kinds
            ]
            assert row[f"bytes_{direction}"] == sum(sent) > 0


def test_the_events_tell_of_the_sums(store: Store) -> None:
    (made,) = store.history.events(RUN, "secure-sum")
    assert made.text.startswith("the sum of 4 devices is made in ")
    assert "; 4 of them gave shares, 4 were needed; dropped out: device-4 at secure_input (" in made.text
    (failed,) = store.history.events(RUN, "secure-sum-failed")
    assert failed.text.startswith("no sum of 5 devices: step 'secure_shares': 3 devices answered, the quorum is 4;")


def test_runs_show_prints_the_sums(directory: Path) -> None:
    done = CliRunner().invoke(app, ["runs", "show", RUN, "--store", str(directory)])
    assert done.exit_code == 0, done.output
    assert SUMS_UNREVIEWED in " ".join(done.output.split())
    _, _, heading, _, first, second = done.output[done.output.index("secure_sums (2)") :].splitlines()[:6]
    shown = ["round", "status", "asked", "inputs", "q", "t", "m", "dropped", "seconds", "bytes up", "bytes down"]
    assert heading.split() == " ".join(shown).split()
    said = "1 failed: 3 of 5 devices answered secure_shares, 4 were needed 5 4 4 4 device-3, device-4 at secure_shares "
    assert " ".join(first.split()).startswith(said)
    assert " ".join(second.split()).startswith("2 made 5 4 4 4 4 device-4 at secure_input ")


def test_the_metrics_have_the_sums(directory: Path) -> None:
    collector = RunsCollector(directory)
    read = {item.samples[0].name.removeprefix("fleetdistill_"): item.samples for item in collector.collect()}
    collector.close()
    assert {sample.labels["outcome"]: sample.value for sample in read["secure_sums_total"]} == {"made": 1, "failed": 1}
    devices = {sample.labels["state"]: sample.value for sample in read["last_secure_sum_devices"]}
    assert devices == {"asked": 5, "keys": 5, "boxes": 5, "inputs": 4, "shares": 4, "min_devices": 4, "threshold": 4}


def test_rounds_have_their_sums_for_the_dashboard(directory: Path) -> None:
    source = LocalStore(directory)
    rows = source.rounds(RUN).lists["rounds"]
    assert [one for row in rows for one in row["secure_sums"]] == source.run(RUN).lists["secure_sums"]


def test_each_of_several_sums_of_a_round_has_its_bytes() -> None:
    """Two sums of two devices: a and b send 10 and 20 bytes, c and d 300 and 400; e is in no sum."""
    store = Store.in_memory()
    store.runs.begin("r", {})
    number = store.runs.start_round("r", list("abcde"))
    row: dict[str, Any] = {"run": "r", "round": number, "expects": {}, "payload": b"", "payload_bytes": 0, "seed": 1}
    steps = {"a": (1, "secure_keys"), "b": (1, "secure_keys"), "c": (6, "secure_keys"), "d": (6, "secure_keys")}
    steps["e"] = (11, "learn")
    for device, (step_number, step) in steps.items():
        store.asks.add([Ask(**row, step_number=step_number, device=device, step=step, deadline_at=1e12)])
    for device, size in {"a": 10, "b": 20, "c": 300, "d": 400, "e": 5000}.items():
        counted = Counted()
        counted.sent["secure_message"] = size
        store.history.add_traffic("r", number, device, "up", counted, envelope_bytes=1)
    one = SumFigures(
        asked=2,
        keys=2,
        boxes=2,
        inputs=2,
        signatures=2,
        shares=2,
        min_devices=2,
        threshold=2,
        noise_shares=None,
        dropped={},
        seconds=1.0,
        failure="",
    )
    store.runs.close_round("r", number, b"", [], {"secure_sums": {"1": asdict(one), "2": asdict(one)}})
    rows = views.run(store, "r").lists["secure_sums"]
    assert [(row["sum"], row["bytes_up"], row["bytes_down"]) for row in rows] == [(1, 32, 0), (2, 702, 0)]
    store.close()


def test_a_run_without_secure_sums_has_no_list_of_them() -> None:
    store = Store.in_memory()
    store.runs.begin("r", {})
    assert "secure_sums" not in views.run(store, "r").lists
    store.close()
