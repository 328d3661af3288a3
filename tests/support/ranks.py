"""Processes that train together, as torchrun starts them: forked, on the CPU, with gloo."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
from support.driving import DriveDevices
from support.fleets import Prepared
from support.fork_server import forked
from support.processes import PATIENCE_SECONDS
from torch import Tensor, nn
from torch.nn import functional

from fleetdistill.state.state_file import pack_state
from fleetdistill_server.config.run_config import RunConfig
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.engine.group import Group, follow
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.service.torchrun import Torchrun
from fleetdistill_server.simulation.links.memory_link import MemoryLink
from fleetdistill_server.simulation.spec.device import DeviceSpec, make_device
from fleetdistill_server.store.store import Store
from fleetdistill_server.training.hardware import Hardware
from fleetdistill_server.training.ranks import ALONE, Ranks
from fleetdistill_server.training.rows import Pool
from fleetdistill_server.training.trainer import Trainer

ROWS, CLASSES = 37, 3
NETWORKS: Mapping[str, Callable[[], nn.Module]] = {
    "convolutions": lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, CLASSES)),
    "batch-norm": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, CLASSES)
    ),
    "unused": lambda: nn.Sequential(nn.Flatten(), nn.Linear(32, CLASSES), nn.Identity()),
}


def trained(name: str, ranks: Ranks = ALONE, *, fails: bool = False, **settings: Any) -> dict[str, Any]:
    """Weights and mean loss after two epochs in mini-batches of eight; the last has five rows.

    Args:
        name: Name of the network; with `whole ` before it, the loss is a norm over the mini-batch.
        ranks: The processes.
        fails: Whether this process once runs out of memory.
        settings: Further arguments of `Hardware`.
    """
    torch.manual_seed(0)
    whole = name.startswith("whole ")
    model = NETWORKS[name.removeprefix("whole ")]()
    drawn = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(ROWS, 2, 4, 4, generator=drawn), torch.randint(0, CLASSES, (ROWS,), generator=drawn)
    trainer = Trainer(Hardware(device=torch.device("cpu"), **settings), ranks=ranks)
    failures = iter([fails])

    def losses(epoch: int, rows: Tensor, read: Tensor) -> list[Tensor]:
        if next(failures, False):
            raise torch.OutOfMemoryError("CUDA out of memory")
        logits = model(read)
        return [logits.norm() if whole else functional.cross_entropy(logits, labels[rows])]

    report = trainer.train_steps(
        model,
        ROWS,
        epochs=2,
        batch_size=8,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        losses=losses,
        generator=torch.Generator().manual_seed(2),
        pool=Pool([inputs[:10], inputs[10:]], trainer.hardware),
        separable=not whole,
    )
    return {"model": model.state_dict(), "loss": report.mean_loss, "draw": torch.rand(3)}


def run_rank(points: str, rank: int, size: int, rendezvous: str, target: Callable[..., None], *args: Any) -> None:
    """Joins the other processes and calls the target with the group."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= Torchrun(size, Path(rendezvous)).environment()
    group = Group()
    target(group, *args)
    group.leave()
    sys.exit(0)


def save_trained(group: Group, out: Path, cases: Sequence[tuple[str, int]]) -> None:
    """Trains each network and writes the results; the process of rank `failing` runs out of memory once."""
    for name, failing in cases:
        found = trained(name, group.ranks, fails=group.ranks.rank == failing)
        (out / f"{name} {failing} {group.ranks.rank}").write_bytes(pack_state(found))


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
