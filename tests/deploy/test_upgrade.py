"""The runbook's upgrade to a later version and its way back, by a real `serve`, and killed on the way."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.later_version import install_later_version, later_version, rows, schema
from support.parroting import ParrotDevice
from support.processes import COMMAND, PATIENCE_SECONDS, free_port, wait_until
from support.record_schema import DEVICES, RUN, make_store, recorded_config

from fleetdistill.link.grpc_link import GrpcLink
from fleetdistill_server.config.section import as_toml
from fleetdistill_server.store.store import Store

RUNBOOK = Path(__file__).parents[2] / "docs/operations.md"
STORE = "fleetdistill-store"
pytestmark = [pytest.mark.slow, pytest.mark.cold_start]  # another version is another process


def commands(heading: str) -> list[list[str]]:
    """The command lines in the first block of a section of the runbook."""
    result = re.search(rf"^#+ {heading}\n.*?^```\n(.*?)^```", RUNBOOK.read_text(), re.MULTILINE | re.DOTALL)
    assert result, heading
    return [shlex.split(line) for line in result[1].splitlines()]


class Machine:
    """A server's directory with a store, and what stands in for systemd and pip."""

    def __init__(self, work: Path) -> None:
        self.work, self.port, self.is_later = work, free_port(), False
        self.store = work / STORE
        make_store(self.store)
        self.later = install_later_version(work / "later")
        self.server: subprocess.Popen[bytes] | None = None
        (work / "backups").mkdir()
        settings = recorded_config(self.store)
        update = {"listen": f"127.0.0.1:{self.port}", "keep_free_bytes": 0, "compression": "none"}
        server = settings.server.model_copy(update=update)
        (work / "server.toml").write_text(as_toml(settings.model_copy(update={"server": server})))

    def follow(self, heading: str) -> list[str]:
        """Follows a section of the runbook; returns the words of its commands that were run as they stand."""
        ran = []
        for words in commands(heading):
            if words[:2] == ["systemctl", "stop"]:
                self.stop()
            elif words[:2] == ["systemctl", "start"]:
                self.start()
            elif words[0].endswith("/pip"):
                self.is_later = not self.is_later
            else:
                subprocess.run(words, cwd=self.work, check=True)
                ran.append(words[0])
        return ran

    def start(self, *before: str) -> None:
        """Starts the server, with this code run before it, and waits until it serves."""
        command = [sys.executable, "-c", "\n".join([*before, COMMAND[-1]]), "serve", "server.toml"]
        begun = self.said().count("is served")
        paths = [str(self.later)] if self.is_later else []
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
        with (self.work / "log").open("ab") as log:
            server = subprocess.Popen(command, cwd=self.work, env=environment, stdout=log, stderr=log)
        self.server = server
        wait_until(lambda: self.said().count("is served") > begun or server.poll() is not None, "the run is served")

    def stop(self) -> None:
        """Stops the server, if there is one."""
        if self.server is not None and self.server.poll() is None:
            self.server.send_signal(signal.SIGTERM)
            assert self.server.wait(PATIENCE_SECONDS) == 0, self.said()

    def said(self) -> str:
        return (self.work / "log").read_text() if (self.work / "log").exists() else ""

    def finish(self) -> None:
        """Devices of the run take part until the run is over."""
        devices = [ParrotDevice(GrpcLink(f"127.0.0.1:{self.port}"), RUN, name) for name in DEVICES]

        def over() -> bool:
            for device in devices:
                device.step()
            return all(device.finished for device in devices)

        wait_until(over, "the run is over")
        for device in devices:
            device.link.close()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    try:
        yield machine
    finally:
        machine.stop()


def receipts(directory: Path) -> dict[str, str]:
    return {row["receipt"]: row["status"] for row in rows(directory)["uploads"]}


@pytest.mark.long
def test_the_runbook_upgrades_a_store_and_rolls_it_back(machine: Machine) -> None:
    before, tables = rows(machine.store), schema(machine.store)
    payloads = {path.name: path.read_bytes() for path in machine.store.rglob("*.safetensors")}
    assert machine.follow("Upgrade") == ["mkdir", "cp"]
    machine.finish()
    machine.stop()
    upgraded = receipts(machine.store)
    assert {row["receipt"] for row in before["uploads"]} <= upgraded.keys()
    assert set(upgraded.values()) == {"used"}
    assert "table later_sums" in schema(machine.store)

    assert machine.follow("Roll back") == ["mv", "cp"]
    machine.stop()
    put_back = machine.work / "backups/before-upgrade"
    assert (rows(put_back), schema(put_back)) == (before, tables)
    assert {path.name: path.read_bytes() for path in put_back.rglob("*.safetensors")} == payloads
    assert receipts(machine.work / "backups/after-upgrade") == upgraded


@pytest.mark.long
def test_a_store_that_was_put_back_runs_to_the_same_end(machine: Machine) -> None:
    machine.follow("Upgrade")
    machine.finish()
    first = receipts(machine.store)
    machine.follow("Roll back")
    machine.finish()
    machine.stop()
    assert sorted(receipts(machine.store).values()) == sorted(first.values())


KILL = """
import os, signal, sqlite3
connect = sqlite3.connect
def traced(*given, **named):
    connection = connect(*given, **named)
    left = [{number}]
    def count(statement):
        if statement.split()[0] in ("ALTER", "CREATE", "DROP", "INSERT", "UPDATE", "COMMIT"):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    connection.set_trace_callback(count)
    return connection
sqlite3.connect = traced
"""
"""Kills the process before the n-th statement with which one of its connections changes the database."""


@pytest.mark.long
@pytest.mark.parametrize("number", [3, 5])
def test_a_server_that_is_killed_while_it_upgrades_loses_nothing(machine: Machine, number: int) -> None:
    before = schema(machine.store)
    machine.is_later = True
    machine.start(KILL.format(number=number))
    assert machine.server is not None
    assert machine.server.wait(PATIENCE_SECONDS) == -signal.SIGKILL, machine.said()
    assert schema(machine.store) == before
    machine.start()
    machine.finish()
    machine.stop()
    assert set(receipts(machine.store).values()) == {"used"}


def test_kill_before_any_statement_leaves_old_or_new_store(tmp_path: Path) -> None:
    old, directory, number, seen = tmp_path / "old", tmp_path / "killed", 0, set()
    make_store(old)
    tables, content = schema(old), rows(old)
    with later_version():
        Store.open(shutil.copytree(old, tmp_path / "new")).close()
    while "the new one" not in seen:
        number += 1
        shutil.copytree(old, directory)
        status = _opened_and_killed(directory, number)
        left = schema(directory)
        if status == 0:
            seen.add("the new one")
        else:
            assert (status, left) == (signal.SIGKILL, tables)
            assert rows(directory) == content
            seen.add("the old one")
        with later_version():
            Store.open(directory).close()
        assert schema(directory) == schema(tmp_path / "new")
        shutil.rmtree(directory)
    assert "the old one" in seen
    assert number > 5, "the upgrade has more statements than that"


def _opened_and_killed(directory: Path, number: int) -> int:
    """Opens a store in a child of the later version that dies before its n-th change; 0 if it lived."""
    child = os.fork()
    if child == 0:
        exec(KILL.format(number=number), {})
        with later_version():
            Store.open(directory).close()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
