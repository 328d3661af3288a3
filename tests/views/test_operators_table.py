"""The table of operators' calls: a person can read it on a terminal of 80 columns, and scripts still have JSON."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from rich.console import Console

from fleetdistill_console.commands.operators import table
from fleetdistill_server.security.roles import CALLS, in_words
from fleetdistill_server.store.database import Row

REFUSED = "refused: not-allowed: viewer 'vera' may not delete a run; an operator may"


def called(role: str, name: str, call: str, address: str, result: str, **arguments: Any) -> Row:
    row = {"id": 1, "role": role, "name": name, "call": call, "address": address, "result": result}
    return {**row, "arguments": json.dumps(arguments), "at": "2026-11-23T09:42:33Z"}


ROWS = [
    called("viewer", "vera", "DeleteRun", "ipv4:10.1.2.3:4040", REFUSED, run="digits"),
    called("operator", "olga", "RevokeDevice", "ipv6:%5B::1%5D:4040", "done", device="camera-7", reason="stolen"),
    called("operator", "olga", "CreateTokens", "ipv4:10.1.2.3:4040", "done: 2 tokens", expires_seconds=86400.0),
    called("local", "ada", "ChangeRun", "local", "done: run 'digits' is paused", run="digits", status="paused"),
    called("local", "ada", "CreateRun", "local", "failed: there is no such file", run="x" * 64, start=True),
    called("local", "ada", "RollBackRun", "local", "done: 2 rounds undone", run="a", to=0),
    called("operator", "olga", "RollBackRun", "ipv4:10.1.2.3:4040", "done: 2 rounds undone", run="b"),
    called("operator", "olga", "ChangeRun", "local", "failed: no run\n  such as this", run="c", status="cancelled"),
    called("local", "ada\x1b[2J", "CallOfALaterVersion", "local", "begun", devices=["d1", "d2"]),
]


def printed(width: int) -> list[str]:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(table(ROWS, width))
    return captured.get().splitlines()


@pytest.mark.parametrize("width", [80, 120, 240])
def test_every_call_is_readable_at_every_width(width: int) -> None:
    lines = printed(width)
    assert max(map(len, lines)) <= width
    assert not re.search(r"[{}]|\x1b", "\n".join(lines)), "no dictionary, and nothing that a name does to a terminal"
    assert "x" * 64 in "".join(re.findall("x+", "\n".join(line for line in lines if "xxx" in line)))


def test_call_says_when_who_where_what_which_run_and_result() -> None:
    text = "\n".join(re.sub(" +", " ", line).strip() for line in printed(240))
    assert (
        "2026-11-23 09:42:33 viewer vera from 10.1.2.3 delete a run digits refused: viewer 'vera' may not delete a run;"
        in text
    )
    assert "revoke a device device camera-7, reason stolen" in text
    assert "2 tokens (expires seconds 86400)" in text
    assert "ada on the store's machine pause a run digits run 'digits' is paused" in text
    assert "(status paused)" not in text
    for run in ("a", "b"):
        assert f"roll back a run {run} 2 rounds undone (to 0)" in text
    assert "cancel a run c failed: no run; such as this" in text
    assert "failed: there is no such file (start)" in text
    assert "begun, or interrupted (devices d1, d2)" in text
    for host in ("10.1.2.3", "[::1]"):
        assert host in text


def test_every_call_has_words() -> None:
    for method in CALLS:
        assert in_words(method) != method
        assert in_words(method.rpartition("/")[2])[0].islower()


def test_no_calls_are_said_to_be_none() -> None:
    assert str(table([], 80)) == "operators (0)"
