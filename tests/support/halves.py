"""A cohort of device halves in this process: asks and answers go through the wire's encoding, in float32."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from fleetdistill.knowledge import Parts
from fleetdistill.methods.base import Ask, DeviceMethod
from fleetdistill.seeds import derive_seed
from fleetdistill.wire.codec import decode, encode
from fleetdistill_server.engine.cohort import StoreCohort

SEED = 1


def ask_seed(round_number: int, step: str, device: str, nth: int = 1) -> int:
    """Seed of a device's nth ask of a round."""
    return derive_seed(SEED, round_number, step, nth, device)


def server_seed(round_number: int, name: str) -> int:
    """Seed of the server's random numbers for one purpose."""
    return derive_seed(SEED, round_number, name, "server")


class Halves:
    """One round's cohort of device halves that always answer.

    Attributes:
        sent: What each ask brought, in the order of the asks, by device.
    """

    def __init__(self, members: Mapping[str, DeviceMethod], completed: int = 0) -> None:
        self.members = members
        self.round, self.completed = completed + 1, completed
        self.devices = tuple(sorted(members))
        self.remaining = list(self.devices)
        self.sent: list[dict[str, Parts]] = []
        self.events: list[tuple[str, str]] = []
        self.figures: dict[str, Any] = {}

    sample = StoreCohort.sample

    def needed(self, asked: int) -> int:
        return asked

    async def ask(self, step: str, payload: Any, *, to: Sequence[str], **terms: Any) -> AsyncIterator[Any]:
        self.sent.append({device: payload(device) if callable(payload) else payload for device in sorted(to)})
        nth = len(self.sent)
        for device, parts in self.sent[-1].items():
            seed = ask_seed(self.round, step, device, nth)
            torch.manual_seed(seed)
            answer = self.members[device].handle(
                Ask(round=self.round, step=step, seed=seed, parts=decode(encode(parts)))
            )
            parts = decode(encode(answer.parts))
            yield SimpleNamespace(
                device=device, samples=answer.samples, parts=parts, part=lambda name, kind, p=parts: p[name]
            )

    def model_fingerprint(self, device: str) -> str:
        return ""

    def event(self, kind: str, text: str, device: str = "") -> None:
        self.events.append((kind, text))

    def guard(self, name: str, text: str, device: str = "") -> None:
        self.event(f"{name}-guard", text)

    def report(self, name: str, value: Any) -> None:
        self.figures[name] = {**self.figures.get(name, {}), **value} if isinstance(value, dict) else value

    def generator(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(server_seed(self.round, name))
