"""The engine's processes that train together, started by torchrun.

The process of rank 0 is the engine. The others follow it: in each round they load the same state, receive the same
answers and run the same server half, so that they take part in its trainings (`training/ranks.py`). They read the
store's payloads and write nothing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from fleetdistill.errors import ConfigurationError, QuorumNotReached
from fleetdistill.seeds import derive_seed
from fleetdistill.state.state_file import unpack_state
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.config.run_config import RunConfig
from fleetdistill_server.engine.contract import build_method
from fleetdistill_server.methods.cohort import (
    ColumnsFor,
    DeviceAnswer,
    PayloadFor,
    Prepare,
    devices_needed,
    round_generator,
    sample_devices,
)
from fleetdistill_server.service.torchrun import RENDEZVOUS
from fleetdistill_server.store.store import Store
from fleetdistill_server.training.ranks import JoinedRanks, connect

_NO_TIMEOUT = timedelta(days=3650)
"""The engine may wait for devices for months."""


@dataclass(frozen=True)
class Round:
    """What a follower needs to know of a round.

    Attributes:
        number, completed, devices, data_versions: As in `Cohort`.
        checkpoint: Digest of the state that the round starts from.
    """

    number: int
    completed: int
    devices: Sequence[str]
    data_versions: Mapping[str, str]
    checkpoint: bytes


@dataclass(frozen=True)
class PassedAnswer:
    """An answer that the engine passes to the method."""

    device: str
    samples: int
    digest: bytes
    staleness: int
    decay: float


@dataclass(frozen=True)
class EndOfStep:
    """The end of a step: the devices that remain in the round, and QuorumNotReached's arguments if too few answered."""

    remaining: Sequence[str]
    quorum_missed: tuple[str, int, int] | None = None


def joins() -> bool:
    """Returns whether torchrun started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


class Group:
    """The processes of one engine.

    Attributes:
        ranks: Takes part in trainings.
    """

    def __init__(self) -> None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if torch.cuda.is_available():
            if device.index >= torch.cuda.device_count():
                raise ConfigurationError(
                    f"[engine] processes: process {device.index + 1} has no GPU; this machine has "
                    f"{torch.cuda.device_count()}"
                )
            torch.cuda.set_device(device)
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            init_method=f"file://{Path(os.environ[RENDEZVOUS]).absolute() / 'ranks'}",  # PyTorch does not decode %20
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )
        self._messages: Any = distributed.new_group(backend="gloo", timeout=_NO_TIMEOUT)
        self.ranks = JoinedRanks()

    def send(self, message: Any) -> None:
        """Sends a message to all followers."""
        with connect():
            distributed.broadcast_object_list([message], src=0, group=self._messages, device=torch.device("cpu"))

    def receive(self) -> Any:
        """Waits for a message of the engine."""
        result = [None]
        with connect():
            distributed.broadcast_object_list(result, src=0, group=self._messages, device=torch.device("cpu"))
        return result[0]

    def leave(self) -> None:
        """Ends the connections."""
        distributed.destroy_process_group()


def follow(group: Group, store: Store, config: RunConfig) -> None:
    """Runs every round that the engine runs; returns when the engine ends."""
    torch.set_num_threads(config.run.threads)
    method = build_method(config)
    method.context.trainer.ranks = group.ranks
    while (begun := group.receive()) is not None:
        contract = contract_pb2.Contract.FromString(store.runs.existing(config.run.name).contract)
        method.extractor_digest = contract.extractor_file
        method.load_state_dict(unpack_state(store.blobs.get_state(begun.checkpoint)))
        torch.manual_seed(derive_seed(config.run.seed, begun.number, "round", "server"))
        cohort = FollowingCohort(group, store, config, begun)
        try:
            asyncio.run(method.round(cohort))
        except QuorumNotReached:  # the engine ends the round as short
            continue


class FollowingCohort:
    """The `Cohort` of a follower: the answers come from the engine, and nothing is written."""

    def __init__(self, group: Group, store: Store, config: RunConfig, begun: Round) -> None:
        self.round, self.completed = begun.number, begun.completed
        self.devices = tuple(begun.devices)
        self.data_versions = dict(begun.data_versions)
        self.remaining: list[str] = sorted(begun.devices)
        self._group = group
        self._store = store
        self._run = config.run

    async def ask(
        self,
        step: str,
        payload: PayloadFor = None,
        *,
        to: Sequence[str] | None = None,
        quorum: float | None = None,
        columns: ColumnsFor | None = None,
        prepare: Prepare | None = None,
    ) -> AsyncIterator[DeviceAnswer]:
        """Yields the answers that the engine yields."""
        while isinstance(message := self._group.receive(), PassedAnswer):
            answer = DeviceAnswer(message.device, message.samples, self._store.blobs.open(message.digest))
            answer.staleness, answer.decay = message.staleness, message.decay
            answer.prepared = None if prepare is None else prepare(answer)
            yield answer
        self.remaining = list(message.remaining)
        if message.quorum_missed is not None:
            raise QuorumNotReached(*message.quorum_missed)

    def declined(self, step: str) -> Mapping[str, str]:
        """Returns the same reasons as the engine, which has ended the step."""
        return self._store.history.declined(self._run.name, self.round, step)

    async def deliver(self, payload: PayloadFor, *, step: str = "deliver") -> None:
        """Waits until the engine has delivered."""
        async for _ in self.ask(step, payload, quorum=0.0):
            pass

    def needed(self, asked: int, quorum: float | None = None) -> int:
        """Returns how many of `asked` devices must answer under `quorum`, which defaults to the run's quorum."""
        return devices_needed(asked, self._run.quorum if quorum is None else quorum)

    def sample(self, ratio: float) -> list[str]:
        """Draws the same devices as the engine."""
        return sample_devices(self.devices, ratio, self.generator("participants"))

    def model_fingerprint(self, device: str) -> str:
        """Returns the fingerprint that a device reported for its model."""
        known_device = self._store.devices.get(self._run.name, device)
        assert known_device is not None  # every device of the cohort has checked in
        return contract_pb2.DeviceProfile.FromString(known_device.profile).model_fingerprint

    def generator(self, name: str) -> torch.Generator:
        """Returns the same generator as the engine's."""
        return round_generator(self._run.seed, self.round, name)

    def event(self, kind: str, text: str, device: str = "", *, once: bool = False) -> None:
        """Does nothing; the engine adds the event."""

    def guard(self, name: str, text: str, device: str = "") -> None:
        """Does nothing; the engine adds the event."""

    def report(self, name: str, value: Any) -> None:
        """Does nothing; the engine adds the figure."""
