"""Backups and models come from a server to an operator's machine, checked, and can be used there."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
from operations.conftest import Played
from support.modes import open_to_others
from support.served import RUN
from typer.testing import CliRunner

from fleetdistill.errors import ConfigurationError, LinkError, StoreError
from fleetdistill.wire.v1 import operations_pb2
from fleetdistill_server.cli.app import app
from fleetdistill_server.operations.client import OperatorClient, receive_backup
from fleetdistill_server.operations.source import LocalStore

pytestmark = pytest.mark.slow
Part = operations_pb2.FilePart


def said(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == code, done.output
    return done.output


def test_a_backup_from_elsewhere_restores_to_the_same_run(played: Played, tmp_path: Path) -> None:
    said("backup", str(tmp_path / "copy"), *played.there("operator"))
    said("restore", str(tmp_path / "copy"), "--store", str(tmp_path / "restored"))
    assert not [*open_to_others(tmp_path / "copy"), *open_to_others(tmp_path / "restored")]
    here, there = LocalStore(played.store), LocalStore(tmp_path / "restored")
    assert there.rounds(RUN).json() == here.rounds(RUN).json()
    assert not list(played.store.glob("sending-*"))
    (call,) = here.operators(call="BackUp").lists["operators"]
    assert re.fullmatch(r"done: \d+ payloads and the database, [\d.]+ .?B", call["result"]), call["result"]


def test_remote_export_gives_same_model_as_on_server_machine(played: Played, tmp_path: Path) -> None:
    there = said("export", RUN, "--out", str(tmp_path / "there.onnx"), *played.there("operator"))
    here = said("export", RUN, "--out", str(tmp_path / "here.onnx"), *played.here)
    assert there.replace("there.onnx", "here.onnx") == here
    assert (tmp_path / "there.onnx").read_bytes() == (tmp_path / "here.onnx").read_bytes()
    onnxruntime.InferenceSession(tmp_path / "there.onnx")
    assert not list(tmp_path.glob("*.receiving"))


@pytest.mark.parametrize("run", ["no\0such", "../x"])
def test_an_export_of_what_is_no_name_is_refused(played: Played, tmp_path: Path, run: str) -> None:
    """No process is started with it as an argument."""
    text = said("export", run, "--out", str(tmp_path / "m.onnx"), *played.there("operator"), code=1)
    assert "must be" in text
    assert "the export failed" not in text


def test_only_operators_copy(played: Played, tmp_path: Path) -> None:
    assert "may not back up the store" in said("backup", str(tmp_path / "copy"), *played.there(), code=1)
    assert "may not export a model" in said("export", RUN, "--out", str(tmp_path / "m.onnx"), *played.there(), code=1)
    assert "no run 'nothing'" in said("export", "nothing", *played.there("operator"), code=1)


class Call(Iterator[Part]):
    """A stream of a server."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self._parts = iter(parts)

    def __next__(self) -> Part:
        return next(self._parts)

    def cancel(self) -> None:
        """As of gRPC."""


class Copier:
    """A server that sends what a test gives it."""

    def __init__(self, *parts: Part) -> None:
        self.parts = parts

    def BackUp(self, request: Any) -> Call:
        return Call(self.parts)


def test_a_directory_that_is_not_empty_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(ConfigurationError, match="not an empty directory"):
        OperatorClient("server", Copier(), tmp_path).back_up(tmp_path)


@pytest.mark.parametrize("name", ["../evil", "backup/../../evil", "/etc/passwd", "backup/blobs/aa/short.safetensors"])
def test_files_outside_a_backup_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(LinkError, match="not part of a backup"):
        OperatorClient("server", Copier(Part(path=name, data=b"x")), tmp_path).back_up(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    assert not (tmp_path / "evil").exists()


def test_an_interrupted_copy_begins_anew_and_damage_is_found(played: Played, tmp_path: Path) -> None:
    made = LocalStore(played.store)
    made.back_up(tmp_path / "made")
    files = [path for path in sorted((tmp_path / "made").rglob("*")) if path.is_file()]
    parts = [Part(path=f"backup/{file.relative_to(tmp_path / 'made')}", data=file.read_bytes()) for file in files]
    copy = tmp_path / "copy"
    with pytest.raises(LinkError, match="ended early; run the command again"):
        receive_backup(parts[:-1], copy)
    assert not copy.exists()
    damaged = [Part(path=part.path, data=part.data[:-1] + b"?") if "sqlite" in part.path else part for part in parts]
    with pytest.raises(StoreError, match=r"store\.sqlite does not match its digest"):
        receive_backup([*damaged, Part(report="{}")], copy)
    assert not copy.exists()
    receive_backup([*parts, Part(report='{"payloads": 1, "bytes": 2, "lost": []}')], copy)
    assert {path.name for path in copy.iterdir()} == {"blobs", "manifest.json", "store.sqlite"}
    shutil.rmtree(copy)
