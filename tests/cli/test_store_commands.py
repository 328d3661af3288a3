"""`runs prune`, `backup`, `restore`, and what `runs list` says of a run without a server."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support.wire_samples import make_payload
from typer.testing import CliRunner

from fleetdistill.errors import ConfigurationError, RunError
from fleetdistill_server.cli.app import app
from fleetdistill_server.figures import SECURE_SUMS, SumFigures
from fleetdistill_server.operations.source import LocalStore
from fleetdistill_server.service import serve_lock
from fleetdistill_server.store.records import Ask
from fleetdistill_server.store.states import RunStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.texts import readable_bytes

RUN = "digits"


def call(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A store with one running run of three closed rounds, each with a payload."""
    store = Store.open(tmp_path / "store")
    store.runs.begin(RUN, {"run": {"rounds": 9}})
    store.runs.set_keep_rounds(RUN, 9)
    store.runs.publish_contract(RUN, b"")
    for _ in range(3):
        number = store.runs.start_round(RUN, ["d1"])
        payload = make_payload(number)
        store.blobs.put(payload)
        row: dict[str, Any] = {"run": RUN, "round": number, "step_number": 1, "device": "d1", "step": "train"}
        row |= {"expects": {}, "payload": payload.sha256, "payload_bytes": 1, "seed": 1, "deadline_at": 1e12}
        store.asks.add([Ask(**row)])
        store.runs.close_round(RUN, number, store.blobs.put_state(b"state"), [], {})
    store.close()
    return tmp_path / "store"


def test_runs_show_prints_the_last_rounds_and_json_all(directory: Path) -> None:
    store = Store.open(directory)
    for _ in range(20):
        store.runs.close_short_round(RUN, store.runs.start_round(RUN, ["d1"]), "too few answers")
    store.close()
    given = ("runs", "show", RUN, "--store", str(directory))
    said = call(*given)[1]
    assert "rounds_shown: the last 20 of 23; --json prints all" in said
    table = said[said.index("rounds (20)") : said.index("bytes (")]
    first = [line.split()[:1] for line in table.splitlines()]
    assert [int(word) for words in first for word in words if word.isdecimal()] == list(range(4, 24))
    shown = json.loads(call(*given, "--json")[1])
    assert [row["round"] for row in shown["rounds"]] == list(range(1, 24))
    assert "rounds_shown" not in shown


def test_runs_show_has_the_sums_of_the_rounds_that_it_shows(directory: Path) -> None:
    """Rounds 4 to 24 have a failed sum each, and the last 20 rounds are shown."""
    steps: dict[str, Any] = dict.fromkeys(
        ("keys", "boxes", "inputs", "signatures", "shares", "threshold", "noise_shares")
    )
    failed = SumFigures(asked=5, min_devices=4, dropped={}, seconds=1.0, failure="too few", **steps)
    row: dict[str, Any] = {"run": RUN, "step_number": 1, "device": "d1", "step": "secure_keys", "expects": {}}
    store = Store.open(directory)
    for number in range(4, 25):
        assert store.runs.start_round(RUN, ["d1"]) == number
        store.asks.add([Ask(**row, round=number, seed=1, deadline_at=1e12)])
        store.runs.close_short_round(RUN, number, "too few", {SECURE_SUMS: {"1": asdict(failed)}})
    store.close()
    said = call("runs", "show", RUN, "--store", str(directory))[1]
    table = said[said.index("secure_sums (20)") : said.index("bytes (")]
    first = [line.split()[:1] for line in table.splitlines()]
    assert [int(word) for words in first for word in words if word.isdecimal()] == list(range(5, 25))


def test_a_long_reason_is_whole_and_an_events_text_is_wrapped(directory: Path) -> None:
    reason = " ".join(f"word{number}" for number in range(90))
    store = Store.open(directory)
    store.runs.set_status(RUN, RunStatus.STOPPED, reason)
    store.history.add_event(RUN, "declined", reason, number=1, device="d1")
    store.close()
    _, said = call("runs", "show", RUN, "--store", str(directory))
    assert f"reason: {reason}; to continue: `fleetdistill runs start {RUN}`" in said.splitlines()
    events = said[said.index("events (1)") :].split()
    assert [word for word in events if word.startswith("word")] == reason.split()


def test_lines_of_piped_tables_end_with_their_text(directory: Path) -> None:
    call("runs", "pause", RUN, "--store", str(directory))
    for words in (["runs", "show", RUN], ["operators"]):
        code, said = call(*words, "--store", str(directory))
        assert (code, [line for line in said.splitlines() if line != line.rstrip()]) == (0, [])


def test_a_store_that_is_replaced_is_opened_anew(directory: Path, tmp_path: Path) -> None:
    opened = LocalStore(directory)
    assert [row["run"] for row in opened.runs().lists["runs"]] == [RUN]
    directory.rename(tmp_path / "before")
    with pytest.raises(ConfigurationError, match="there is no store in"):
        opened.runs()
    store = Store.open(directory)
    store.runs.begin("restored", {"run": {"rounds": 9}})
    store.close()
    assert [row["run"] for row in opened.runs().lists["runs"]] == ["restored"]


def status(directory: Path) -> str:
    code, said = call("runs", "list", "--store", str(directory), "--json")
    assert code == 0
    return str(json.loads(said)[0]["status"])


def test_a_running_run_without_a_server_says_so(directory: Path) -> None:
    assert status(directory) == "running (no server)"
    lock = serve_lock.take(directory, RUN)
    assert status(directory) == "running"
    assert serve_lock.is_served(directory, RUN)
    with pytest.raises(RunError, match="another `fleetdistill serve` uses the store"):
        serve_lock.take(directory, "other")
    lock.close()
    other = serve_lock.take(directory, "other")
    assert status(directory) == "running (no server)", "another run of the store is served"
    other.close()


def test_a_run_that_is_over_needs_no_server(directory: Path) -> None:
    store = Store.open(directory)
    store.runs.set_status(RUN, RunStatus.FINISHED, "3 rounds completed")
    store.close()
    assert status(directory) == "finished"


def test_prune_says_what_it_frees(directory: Path) -> None:
    where = ("--store", str(directory))
    sizes = [path.stat().st_size for path in (directory / "blobs").rglob("*.safetensors")]
    one, both = (sorted(size for size in sizes if size > 100)[:count] for count in (1, 2))
    first, two = readable_bytes(sum(one)), readable_bytes(sum(both))
    with_rows = "with 1 event, 0 figures"
    nothing = "freed 0 rounds with 0 events, 0 figures, 0 payloads (0 B)\n"
    store = Store.open(directory)
    store.history.add_event(RUN, "late", "a sentence", number=1)
    store.close()
    assert call("runs", "prune", RUN, "--keep-rounds", "1", "--dry-run", *where) == (
        0,
        f"would free 2 rounds {with_rows}, 2 payloads ({two})\n",
    )
    assert call("runs", "prune", RUN, "--older-than", "30d", *where) == (0, nothing)
    assert call("runs", "prune", RUN, "--keep-rounds", "2", "--yes", *where) == (
        0,
        f"freed 1 round {with_rows}, 1 payload ({first})\n",
    )
    assert call("runs", "prune", RUN, "--keep-rounds", "2", *where) == (0, nothing)


@pytest.mark.parametrize("served", [False, True])
def test_the_database_shrinks_when_rows_are_deleted(directory: Path, served: bool) -> None:
    store = Store.open(directory)
    for number in range(2000):
        store.history.add_event(RUN, "late", f"{number} {'.' * 400}", number=1)
    store.runs.set_status(RUN, RunStatus.FINISHED, "3 rounds completed")
    store.close()
    before = (directory / "store.sqlite").stat().st_size
    with contextlib.ExitStack() as server:
        if served:
            server.enter_context(serve_lock.take(directory, RUN))
            server.enter_context(contextlib.closing(Store.open(directory)))
        assert call("runs", "prune", RUN, "--keep-rounds", "1", "--yes", "--store", str(directory))[0] == 0
    assert (directory / "store.sqlite").stat().st_size < before / 2


def test_a_dry_run_names_a_large_log_of_the_database(directory: Path) -> None:
    words = ("runs", "prune", RUN, "--dry-run", "--store", str(directory))
    with contextlib.closing(Store.open(directory)) as store:
        with store.transaction():
            for number in range(4000):
                store.history.add_event(RUN, "late", f"{number} {'.' * 400}", number=1)
        size = readable_bytes((directory / "store.sqlite-wal").stat().st_size)
        assert f"the database's log ({size}) is written into the database and cut off" in call(*words)[1]
    assert "log" not in call(*words)[1]


def test_prune_asks_before_it_deletes_anything(directory: Path) -> None:
    words = ["runs", "prune", RUN, "--keep-rounds", "1", "--store", str(directory)]
    refused = CliRunner().invoke(app, words, input="n\n")
    assert (refused.exit_code, "Delete 2 rounds with 0 events" in refused.output) == (1, True)
    assert LocalStore(directory).operators(call="PruneRun").lists["operators"] == []
    assert call(*words, "--dry-run")[1].startswith("would free 2 rounds")
    said = CliRunner().invoke(app, words, input="y\n").output
    assert "freed 2 rounds" in said
    (noted,) = LocalStore(directory).operators(call="PruneRun").lists["operators"]
    assert noted["result"] == f"done: {said.splitlines()[-1]}"
    assert call(*words)[1].startswith("freed 0 rounds"), "it does not ask where there is nothing to delete"


def test_prune_beside_a_server_says_what_is_left_to_it(directory: Path) -> None:
    lock = serve_lock.take(directory, RUN)
    code, said = call("runs", "prune", RUN, "--keep-rounds", "1", "--yes", "--store", str(directory))
    lock.close()
    assert code == 0
    assert said.startswith("freed 2 rounds with 0 events, 0 figures, 0 payloads (0 B)\n2 payloads (")
    assert said.endswith("are less than an hour old; the server deletes them later\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--keep-rounds", "0"), "need its newest closed round"),
        (("--keep-rounds", "-1"), "--keep-rounds is -1, must be at least 0"),
        (("--older-than", "soon"), "--older-than is 'soon', expected a number followed by d, h or m, such as 30d"),
    ],
)
def test_prune_refuses_with_a_sentence(directory: Path, arguments: tuple[str, ...], said: str) -> None:
    code, told = call("runs", "prune", RUN, *arguments, "--store", str(directory))
    assert code == 1
    assert said in told


@pytest.mark.parametrize("command", [("show",), ("watch",), ("prune",)])
def test_a_run_that_is_mistyped_is_guessed(directory: Path, command: tuple[str, ...]) -> None:
    code, told = call("runs", *command, "digist", "--store", str(directory))
    assert (code, told) == (1, "error: there is no run 'digist'; did you mean 'digits'? Runs in the store: digits\n")


def test_forgetting_beside_a_server_says_when_the_data_go(directory: Path) -> None:
    store = Store.open(directory)
    store.devices.register(RUN, "d1", b"", b"")
    store.close()
    lock = serve_lock.take(directory, RUN)
    code, said = call("devices", "forget", RUN, "d1", "--yes", "--store", str(directory))
    lock.close()
    assert code == 0
    assert "its payloads are deleted before the run's next round; if no engine works on the run, by a server " in said


def test_only_a_name_that_a_run_had_is_deleted_twice(directory: Path) -> None:
    where = ("--yes", "--store", str(directory))
    for _ in range(2):
        code, told = call("runs", "delete", "digts", *where)
        assert (code, told) == (
            1,
            "error: there is no run 'digts'; did you mean 'digits'? Runs in the store: digits\n",
        )
    for _ in range(2):
        assert call("runs", "delete", RUN, *where)[0] == 0
    assert call("runs", "delete", RUN[:-1], *where)[0] == 1, "the beginning of a name is another name"


def test_backup_and_restore(directory: Path, tmp_path: Path) -> None:
    code, said = call("backup", str(tmp_path / "backup"), "--store", str(directory))
    assert (code, "4 payloads and the database" in said) == (0, True)
    code, said = call("restore", str(tmp_path / "backup"), "--store", str(tmp_path / "restored"))
    assert (code, "a server whose [server] store is this directory continues from the backup" in said) == (0, True)
    assert status(tmp_path / "restored") == "running (no server)"
    (known,) = LocalStore(tmp_path / "restored").server().lists["backups"]
    assert known["result"] == "done: the store was restored from this backup"
    code, said = call("restore", str(tmp_path / "backup"), "--store", str(directory))
    assert (code, "is not an empty directory" in said) == (1, True)


def test_a_lossy_backup_warns_and_fails(directory: Path, tmp_path: Path) -> None:
    path = next((directory / "blobs").rglob("*.safetensors"))
    path.unlink()
    code, said = call("backup", str(tmp_path / "backup"), "--store", str(directory))
    assert code == 1
    assert "warning: not in the backup: " in said
    assert path.stem in said
    assert said.endswith(", with 1 payload missing\n")
    (noted,) = LocalStore(directory).operators(call="BackUp").lists["operators"]
    assert noted["result"].endswith(", with 1 payload missing")
    assert call("restore", str(tmp_path / "backup"), "--store", str(tmp_path / "restored"))[0] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("serve", "none.toml"), "there is no file none.toml; enter the path of a TOML file, such as run.toml"),
        (("serve", "."), "cannot read .: Is a directory"),
        (("restore", "none"), "directory none does not exist; choose a directory made by `fleetdistill backup`"),
        (("restore", "."), "is not a complete backup: its manifest.json cannot be read: No such"),
        (("backup", "x" * 999), f"checking {'x' * 999}: File name too long ("),
        (("runs", "list", "--server", "127.0.0.1:1", "--identity", "none"), "the identity in none cannot be read: No"),
    ],
)
def test_unusable_file_gives_sentence_without_error_number(
    directory: Path, arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    stored = ("--store", str(directory)) if arguments[0] == "backup" else ()
    code, told = call(*arguments, *stored)
    assert code == 1
    assert said in told
    assert "Errno" not in told
