"""The sums of `store/sums.py` are what the answers add up to, whatever happened, and in what order."""

from __future__ import annotations

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.stores import place_store

from fleetdistill.knowledge import Metric, Metrics
from fleetdistill.replacement import REPLACED, SPLIT
from fleetdistill_server.store.database import Row
from fleetdistill_server.store.records import Ask, Replacements
from fleetdistill_server.store.states import STALENESS, UploadStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.store.sums import EVERY
from fleetdistill_server.store.traffic import Counted

DEVICES = "abc"
RUNS = (f"run-{number}" for number in itertools.count())
Changes = list[tuple[str, int, int]]


@pytest.fixture(params=["memory", pytest.param("postgres", marks=[pytest.mark.postgres, pytest.mark.long])])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    opened = Store.in_memory() if request.param == "memory" else Store.open(place_store(request, tmp_path / "store"))
    yield opened
    opened.close()


class Changing:
    """A run that is changed in every way that the store offers. Numbers choose among what there is."""

    def __init__(self, store: Store) -> None:
        self.store, self.run = store, next(RUNS)
        store.runs.begin(self.run, {"run": {"name": self.run}})
        store.runs.set_keep_checkpoints(self.run, 3)
        for device in DEVICES:
            store.devices.register(self.run, device, device.encode(), b"")

    def asks(self) -> list[Ask]:
        rounds = [row.number for row in self.store.runs.rounds(self.run)]
        return [ask for number in rounds for ask in self.store.asks.of_step(self.run, number, 1)]

    def ask(self, choice: int, *statuses: str) -> Ask | None:
        """An ask of these statuses, 0 for the newest; None if there is none."""
        asks = [ask for ask in self.asks() if not statuses or ask.status in statuses]
        return asks[-1 - choice % len(asks)] if asks else None

    def open_number(self) -> int:
        """Number of the open round; opens one if there is none."""
        number = self.store.runs.open_number(self.run)
        if number is None:
            number = self.store.runs.start_round(self.run, list(DEVICES))
            row: dict[str, Any] = {
                "run": self.run,
                "round": number,
                "step_number": 1,
                "step": "train",
                "expects": {},
                "seed": 1,
            }
            row |= {"payload": b"p" * 32, "payload_bytes": 1, "deadline_at": time.time() + 600}
            self.store.asks.add([Ask(**row, device=device) for device in DEVICES])
        return number

    def begin_round(self, choice: int, amount: int) -> None:
        self.open_number()

    def answer(self, choice: int, amount: int) -> None:
        ask = self.ask(choice, "open")
        if ask is not None:
            with self.store.transaction():
                self.store.asks.accept_upload(ask.id, amount, b"s" * 32, 10, 1)
                self.send("up", ask.round, ask.device, amount)
                self.report(choice, amount)

    def report(self, choice: int, amount: int) -> None:
        """Reports figures, again perhaps: without counts, for two names, and a replacement."""
        ask = self.ask(choice)
        if ask is not None:
            figures = [
                Metric(name="accuracy", split="test", sum=amount, count=amount % 3 * 4),
                Metric(name=REPLACED, split=SPLIT, sum=amount % 2, count=1),
                *([Metric(name="own/accuracy", split="test", sum=amount, count=8)] if amount % 2 else []),
            ]
            self.store.history.add_figures(self.run, ask.round, ask.device, Metrics(metrics=figures))

    def send(self, direction: str, number: int, device: str, amount: int) -> None:
        counted = Counted(Counter({"model": amount}), Counter({"model": amount + 1, "logits": 2}))
        self.store.history.add_traffic(self.run, number, device, direction, counted, 3)

    def download(self, choice: int, amount: int) -> None:
        ask = self.ask(choice)
        self.send("down", ask.round if ask is not None and amount else 0, DEVICES[choice % 3], amount)

    def refuse(self, choice: int, amount: int) -> None:
        ask = self.ask(choice)
        if ask is not None:
            self.store.history.add_refused_traffic(ask.id, amount)

    def drop_out(self, choice: int, amount: int) -> None:
        ask = self.ask(choice, "open")
        if ask is not None:
            self.store.asks.close(ask.id, "late")

    def lose_answer(self, choice: int, amount: int) -> None:
        ask = self.ask(choice, "answered")
        if ask is not None:
            self.store.asks.withdraw_upload(ask.id, "the file is empty")

    def close(self, choice: int, amount: int) -> None:
        """Closes a round: with late asks left open, or not, and with late answers used, or not."""
        number = self.open_number()
        used = [ask.id for ask in self.asks() if ask.id % (1 + choice % 3) == 0]
        settles = (number - amount, number - amount) if amount % 4 else None
        new = [row for row in self.store.asks.uploads(self.run) if row.status == "acknowledged"]
        late = {row.device: number - row.round for row in new if row.ask in used and row.round < number}
        self.store.runs.close_round(self.run, number, bytes([number]) * 32, used, {STALENESS: late}, settles)

    def end_short(self, choice: int, amount: int) -> None:
        self.store.runs.close_short_round(self.run, self.open_number(), "too few devices")

    def settle(self, choice: int, amount: int) -> None:
        self.store.runs.settle_closed(self.run, "the run has ended")

    def roll_back(self, choice: int, amount: int) -> None:
        kept = [checkpoint.round for checkpoint in self.store.runs.checkpoints(self.run)]
        if kept:
            self.store.runs.roll_back(self.run, kept[choice % len(kept)])

    def forget(self, choice: int, amount: int) -> None:
        with self.store.transaction():
            self.store.runs.remove_contributions(self.run, [DEVICES[choice % 3]], b"c" * 32)

    def prune(self, choice: int, amount: int) -> None:
        self.store.runs.prune_rounds(self.run, amount % 4)

    def fail(self, choice: int, amount: int) -> None:
        """A transaction that closes a round, and then fails, as if the process were killed."""

        def close() -> None:
            with self.store.transaction():
                self.answer(choice, amount)
                self.close(choice, amount)
                raise RuntimeError("killed")

        self.open_number()
        with pytest.raises(RuntimeError, match="killed"):
            close()


CHANGES: dict[str, Callable[[Changing, int, int], None]] = {
    change.__name__: change
    for change in (
        *(Changing.begin_round, Changing.answer, Changing.report, Changing.download, Changing.refuse),
        *(Changing.drop_out, Changing.lose_answer, Changing.close, Changing.end_short, Changing.settle),
        *(Changing.roll_back, Changing.forget, Changing.prune, Changing.fail),
    )
}
NUMBER = st.integers(0, 7)
OFTEN = ("begin_round", "answer", "answer", "answer", "close", "close")
STEPS = st.lists(st.tuples(st.sampled_from([*OFTEN, *sorted(CHANGES)]), NUMBER, NUMBER), min_size=5, max_size=40)
A_ROUND: Changes = [("begin_round", 0, 0), ("answer", 0, 3), ("answer", 0, 5), ("close", 0, 0)]
LATE: Changes = [("begin_round", 0, 0), ("answer", 0, 3), ("close", 0, 1), ("answer", 0, 5), ("close", 0, 1)]


def answers_of(store: Store, run: str) -> tuple[Any, ...]:
    """Numbers of answers by round: from the sums, and counted."""
    uploads, progress = store.asks.uploads(run), store.runs.progress(run)
    assert progress is not None
    summed = {one.number: tuple(answers) for one, answers in store.summaries.rounds(run, 0, EVERY)}
    followed = {item.round.number: tuple(item.answers) for item in progress.rounds}
    result = Counter((row.round, row.status) for row in uploads)
    in_all = {number: sum(n for key, n in result.items() if key[0] == number) for number in summed}
    counted = {
        number: (result[number, UploadStatus.USED], result[number, UploadStatus.REPORTED], in_all[number])
        for number in summed
    }
    reported = sorted(row.receipt for row in store.summaries.reported_uploads(run))
    listed = sorted(row.receipt for row in uploads if row.status == "reported")
    return (summed, followed, reported), (counted, counted, listed)


def bytes_of(store: Store, run: str) -> tuple[Any, ...]:
    """Bytes by round and kind, device, and in all: from the sums, and added."""
    traffic = store.history.traffic_by_kind(run)

    def added(*columns: str) -> dict[tuple[Any, ...], list[int]]:
        sums = defaultdict[tuple[Any, ...], list[int]](lambda: [0, 0, 0, 0, 0])
        for row in traffic:
            one = sums[tuple({"run": run, **asdict(row)}[name] for name in columns)]
            up = row.direction == "up"
            one[0 if up else 1] += row.tensor_bytes + row.envelope_bytes
            one[2] += row.envelope_bytes
            one[3 if up else 4] += row.sent_bytes
        return sums

    def summed(rows: list[Row], *columns: str) -> dict[tuple[Any, ...], list[int]]:
        numbers = ("up", "down", "envelope_bytes", "up_sent", "down_sent")
        return {tuple(row[name] for name in columns): [row[name] for name in numbers] for row in rows}

    by_kind, by_run = ("round", "kind"), ("run",)
    return (
        summed(store.summaries.bytes(run, by_kind, 0, EVERY), *by_kind),
        summed(store.summaries.bytes(run, by_run, 0, EVERY), *by_run),
        summed(store.summaries.bytes_of_devices(run), "device"),
    ), (added(*by_kind), added(*by_run), added("device"))


def figures_of(store: Store, run: str) -> tuple[Any, ...]:
    """Means by round, replacements by round and device, and newest figures: from the sums, and computed."""
    summed = store.summaries.mean_figures(run, 0, EVERY)
    means = {(row["round"], row["name"]): (round(row["mean"], 9), row["devices"]) for row in summed}
    names = (("accuracy", "test"), ("own/accuracy", "test"), (REPLACED, SPLIT))
    rows = [row for name in names for row in store.history.figures(run, *name)]
    rates = defaultdict[tuple[int, str], list[float]](list)
    for row in rows:
        if row.count:
            rates[row.round, row.name].append(row.sum / row.count)
    computed = {key: (round(sum(found) / len(found), 9), len(found)) for key, found in rates.items()}
    newest = {(row.name, row.device): row.round for row in store.history.newest_figures(run, "accuracy", "test")}
    last = {(row.name, row.device): row.round for row in rows if row.name != REPLACED}  # oldest first
    figures = [row for row in rows if row.name == REPLACED]
    replaced = [
        _replaced((figure.round, figure.sum) for figure in figures),
        _replaced((figure.device, figure.sum) for figure in figures),
    ]
    counted = [store.summaries.replacements(run, 0, EVERY), store.summaries.replacements_of_devices(run)]
    return (means, newest, counted), (computed, last, replaced)


def _replaced(sums: Iterable[tuple[Any, float]]) -> dict[Any, Replacements]:
    result = Counter((key, total > 0) for key, total in sums)
    return {key: Replacements(result[key, True], result[key, False]) for key, _ in result}


def assert_sums_are_true(store: Store, run: str) -> None:
    for compared in (answers_of, bytes_of, figures_of):
        summed, computed = compared(store, run)
        assert summed == computed, compared.__name__
    only = store.summaries.replacements_of_devices(run, "b")
    assert only == {
        device: counts for device, counts in store.summaries.replacements_of_devices(run).items() if device == "b"
    }
    of_b = store.history.newest_figures(run, "accuracy", "test", "b")
    assert of_b == [row for row in store.history.newest_figures(run, "accuracy", "test") if row.device == "b"]


def play(store: Store, changes: Changes) -> str:
    changing = Changing(store)
    for name, choice, amount in changes:
        CHANGES[name](changing, choice, amount)
        assert_sums_are_true(store, changing.run)
    return changing.run


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=STEPS)
@example(changes=[*A_ROUND, ("lose_answer", 0, 0), *A_ROUND])
@example(changes=[*LATE, ("begin_round", 0, 0), ("report", 4, 2), ("close", 0, 0)])
@example(changes=[*A_ROUND, *A_ROUND, ("roll_back", 0, 0), *A_ROUND, ("forget", 1, 0)])
@example(changes=[*A_ROUND, *A_ROUND, ("prune", 0, 2), ("prune", 0, 3)])
@example(changes=[*LATE, ("roll_back", 0, 0), *A_ROUND])
def test_sums_are_what_the_answers_add_up_to_after_every_change(store: Store, changes: Changes) -> None:
    play(store, changes)


def test_late_answer_used_by_undone_round_counts_as_reported(store: Store) -> None:
    run = play(store, LATE)
    assert [tuple(answers) for _, answers in store.summaries.rounds(run, 0, EVERY)] == [(2, 0, 2), (0, 0, 0)]
    store.runs.roll_back(run, 1)
    assert [tuple(answers) for _, answers in store.summaries.rounds(run, 0, EVERY)] == [(1, 1, 2), (0, 0, 0)]
    assert_sums_are_true(store, run)


def test_a_deleted_run_leaves_no_sums_and_those_of_others(store: Store) -> None:
    kept, gone = play(store, [*A_ROUND, *LATE]), play(store, [*A_ROUND, *LATE])
    before = [compared(store, kept)[0] for compared in (bytes_of, figures_of)]
    store.runs.delete(gone)
    assert [compared(store, kept)[0] for compared in (bytes_of, figures_of)] == before
    store.runs.begin(gone, {})
    assert all(not part for compared in (bytes_of, figures_of) for part in compared(store, gone)[0][:2])
    assert_sums_are_true(store, kept)
