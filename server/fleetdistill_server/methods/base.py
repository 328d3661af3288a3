"""The server half of a method: one coroutine a round that reads like the paper's pseudocode.

    class FedDKCServer(ServerMethod):
        steps = {"train": {"knowledge": "sample_knowledge"}}
        async def round(self, cohort: Cohort) -> None: ...

A method is deterministic given its state, its answers and the seed tree: after a crash `round` runs again from the
last checkpoint, and asks that have answers yield those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fleetdistill.wire.v1 import contract_pb2

if TYPE_CHECKING:
    from fleetdistill_server.cohort import Cohort


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a server half works with.

    Attributes:
        classes: C of the contract.
        features: Shape of one sample's features by cut, without the batch axis.
        server_model: Builds the server's predictor, or None when the run names none.
        torch_device: Where the server half computes.
        seed: Root of the run's seed tree.
    """

    classes: int
    features: Mapping[str, tuple[int, ...]]
    server_model: torch.nn.Module | None
    torch_device: torch.device
    seed: int


class ServerMethod:
    """Base of all server halves.

    Args:
        config: The method's configuration, complete for the run's number of classes.
        setting: Models, shapes and where to compute.
    """

    steps: ClassVar[Mapping[str, Mapping[str, str]]]
    """For each step: part name to kind, what an answer consists of."""

    def __init__(self, config: Any, setting: Setting) -> None:
        self.config = config
        self.setting = setting

    @staticmethod
    def requirements() -> contract_pb2.Requirements:
        """What every device must fit; data, checked by the front."""
        raise NotImplementedError

    async def round(self, cohort: Cohort) -> None:
        """One round. Changes the method's own state only."""
        raise NotImplementedError

    async def finish(self, cohort: Cohort) -> None:
        """Delivers the end result after the last round; by default there is nothing to deliver."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next round depends on: dicts, lists, numbers, strings and tensors."""
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` gave."""
        raise NotImplementedError

    def export(self) -> tuple[torch.nn.Module, tuple[int, ...]] | None:
        """The server's model for `fleetdistill export`, and the shape of one input; None if it has none."""
        return None
