"""A device takes part in a run on systems without POSIX calls, without file locks and with Windows' rules for files."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest
from platforms.other_system_run import SETTINGS, SYSTEMS, take_part
from support.fork_server import forked
from support.long import long_except

from fleetdistill.errors import ConfigurationError
from fleetdistill.state import durable
from fleetdistill.state.file_lock import lock_file
from fleetdistill_server.config.run_config import run_config
from fleetdistill_server.service.supervisor import Supervisor

FILES = ("state.safetensors", "delivered.safetensors", "model.onnx")


def results(system: str, kind: str, folder: Path) -> dict[str, bytes]:
    """What a device has at the end of its run; the version of its rows depends on its random secret."""
    folder.mkdir()
    process = forked(take_part, system, kind, folder)
    process.join()
    assert process.exitcode == 0
    files = {name: (folder / "state" / name).read_bytes() for name in FILES}
    lines = [len(line) for line in (folder / "state" / "rows.txt").read_bytes().split(b"\n")]
    return {**files, "rows.txt": bytes(lines), "events": (folder / "events.json").read_bytes()}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("kind", long_except(SETTINGS, "light"))
def test_a_run_gives_the_same_on_every_system(kind: str, tmp_path: Path) -> None:
    expected = results("linux", kind, tmp_path / "linux")
    for system in set(SYSTEMS) - {"linux"}:
        assert results(system, kind, tmp_path / system) == expected, system


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EACCES])
def test_a_directory_that_cannot_be_fsynced_is_no_error(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    durable.sync_directory(tmp_path)


def test_a_directory_that_cannot_be_opened_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, flags: int) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    durable.sync_directory(tmp_path)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_disk_failure_during_directory_fsync_is_an_error(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=os.strerror(number)):
        durable.sync_directory(tmp_path)


def test_server_on_windows_is_refused_before_storing_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(
        {**SETTINGS["torch"], "run": {"name": "r", "method": "fedavg"}, "server": {"store": str(tmp_path / "store")}}
    )
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ConfigurationError, match="require Linux or macOS"):
        Supervisor(config)
    assert not (tmp_path / "store").exists()


def test_a_file_system_that_cannot_lock_is_an_error_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="No locks available"):
        lock_file(tmp_path / "lock")
