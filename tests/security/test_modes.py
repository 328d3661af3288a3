"""What commands write of stores, keys and tokens is closed to the machine's other users, whatever the umask."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.modes import open_to_others
from support.wire_samples import make_payload
from typer.testing import CliRunner

from fleetdistill.state.directory import Storage
from fleetdistill_server.cli.app import app
from fleetdistill_server.store.store import Store

COMMANDS = {
    "made": ("backup made --store store", False),
    "empty": ("backup empty --store store", True),
    "restored": ("restore copy --store restored", False),
    "emptied": ("restore copy --store emptied", True),
    "new-pki": ("pki init --pki new-pki", False),
    "viewer": ("pki issue --role viewer --name alice --pki pki --out viewer --store store", False),
    "tokens": ("enrol --out tokens --store store --pki pki --enrol-port 7444", False),
}
"""What each command writes, the command, and whether the directory existed, open to others."""


def said(line: str) -> str:
    done = CliRunner().invoke(app, line.split())
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with a store, its backup and a PKI, as the working directory, where files are open by default."""
    monkeypatch.chdir(tmp_path)
    before = os.umask(0o022)
    store = Store.open(Path("store"))
    store.runs.begin("digits", {})
    number = store.runs.start_round("digits", ["d1"])
    store.blobs.put(make_payload(1))
    store.runs.close_round("digits", number, store.blobs.put_state(b"state"), [], {})
    store.close()
    said("pki init --pki pki")
    said("backup copy --store store")
    yield tmp_path
    os.umask(before)


@pytest.mark.parametrize("written", COMMANDS)
def test_what_a_command_writes_is_closed_to_others(place: Path, written: str) -> None:
    line, existed = COMMANDS[written]
    if existed:
        (place / written).mkdir()
    said(line)
    assert not open_to_others(place / written)


def test_a_new_store_and_state_directory_are_closed(place: Path) -> None:
    Storage(place / "state").close()
    assert [(place / name).stat().st_mode & 0o777 for name in ("store", "state")] == [0o700, 0o700]


def test_a_store_open_to_others_is_named_with_command(place: Path) -> None:
    Path("server.toml").write_text('[server]\nlisten = "127.0.0.1:0"\nstore = "store"\n')
    warning = "other users can read the directory store; run `chmod -R go= store`"
    for line in ("serve server.toml --check", "doctor server.toml"):
        assert warning not in said(line)
        (place / "store").chmod(0o755)
        assert warning in " ".join(said(line).split())
        (place / "store").chmod(0o700)
