"""Rounds in which some answers belong to an ask of an earlier round, as in a run with buffered rounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fleetdistill_server.methods.base import ServerMethod
from fleetdistill_server.methods.cohort import DeviceAnswer, PayloadFor, Prepare
from fleetdistill_server.testing import FakeCohort, Member


class _StaleCohort(FakeCohort):
    def __init__(self, members: Mapping[str, Member], decays: Mapping[str, float]) -> None:
        super().__init__(members)
        self._decays = decays

    async def ask(
        self, step: str, payload: PayloadFor = None, *, prepare: Prepare | None = None, **terms: Any
    ) -> AsyncIterator[DeviceAnswer]:
        async for answer in super().ask(step, payload, **terms):
            if answer.device in self._decays:
                answer.staleness, answer.decay = 3, self._decays[answer.device]
            answer.prepared = None if prepare is None else prepare(answer)
            yield answer


def run_stale_round(server: ServerMethod, members: Mapping[str, Member], decays: Mapping[str, float]) -> FakeCohort:
    """A round whose answers of some devices are three rounds old, with the factors of their weights."""
    cohort = _StaleCohort(members, decays)
    asyncio.run(server.round(cohort))
    return cohort
