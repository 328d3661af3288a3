"""The server half of a method: one coroutine a round that reads like the paper's pseudocode.

    class FedDKCServer(ServerMethod):
        @classmethod
        def exchanges(cls, config: Any, sizes: Sizes) -> Sequence[Exchange]:
            return [Exchange(step="train", up={"knowledge": SampleKnowledge.schema(...)})]

        async def round(self, cohort: Cohort) -> None: ...

A method is deterministic given its state, its answers and the seed tree: after a crash `round` runs again from the
last checkpoint, and asks that have answers yield those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fleetdistill.knowledge import ModelParameters, NetworkFile
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.methods.cohort import Cohort, Notes
from fleetdistill_server.methods.context import MethodContext
from fleetdistill_server.methods.traffic import Exchange, Sizes, answer_kinds, columns_of, features_of


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a method needs of the devices and of the run, with some settings.

    Attributes:
        same_architecture: All devices must run one model, [model] device.
        same_extractor: All devices' models must begin with one extractor, [model] extractor.
        proxy_set: Server and devices work with a proxy set.
        server_reads_inputs: [model] server is a whole model over inputs, not a predictor over features.
        server_has_device_model: The server keeps a model like [model] device, whatever the devices run.
    """

    same_architecture: bool = False
    same_extractor: bool = False
    proxy_set: bool = False
    server_reads_inputs: bool = False
    server_has_device_model: bool = False


__all__ = ["ServerMethod"]


class ServerMethod:
    """Base of all server halves.

    What a method is and costs it says before any run: `summary`, and from a configuration `needs` and `exchanges`.
    `fleetdistill methods` shows it, and the contract is made of it.

    Args:
        config: The method's configuration, complete for the run's number of classes.
        context: Models, shapes and where to compute.
    """

    summary: ClassVar[str]
    """What it is, in at most 66 characters and without a full stop: one line of a terminal of 118."""

    recommended: ClassVar[str] = ""
    """When it is the one to take, and its limits, for people who choose: without a last full stop."""

    advice: ClassVar[Mapping[str, str]] = {}
    """For a feature column what to do where a device's has another shape, if that is more than to change the model."""

    picks_devices: ClassVar[bool] = False
    """Whether its rounds ask only those devices that need something, of all that are present.

    In a run without an end its rounds then have everybody present as their cohort, whatever `devices_per_round` says,
    and after the first one a single device is enough for a round: a newcomer that comes alone is served.
    """

    keeps_initial: ClassVar[bool] = False
    """Whether what devices start from (`initial`) is no part of `networks`, and a run that begins with another one's
    model needs that one's: `given_initial`."""

    given_initial: ModelParameters | None = None

    def __init__(self, config: Any, context: MethodContext) -> None:
        self.config = config
        self.context = context

    @classmethod
    def form(cls, config: Any) -> type[ServerMethod]:
        """The server half of this configuration, for a method of several forms."""
        return cls

    @classmethod
    def needs(cls, config: Any) -> Needs:
        """What these settings need of the devices and of the run; by default any device will do."""
        return Needs()

    @classmethod
    def exchanges(cls, config: Any, sizes: Sizes) -> Sequence[Exchange]:
        """What a usual round sends each way, per device: one in which knowledge flows and no guard fires.

        This is the one description of a method's messages. With the sizes of a table bytes follow from it, with those
        of a run (`sizes`) the contract: kinds, columns, shapes. A method whose rounds differ says of each exchange in
        which rounds it is. What only the first round brings (initial weights, the proxy set) and only the end (the
        result) is left out.
        """
        raise NotImplementedError

    def sizes(self) -> Sizes:
        """The sizes of this run, with the tensors of its models and the shapes of its features."""
        return Sizes(classes=self.context.classes)

    def run_exchanges(self) -> Sequence[Exchange]:
        """The exchanges of this run."""
        return self.exchanges(self.config, self.sizes())

    def answer_kinds(self) -> Mapping[str, Mapping[str, str]]:
        """For each step: part name to kind, what an answer consists of."""
        return answer_kinds(self.run_exchanges())

    @classmethod
    def columns(cls, config: Any) -> Sequence[str]:
        """What leaves a device with these settings, in the words of `fleetdistill.COLUMNS`."""
        return columns_of(cls.exchanges(config, Sizes()))

    def requirements(self) -> contract_pb2.Requirements:
        """What every device must fit; data, checked by the front."""
        needs, features = self.needs(self.config), features_of(self.run_exchanges())
        return contract_pb2.Requirements(
            same_architecture=needs.same_architecture,
            same_extractor=needs.same_extractor,
            proxy_set=needs.proxy_set,
            columns=self.columns(self.config),
            advice=[
                contract_pb2.Advice(column=name, text=self.advice[name]) for name in features if name in self.advice
            ],
        )

    def initial(self) -> ModelParameters | None:
        """What every device starts from."""
        return None

    def extractor_file(self) -> NetworkFile | None:
        """The extractor as an ONNX file, for devices without PyTorch; any device of the run may fetch it.

        The same bytes each time, or a store whose copy is damaged cannot be mended.
        """
        return None

    def is_due(self, present: Mapping[str, str]) -> bool:
        """Whether a round with these devices has anything to do. Asked before each round of a run without an end.

        The answer depends on the method's state and on `present` alone, for it is asked again only when one of the two
        has changed. By default there always is something to do.

        Args:
            present: Id to data version, hex, of all devices that are present; empty where a device names none.
        """
        return True

    async def round(self, cohort: Cohort) -> None:
        """One round. Changes the method's own state only."""
        raise NotImplementedError

    async def finish(self, cohort: Cohort) -> None:
        """Delivers the end result after the last round, if there is one; by default there is nothing."""

    def forget(self, device: str, notes: Notes) -> None:
        """Drops what is kept of one device; called between rounds. By default there is nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next round depends on: dicts, lists, numbers, strings and tensors."""
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` gave."""
        raise NotImplementedError

    def networks(self) -> Mapping[str, torch.nn.Module]:
        """What the server half trains, by what it is; another run may begin with it. The first one is the model.

        Two methods may begin with each other's networks of one name, so that name stands for one use of a network.
        """
        return {}

    def global_model(self) -> torch.nn.Module | None:
        """The model that the run is about, inputs to logits, scored after each round; None if there is none."""
        return None

    def export(self) -> tuple[torch.nn.Module, tuple[int, ...]] | None:
        """The server's model for `fleetdistill export`, and the shape of one input; None if it has none."""
        return None
