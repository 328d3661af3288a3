"""The counting method, server half: its state is the list of all answers that it has ever used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from chaos import counting

from fleetdistill.knowledge import Kind, ModelParameters, Plan, SampleKnowledge
from fleetdistill.seeds import derive_seed
from fleetdistill_server import methods
from fleetdistill_server.methods.base import MethodContext, ServerMethod
from fleetdistill_server.methods.cohort import Cohort
from fleetdistill_server.methods.traffic import Exchange, Sizes


class CountingServer(ServerMethod):
    """Uses every answer by writing down whose it was."""

    summary = "counts answers, for tests"

    def __init__(self, config: Any, context: MethodContext) -> None:
        super().__init__(config, context)
        self.used: list[list[Any]] = []

    @classmethod
    def exchanges(cls, config: Any, sizes: Sizes) -> Sequence[Exchange]:
        rows = SampleKnowledge.schema(rows=sizes.samples, features={counting.BALLAST: (counting.WIDTH,)})
        return [Exchange(step="count", up={"count": rows}, times=config.steps)]

    async def round(self, cohort: Cohort) -> None:
        for step in range(1, self.config.steps + 1):
            async for answer in cohort.ask("count", self._parts(cohort.round, step)):
                self.used.append([answer.device, cohort.round, step, counting.digest_of(answer.parts)])

    def _parts(self, number: int, step: int) -> Mapping[str, Kind]:
        """A plan, and in every second round something large to fetch."""
        plan = Plan(values={"round": number, "step": step})
        if number % 2:
            return {"plan": plan}
        rng = np.random.default_rng(derive_seed(self.context.seed, number, "ballast", step))
        ballast = rng.random(self.config.ballast_bytes // 4, np.float32)
        return {"plan": plan, "ballast": ModelParameters(parameters={"ballast": ballast})}

    def state_dict(self) -> dict[str, Any]:
        return {"used": self.used}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.used = list(state["used"])


def register() -> None:
    """Adds both halves to this process."""
    counting.register()
    methods.register(counting.NAME, CountingServer)
