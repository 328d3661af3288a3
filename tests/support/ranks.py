"""Processes that train together, as torchrun starts them: forked, on the CPU, with gloo."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
from support.driving import DriveDevices
from support.fleets import Prepared
from support.fork_server import forked
from support.processes import PATIENCE_SECONDS
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from fleetdistill.state.state_file import pack_state, unpack_state
from fleetdistill_lab.simulation.spec.device import DeviceSpec, make_device
from fleetdistill_server.config.run_config import RunConfig
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.engine.group import Group, follow
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.service.torchrun import Torchrun
from fleetdistill_server.store.store import Store
from fleetdistill_server.training.hardware import Hardware
from fleetdistill_server.training.ranks import ALONE, ProcessLostError, Ranks
from fleetdistill_server.training.resume import ResumePoints
from fleetdistill_server.training.rows import Pool
from fleetdistill_server.training.trainer import Trainer

ROWS, CLASSES = 37, 3
NETWORKS: Mapping[str, Callable[[], nn.Module]] = {
    "convolutions": lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, CLASSES)),
    "batch-norm": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, CLASSES)
    ),
    "own weights": lambda: _OwnWeights(),
    "shared weights": lambda: _SharedWeights(),
}


class _OwnWeights(nn.Module):
    """Has parameters outside of its layers, one of them a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.tensor(0.5)), nn.Linear(32, CLASSES)
        self.offset = nn.Parameter(torch.zeros(CLASSES))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs.flatten(1)) * self.scale + self.offset


class _SharedWeights(nn.Module):
    """Has two layers with the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, CLASSES)
        self.second.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.second(self.first(inputs.flatten(1)).relu()).relu())


class Killed(Exception):
    """Stands for the death of the engine."""


class OnePoint:
    """Storage of resume points in memory."""

    def __init__(self, point: tuple[str, Any] | None = None) -> None:
        self.point = point

    def save(self, key: str, state: Any) -> None:
        self.point = key, unpack_state(pack_state(state))

    def load(self, key: str) -> Any | None:
        return self.point[1] if self.point is not None and self.point[0] == key else None

    def clear(self) -> None:
        self.point = None


def trained(
    name: str,
    ranks: Ranks = ALONE,
    *,
    fails: bool = False,
    dies_at: int = 0,
    storage: OnePoint | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Weights and mean loss after two epochs in mini-batches of eight; the last has five rows.

    Args:
        name: Name of the network; with `whole ` before it, the loss is a norm over the mini-batch.
        ranks: The processes.
        fails: Whether this process once runs out of memory.
        dies_at: The step in which Killed is raised; 0 for none.
        storage: Receives a resume point after each mini-batch; None for no resume points.
        settings: Further arguments of `Hardware`.
    """
    torch.manual_seed(0)
    whole = name.startswith("whole ")
    model = NETWORKS[name.removeprefix("whole ")]()
    drawn = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(ROWS, 2, 4, 4, generator=drawn), torch.randint(0, CLASSES, (ROWS,), generator=drawn)
    points = None if storage is None else ResumePoints(storage, 1e-9)
    trainer = Trainer(Hardware(device=torch.device("cpu"), **settings), points=points, ranks=ranks)
    failures, steps, held = iter([fails]), itertools.count(1), 0

    def losses(epoch: int, rows: Tensor, read: Tensor) -> list[Tensor]:
        nonlocal held
        if points is not None:
            points.wait()
        if next(steps) == dies_at:
            raise Killed
        held = max(held, _held(model, optimizer))
        if next(failures, False):
            raise torch.OutOfMemoryError("CUDA out of memory")
        logits = model(read)
        return [logits.norm() if whole else functional.cross_entropy(logits, labels[rows])]

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    report = trainer.train_steps(
        model,
        ROWS,
        epochs=2,
        batch_size=8,
        optimizer=optimizer,
        losses=losses,
        generator=torch.Generator().manual_seed(2),
        pool=Pool([inputs[:10], inputs[10:]], trainer.hardware),
        separable=not whole,
    )
    momentum = {str(number): one["momentum_buffer"] for number, one in optimizer.state_dict()["state"].items()}
    result = {"held": held, "steps": next(steps) - 1}
    return {
        **result,
        "model": model.state_dict(),
        "momentum": momentum,
        "loss": report.mean_loss,
        "draw": torch.rand(3),
    }


def _held(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Number of weights and momenta in this process."""
    weights = {*model.parameters(), *optimizer.param_groups[0]["params"]}
    momenta = [value for state in optimizer.state.values() for value in state.values()]
    return sum((item.to_local() if isinstance(item, DTensor) else item).numel() for item in (*weights, *momenta))


def run_rank(points: str, rank: int, size: int, rendezvous: str, target: Callable[..., None], *args: Any) -> None:
    """Joins the other processes and calls the target with the group."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= Torchrun(size, Path(rendezvous)).environment()
    group = Group()
    target(group, *args)
    group.leave()
    sys.exit(0)


def save_trained(group: Group, out: Path, cases: Sequence[tuple[str, int, Mapping[str, Any]]]) -> None:
    """Trains each network and writes the results; the process of rank `failing` runs out of memory once.

    Each case also has further arguments of `Hardware`.
    """
    for number, (name, failing, settings) in enumerate(cases):
        result = trained(name, group.ranks, fails=group.ranks.rank == failing, **settings)
        (out / f"{number} {group.ranks.rank}").write_bytes(pack_state(result))


def save_resumed(group: Group, out: Path, name: str, settings: Mapping[str, Any]) -> None:
    """Trains until the eighth step, and again from its resume point; writes that point and the results."""
    first = group.ranks.rank == 0
    storage = OnePoint() if first else None
    with suppress(Killed):
        trained(name, group.ranks, dies_at=8, storage=storage, **settings)
    if storage is not None and storage.point is not None:
        key, state = storage.point
        (out / "point").write_bytes(pack_state({"key": key, "state": state}))
    result = trained(name, group.ranks, storage=storage, **settings)
    (out / f"{group.ranks.rank}").write_bytes(pack_state(result))


def save_error(group: Group, out: Path) -> None:
    """The second process ends in its third step; the first writes the error that it gets."""
    try:
        trained("convolutions", group.ranks, dies_at=3 if group.ranks.rank else 0)
    except Killed:
        os._exit(0)
    except ProcessLostError as error:
        (out / "error").write_text(str(error))


def start_ranks(size: int, target: Callable[..., None], *args: Any) -> list[ForkServerProcess]:
    """Starts processes that call the target with their group."""
    rendezvous = tempfile.mkdtemp()
    return [forked(run_rank, "", rank, size, rendezvous, target, *args) for rank in range(size)]


def join_all(processes: list[ForkServerProcess]) -> None:
    """Waits until all processes have ended without an error."""
    for process in processes:
        process.join(PATIENCE_SECONDS)
    assert [process.exitcode for process in processes] == [0] * len(processes)


def run_fleets(group: Group, fleets: Sequence[Prepared]) -> None:
    """Runs prepared fleets one after the other: rank 0 has the engine and the devices, the others follow."""
    for config, specs, _ in fleets:
        store = Store.open(Path(config.server.store))
        if group.ranks.rank == 0:
            _lead(group, store, config, specs)
        else:
            follow(group, store, config)
        store.close()


def _lead(group: Group, store: Store, config: RunConfig, specs: Sequence[DeviceSpec]) -> None:
    with ExitStack() as stack:
        link = MemoryLink(DeviceApi(store))
        devices = [stack.enter_context(make_device(spec, link)) for spec in specs]
        asyncio.run(Engine(store, config, DriveDevices(devices, lambda: None), group=group).run())
    group.send(None)
