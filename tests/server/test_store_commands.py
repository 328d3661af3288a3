"""`runs prune`, `backup`, `restore`, and what `runs list` says of a run without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from wire_samples import make_payload

from fleetdistill.errors import RunError
from fleetdistill_server import serve_lock
from fleetdistill_server.cli import app
from fleetdistill_server.store import Store
from fleetdistill_server.traffic import readable_bytes

RUN = "digits"


def call(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A store with one running run of three closed rounds, each with a payload."""
    store = Store.open(tmp_path / "store")
    store.begin_run(RUN, {"run": {"rounds": 9}})
    store.set_keep_rounds(RUN, 9)
    store.publish_contract(RUN, b"")
    for _ in range(3):
        number = store.start_round(RUN, ["d1"])
        payload = make_payload(number)
        store.blobs.put(payload)
        row: dict[str, Any] = {"run": RUN, "round": number, "step_number": 1, "device": "d1", "step": "train"}
        row |= {"expects": {}, "payload": payload.sha256, "payload_bytes": 1, "seed": 1, "deadline_at": 1e12}
        store.write_asks([row])
        store.close_round(RUN, number, store.blobs.put_state(b"state"), [], {})
    store.close()
    return tmp_path / "store"


def status(directory: Path) -> str:
    code, said = call("runs", "list", "--store", str(directory), "--json")
    assert code == 0
    return str(json.loads(said)[0]["status"])


def test_a_running_run_without_a_server_says_so(directory: Path) -> None:
    assert status(directory) == "running (no server)"
    lock = serve_lock.take(directory, RUN)
    assert status(directory) == "running"
    assert serve_lock.served_run(directory) == RUN
    with pytest.raises(RunError, match="another `fleetdistill serve` uses the store"):
        serve_lock.take(directory, "other")
    lock.close()
    other = serve_lock.take(directory, "other")
    assert status(directory) == "running (no server)", "another run of the store is served"
    other.close()


def test_a_run_that_is_over_needs_no_server(directory: Path) -> None:
    store = Store.open(directory)
    store.end_run(RUN, "finished", "3 rounds completed")
    store.close()
    assert status(directory) == "finished"


def test_prune_says_what_it_frees(directory: Path) -> None:
    where = ("--store", str(directory))
    sizes = [path.stat().st_size for path in (directory / "blobs").rglob("*.safetensors")]
    two = readable_bytes(sum(sorted(size for size in sizes if size > 100)[:2]))
    assert call("runs", "prune", RUN, "--keep-rounds", "1", "--dry-run", *where) == (
        0,
        f"would free 2 rounds, 2 payloads, {two}\n",
    )
    assert call("runs", "prune", RUN, "--older-than", "30d", *where) == (0, "freed 0 rounds, 0 payloads, 0.0 kB\n")
    assert call("runs", "prune", RUN, "--keep-rounds", "1", *where) == (0, f"freed 2 rounds, 2 payloads, {two}\n")
    assert call("runs", "prune", RUN, "--keep-rounds", "1", *where) == (0, "freed 0 rounds, 0 payloads, 0.0 kB\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--keep-rounds", "0"), "its newest closed round is needed"),
        (("--keep-rounds", "-1"), "--keep-rounds is -1, must be at least 0"),
        (("--all",), "run 'digits' is running; only a run that is over, and not served, can be deleted whole"),
        (("--older-than", "soon"), "--older-than 'soon': give a number and d, h or m, such as 30d"),
    ],
)
def test_prune_refuses_with_a_sentence(directory: Path, arguments: tuple[str, ...], said: str) -> None:
    code, told = call("runs", "prune", RUN, *arguments, "--store", str(directory))
    assert code == 1
    assert said in told


def test_backup_and_restore(directory: Path, tmp_path: Path) -> None:
    code, said = call("backup", str(tmp_path / "backup"), "--store", str(directory))
    assert (code, "4 payloads and the database" in said) == (0, True)
    code, said = call("restore", str(tmp_path / "backup"), "--store", str(tmp_path / "restored"))
    assert (code, "goes on from there" in said) == (0, True)
    assert status(tmp_path / "restored") == "running (no server)"
    code, said = call("restore", str(tmp_path / "backup"), "--store", str(directory))
    assert (code, "is not an empty directory" in said) == (1, True)


def test_a_lossy_backup_warns(directory: Path, tmp_path: Path) -> None:
    path = next((directory / "blobs").rglob("*.safetensors"))
    path.unlink()
    code, said = call("backup", str(tmp_path / "backup"), "--store", str(directory))
    assert code == 0
    assert "warning: not in the backup: " in said
    assert path.stem in said
