"""Texts from devices stay short in the store, and what people ask for arrives, however much there is to tell."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.live_front import RUN, Client, client_of, live_front, open_round, prepare_store, refused, upload_name
from support.live_front import write_asks as ask
from support.secured import make_pki, secured_front
from support.wire_samples import make_knowledge, make_profile
from typer.testing import CliRunner

from fleetdistill import knowledge as k
from fleetdistill.wire.codec import Payload, encode
from fleetdistill.wire.v1 import operations_pb2, service_pb2
from fleetdistill_server.cli.app import app
from fleetdistill_server.front.operations_service import PAGE_BYTES, pages
from fleetdistill_server.security.certificates import Role
from fleetdistill_server.store.states import RunStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.texts import LONGEST, shorten

FOUR_BYTES = "\U0001f98a"
EVENTS = 3000


@given(st.text(max_size=30), st.integers(1, 20))
def test_a_shortened_text_is_short_and_begins_as_it_did(text: str, longest: int) -> None:
    short = shorten(text, longest)
    assert len(short) <= longest
    assert short == text or (short[-1] == "…" and text.startswith(short[:-1]))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    opened = prepare_store(tmp_path_factory.mktemp("texts") / "store")
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def client(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    directory = next(tmp_path_factory.getbasetemp().glob("texts*")) / "store"
    with live_front(directory) as front, client_of(front) as made:
        made.check_in()
        yield made


def stored_texts(store: Store) -> int:
    """Characters of everything that devices have a hand in, in the longest row."""
    columns = {"events": "text", "asks": "reason", "rounds": "reason", "runs": "reason", "uploads": "reason"}
    query = "SELECT coalesce(max(length({})), 0) FROM {}"
    return max(int(store.database.value(query.format(one, table)) or 0) for table, one in columns.items())


def many_parts() -> Payload:
    payload = encode({"knowledge": make_knowledge()})
    for number in range(10_000):
        payload.parts.parts.add(name=f"{number}{FOUR_BYTES * 50}").metrics.SetInParent()
    return payload


def many_metrics() -> Payload:
    metrics = [k.Metric(name=f"m{number}", split="t", sum=1.0, count=1) for number in range(150_000)]
    return encode({"knowledge": make_knowledge(), "metrics": k.Metrics(metrics=metrics)})


def long_names() -> Payload:
    return encode({f"{number}{FOUR_BYTES * 250}": k.Metrics(metrics=[]) for number in range(90)})


@pytest.mark.parametrize("make", [many_parts, many_metrics, long_names])
def test_a_refused_answer_leaves_a_sentence_and_no_more(client: Client, store: Store, make: object) -> None:
    number = open_round(store, client.device)
    ask(store, number, client.device)
    with refused() as result:
        client.upload(upload_name(number), make())  # type: ignore[operator]
    assert result[0].status.name == "INVALID_ARGUMENT"
    (event,) = [row for row in store.history.events(RUN, "refused") if row.round == number]
    assert len(event.text) <= LONGEST
    assert stored_texts(store) <= LONGEST
    assert not store.database.rows("SELECT * FROM figures WHERE round = ?", number)


def test_whatever_a_device_says_its_words_are_bounded(client: Client, store: Store) -> None:
    number = open_round(store, client.device)
    ask(store, number, client.device)
    decline = service_pb2.DeclineRequest(
        identity=client.identity, round=number, step_number=1, reason=FOUR_BYTES * 15_000
    )
    client.stub.Decline(decline, timeout=30)
    for changes in ({"model_name": "m" * 129}, {"sdk_version": "v" * 65}, {"allowed_columns": ["c" * 65]}):
        with refused() as result:
            client.check_in(make_profile(**changes))
        assert result[0].reason == "too-large"
    assert stored_texts(store) <= LONGEST
    assert all(len(row.profile) < 2000 for row in store.devices.all(RUN))


# --- what people see


@given(st.lists(st.integers(0, 50)), st.integers(1, 120), st.integers(1, 5))
def test_pages_hold_everything_in_order_within_their_bounds(sizes: list[int], max_bytes: int, most: int) -> None:
    messages = [change("x" * size) for size in sizes]
    made = list(pages(messages, max_bytes, most))
    assert [item for page in made for item in page] == messages
    assert all(1 <= len(page) <= most for page in made)
    assert all(len(page) == 1 or _bytes(page) <= max_bytes for page in made)


def change(text: str) -> operations_pb2.RunChange:
    return operations_pb2.RunChange(event=operations_pb2.EventProgress(text=text))


def _bytes(page: list[operations_pb2.RunChange]) -> int:
    return operations_pb2.WatchRunResponse(changes=page).ByteSize()


def full_store(directory: Path) -> Store:
    """12 MB of events, 4 MB of reasons of rounds, and 8 MB of reasons of runs."""
    store = prepare_store(directory)
    text = FOUR_BYTES * LONGEST
    with store.transaction():
        for _ in range(EVENTS):
            store.history.add_event(RUN, "declined", text, number=1, device="a")
        for number in range(1, 1001):
            store.runs.start_round(RUN, ["a"])
            store.runs.close_short_round(RUN, number, text)
        for number in range(2000):
            store.runs.begin(f"r{number}", {})
            store.runs.set_status(f"r{number}", RunStatus.STOPPED, text)
        store.runs.set_status(RUN, RunStatus.FINISHED, text)
    return store


@pytest.mark.long
@pytest.mark.slow
def test_what_people_ask_for_arrives_however_much_it_is(tmp_path: Path) -> None:
    make_pki(tmp_path / "pki").issue_person(Role.OPERATOR, "olga", 1.0, tmp_path / "olga")
    full_store(tmp_path / "store").close()
    with secured_front(tmp_path / "store", tmp_path / "pki") as front:
        there = ["--server", f"127.0.0.1:{front.port}", "--identity", str(tmp_path / "olga")]

        def said(*words: str) -> str:
            done = CliRunner().invoke(app, [*words, *there])
            assert done.exit_code == 0, done.output[-500:]
            return done.stdout

        listed = json.loads(said("runs", "list", "--json"))
        assert [row["run"] for row in listed] == [RUN, *(f"r{number}" for number in range(2000))]
        shown = json.loads(said("runs", "show", RUN, "--json"))
        assert shown["rounds"][-1]["round"] == 1000
        assert 200 < len(shown["events"]) <= 1000
        assert len(said("runs", "watch", RUN, "--json").splitlines()) == EVENTS + 1000 + 1
        assert len(said("enrol", "--count", "9000").splitlines()) == 9000
    local = CliRunner().invoke(app, ["runs", "show", RUN, "--store", str(tmp_path / "store")])
    assert local.exit_code == 0
    assert f"events_in_all: {EVENTS}" in local.stdout


def test_a_message_beyond_the_page_is_alone() -> None:
    large = [change("x" * (PAGE_BYTES + 1)), change("y")]
    assert [len(page) for page in pages(large, PAGE_BYTES)] == [1, 1]
