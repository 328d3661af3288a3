"""Creating a run: which data files it may name from elsewhere, how much memory it takes, and when it ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from support.live_front import CALL_SECONDS, prepare_store, refused
from support.processes import children, wait_until
from support.secured import SecuredFront, make_pki, person_credentials, secured_front

from fleetdistill.errors import RunError
from fleetdistill.link.credentials import Credentials
from fleetdistill.wire.v1 import operations_pb2, operations_pb2_grpc
from fleetdistill_server.config.run_config import run_config
from fleetdistill_server.config.section import as_toml
from fleetdistill_server.intake.operator_log import local_call
from fleetdistill_server.security.certificates import Role
from fleetdistill_server.service.creation import NewRun, create_checked
from fleetdistill_server.store.store import Store

SLOW = "import time; time.sleep(600)"
"""A module of the operator's that keeps the creating process busy for as long as it may run."""


def settings_of(name: str, **sections: Any) -> dict[str, Any]:
    return {
        "run": {"name": name, "method": "fedavg", "rounds": 3, **sections.pop("run", {})},
        "contract": {"classes": 2, "input_shape": [1, 8, 8]},
        "model": {"extractor": "", "server": "", "device": "digits_linear"},
        **sections,
    }


def save_data(path: Path, rows: int = 4) -> str:
    path.parent.mkdir(exist_ok=True, parents=True)
    inputs = np.zeros((rows, 1, 8, 8), np.float32)
    np.savez_compressed(path, inputs=inputs, labels=np.arange(rows) % 2)
    return str(path)


@dataclass
class Elsewhere:
    """A server with TLS whose data are in `served`/data, and the stub of an operator."""

    served: Path
    front: SecuredFront
    operator: Credentials
    stub: Any
    directory: Path
    store: Store

    def create(self, settings: dict[str, Any]) -> str:
        """Creates a run and returns its status."""
        request = operations_pb2.CreateRunRequest(run_toml=as_toml(run_config(settings)))
        return str(self.stub.CreateRun(request, timeout=CALL_SECONDS).run.status)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elsewhere]:
    work = tmp_path_factory.mktemp("creation")
    authority = make_pki(work / "pki")
    operator = person_credentials(authority, Role.OPERATOR, "olga")
    served = work / "served"
    save_data(served / "data" / "inside.npz")
    (served / "slow_to_import.py").write_text(SLOW)
    back = Path.cwd()
    os.chdir(served)  # a front has the directory of `serve`
    try:
        with (
            contextlib.closing(prepare_store(work / "store")) as store,
            secured_front(work / "store", work / "pki", data_directories=["data"]) as front,
            front.channel(operator) as channel,
        ):
            stub = operations_pb2_grpc.OperationsServiceStub(channel)
            yield Elsewhere(served, front, operator, stub, work / "store", store)
    finally:
        os.chdir(back)


def test_remote_run_names_data_under_server_directories(world: Elsewhere) -> None:
    (world.served / "data" / "link.npz").symlink_to(world.served / "data" / "inside.npz")
    for number, file in enumerate(("data/inside.npz", str(world.served / "data" / "inside.npz"), "data/link.npz")):
        settings = settings_of(f"inside-{number}", evaluation={"data": file})
        assert world.create(settings) == "created"


@pytest.mark.parametrize("section", ["evaluation", "proxy"])
@pytest.mark.parametrize("way", ["absolute", "parent", "link", "linked directory", "circle", "null", "special"])
def test_a_run_from_elsewhere_names_no_other_file(section: str, way: str, world: Elsewhere, tmp_path: Path) -> None:
    other = save_data(tmp_path / "other.npz")
    link = world.served / "data" / f"{section}-{way.replace(' ', '-')}"
    if way == "link":
        link.symlink_to(other)
    if way == "linked directory":
        link.symlink_to(tmp_path)
    if way == "circle":
        link.symlink_to(link)
    file = {
        "absolute": other,
        "parent": f"data/../{os.path.relpath(other, world.served)}",
        "link": str(link),
        "linked directory": f"data/{link.name}/other.npz",
        "circle": str(link),
        "null": "data/\0.npz",
        "special": "/dev/zero",
    }[way]
    given = {"data": file, **({"name": "p", "licence": "CC0"} if section == "proxy" else {})}
    with refused() as result:
        world.create(settings_of("outside", **{section: given}))
    assert f"[{section}] data: {file!r} is outside the directories for data" in result[0].text
    assert "[server] data_directories" in result[0].text
    assert world.store.runs.get("outside") is None


def test_remote_clone_keeps_data_named_by_owner_of_machine(world: Elsewhere, tmp_path: Path) -> None:
    own, other = save_data(tmp_path / "own.npz"), save_data(tmp_path / "other.npz")
    settings = settings_of("local", evaluation={"data": own})
    create_checked(world.directory, NewRun(settings=settings), local_call("CreateRun", {}))
    request = operations_pb2.CreateRunRequest(clone_of="local", run_toml="run.name = 'copy'")
    created = world.stub.CreateRun(request, timeout=CALL_SECONDS).run
    assert created == operations_pb2.RunState(run="copy", status="created")
    changes = [f"evaluation.data={other}"]
    with refused() as result:
        request.run_toml, request.changes[:] = "run.name = 'copy-2'", changes
        world.stub.CreateRun(request, timeout=CALL_SECONDS)
    assert "is outside the directories for data" in result[0].text


@pytest.mark.parametrize("text", ["", "run = 1", "run.name = 1", "run.name = 'copy'\nrun.rounds = 3"])
def test_clone_takes_only_a_name(world: Elsewhere, text: str) -> None:
    create_checked(world.directory, NewRun(settings=settings_of("cloned")), local_call("CreateRun", {}))
    with refused() as result:
        world.stub.CreateRun(operations_pb2.CreateRunRequest(clone_of="cloned", run_toml=text), timeout=CALL_SECONDS)
    assert "the run.toml of a clone has [run] name alone" in result[0].text


RUN_THAT_TAKES_LONG = """
[run]
name = "slow"
method = "fedavg"
import = ["slow_to_import"]

[contract]
classes = 2
input_shape = [1, 8, 8]

[model]
device = "digits_linear"
"""


@pytest.mark.parametrize("way", ["cancelled", "deadline", "connection lost"])
def test_creation_ends_with_the_call(way: str, world: Elsewhere) -> None:
    def processes() -> list[int]:
        return children(world.front.process.pid, "fleetdistill_server.engine.creation")

    request = operations_pb2.CreateRunRequest(run_toml=RUN_THAT_TAKES_LONG)
    with world.front.channel(world.operator) as channel:
        stub = operations_pb2_grpc.OperationsServiceStub(channel)
        call = stub.CreateRun.future(request, timeout=5.0 if way == "deadline" else CALL_SECONDS)
        wait_until(lambda: processes() or call.done(), "the process that creates the run")
        if way == "cancelled":
            call.cancel()
        if way == "connection lost":
            channel.close()
        with pytest.raises((grpc.RpcError, grpc.FutureCancelledError)):
            call.result()
        wait_until(lambda: not processes(), "its end", 60.0)
    assert world.create(settings_of(f"after-{way.replace(' ', '-')}")), "and the next one is not kept waiting"
    assert world.store.runs.get("slow") is None


MODEL = """
import torch

def build(**options):
    return torch.nn.Linear(1 << 15, 1 << 15)
"""


@pytest.mark.long
@pytest.mark.parametrize("what", ["data", "model"])
def test_run_needing_too_much_memory_is_refused_with_limit(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "large_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    settings = settings_of("large")
    if what == "data":
        settings["evaluation"] = {"data": save_data(tmp_path / "large.npz", 1 << 21)}
    else:
        settings["model"]["device"] = "large_model:build"
    call = local_call("CreateRun", {})
    with pytest.raises(RunError, match=r"needs more than 1,073,741,824 bytes of memory to be checked; use smaller"):
        create_checked(tmp_path / "store", NewRun(settings=settings), call, max_memory_bytes=1 << 30)
    with contextlib.closing(Store.open(tmp_path / "store")) as store:
        assert store.runs.get("large") is None
    assert "Traceback" not in capfd.readouterr().err
