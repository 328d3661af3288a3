"""Base class of a method's server half: one coroutine per round that reads like the paper's pseudocode.

    class FedDKCServer(ServerMethod):
        @classmethod
        def exchanges(cls, config: Any, sizes: Sizes) -> Sequence[Exchange]:
            return [Exchange(step="train", up={"knowledge": SampleKnowledge.schema(...)})]

        async def round(self, cohort: Cohort) -> None: ...

A method must be deterministic given its state, the answers and the seed tree. After a crash `round` runs again from the
last checkpoint, and asks that were answered before the crash yield the stored answers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import nn

from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import ModelParameters, NetworkFile, Parts
from fleetdistill.models import RECOMMENDED, build_model
from fleetdistill.seeds import derive_seed
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.config.run_config import ModelSection
from fleetdistill_server.figures import Figure
from fleetdistill_server.methods.cohort import Cohort, Notes
from fleetdistill_server.methods.traffic import Exchange, Sizes, answer_kinds, columns_of, features_of
from fleetdistill_server.models import SERVER_MODELS, build_server_model
from fleetdistill_server.training.evaluation import first_of_each_class, load_evaluation
from fleetdistill_server.training.hardware import Hardware
from fleetdistill_server.training.trainer import Trainer

if TYPE_CHECKING:
    from fleetdistill.training.local_training import TensorData
    from fleetdistill.wire.codec import Payload

__all__ = ["MethodContext", "Needs", "ServerMethod", "pick_torch_device"]

G = TypeVar("G", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class MethodContext:
    """The run's properties that a server half uses.

    Attributes:
        classes: Number of classes C of the contract.
        input_shape: Shape of one input.
        models: Names of the models, from [model].
        torch_device: Device that the server half computes on.
        seed: Root of the run's seed tree.
        knowledge_type: Element type of knowledge on the wire: float16, float32 or uint8.
        proxy: The labelled proxy set, or None if the run does not use one.
        proxy_payload: The proxy set in the form that devices download.
        evaluation_file: Path of the operator's labelled data, as set in `[evaluation] data`; empty if not set.
        trusted_rows: Number of rows per class of the operator's data that are used to screen devices' statistics.
        run: Name of the run.
        class_names: Names of the classes in label order.
        authorities_file: Path of the accepted CAs' certificates, PEM; empty without TLS.
        trainer: Trains and applies the server's networks; by default on `torch_device` in float32.
    """

    classes: int
    input_shape: tuple[int, ...]
    models: ModelSection
    torch_device: torch.device
    seed: int
    knowledge_type: str = "float16"
    proxy: TensorData | None = None
    proxy_payload: Payload | None = None
    evaluation_file: str = ""
    trusted_rows: int = 5
    run: str = ""
    class_names: tuple[str, ...] = ()
    authorities_file: str = ""
    trainer: Trainer = field(default=None)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.trainer is None:
            object.__setattr__(self, "trainer", Trainer(Hardware(device=self.torch_device)))

    def trusted_data(self) -> TensorData | None:
        """Returns the first `trusted_rows` rows of each class of the operator's data, or None.

        Raises:
            ConfigurationError: The file is unreadable.
        """
        if not self.evaluation_file or not self.trusted_rows:
            return None
        return first_of_each_class(load_evaluation(self.evaluation_file, self.classes), self.trusted_rows)

    @property
    def proxy_digest(self) -> bytes:
        """SHA-256 digest of the proxy set; empty if there is none."""
        return self.proxy_payload.sha256 if self.proxy_payload is not None else b""

    def extractor(self) -> nn.Module:
        """Builds the extractor that every device starts from, as set in `[model] extractor`, with its weights."""
        name, weights = self.models.extractor, self.models.extractor_weights or RECOMMENDED
        options = {"weights": weights} if self.models.has_library_extractor else {}
        build = lambda: build_model(name, input_shape=self.input_shape, **options)  # noqa: E731
        return self._seeded("initial extractor", build, "extractor")

    def device_model(self) -> nn.Module:
        """Builds the model that all devices run, as set in `[model] device`.

        Raises:
            ConfigurationError: `[model] device` is not set.
        """
        name = self.models.device
        if not name:
            raise ConfigurationError("this method needs one model for all devices; set [model] device")
        build = lambda: build_model(name, input_shape=self.input_shape, classes=self.classes)  # noqa: E731
        return self._seeded("initial model", build, "device")

    def server_model(self, feature_shape: tuple[int, ...]) -> nn.Module:
        """Builds the server's predictor, which maps features to logits, as set in `[model] server`."""
        name = self.models.server
        build = lambda: build_server_model(name, feature_shape=feature_shape, classes=self.classes)  # noqa: E731
        return self._seeded("server model", build, "server")

    def global_model(self) -> nn.Module:
        """Builds the server's model of inputs: `[model] server`, or `[model] device` if that one takes features.

        Raises:
            ConfigurationError: Neither setting names a model that reads inputs.
        """
        name = self.models.device if self.models.server in SERVER_MODELS else self.models.server
        if not name:
            raise ConfigurationError(
                f"[model] server is {self.models.server!r}, which reads features; this method needs a model that reads "
                "inputs. Name one of the device models"
            )
        build = lambda: build_model(name, input_shape=self.input_shape, classes=self.classes)  # noqa: E731
        return self._seeded("global model", build, "server")

    def generator(self, build: Callable[[], G]) -> G:
        """Builds a method's generator with weights drawn from the run's seed."""
        return self._seeded("initial generator", build)

    def _seeded(self, name: str, build: Callable[[], G], setting: str = "") -> G:
        torch.manual_seed(derive_seed(self.seed, 0, name, "server"))
        try:
            return build()
        except ConfigurationError as error:
            raise ConfigurationError(f"[model] {setting}: {error}" if setting else str(error)) from error


def pick_torch_device(name: str) -> torch.device:
    """Returns the named torch device; `auto` is CUDA if it is available, else the CPU.

    Raises:
        ConfigurationError: The name is unknown to torch, or this machine has no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch raises AssertionError if it was built without CUDA
        raise ConfigurationError(f"[server] torch_device: {name!r} cannot be used here: {error}") from error
    return device


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a method with given settings requires of the devices and the run.

    Attributes:
        same_architecture: All devices run the same model, as set in `[model] device`.
        same_extractor: All devices' models begin with the same extractor, as set in `[model] extractor`.
        proxy_set: Server and devices use a proxy set.
        server_proxy_set: The server uses a proxy set; devices do not download it.
        server_reads_inputs: `[model] server` must name a complete model, which reads inputs and not features.
        server_has_device_model: The server has a model of its own as set in `[model] device`, whichever models the
            devices run.
        min_devices: Fewest devices with which a first round has a result; it waits for them.
    """

    same_architecture: bool = False
    same_extractor: bool = False
    proxy_set: bool = False
    server_proxy_set: bool = False
    server_reads_inputs: bool = False
    server_has_device_model: bool = False
    min_devices: int = 1


class ServerMethod:
    """Base of all server halves.

    `summary`, `needs` and `exchanges` describe a method without a run. `fleetdistill methods` shows them, and the
    contract is derived from them.

    Args:
        config: The method's configuration, with the defaults that depend on the number of classes.
        context: Models, shapes, seeds and the compute device.
    """

    summary: ClassVar[str]
    """One-line description, at most 57 characters, without a full stop."""

    recommended: ClassVar[str] = ""
    """When to choose this method, and its limits; without a final full stop."""

    advice: ClassVar[Mapping[str, str]] = {}
    """Advice for devices whose features have a wrong shape, by feature column; by default to change the model."""

    figures: ClassVar[Mapping[str, Figure]] = {}
    """Figures that this class reports with `Notes.report` and that are shown, by name; others are only stored."""

    picks_devices: ClassVar[bool] = False
    """Whether rounds ask only the devices that have something to send or to receive.

    If True, each round of a run without an end has all present devices as its cohort, whatever `devices_per_round` is,
    and after the first round a single present device is enough to start one.
    """

    keeps_short_rounds: ClassVar[bool] = False
    """Whether the state that a short round leaves is kept, not that from before the round.

    For methods whose devices cannot give the same answers in another round.
    """

    keeps_initial: ClassVar[bool] = False
    """Whether `initial` is not part of `networks`; a run with `start_from` then takes it from the earlier run."""

    extractor_digest: bytes = b""
    """SHA-256 of the run's extractor file, as in its contract; set by the engine."""

    given_initial: ModelParameters | None = None
    """The earlier run's `initial` in a run with `start_from`; used if `keeps_initial` is True."""

    def __init__(self, config: Any, context: MethodContext) -> None:
        self.config = config
        self.context = context

    @classmethod
    def needs(cls, config: Any) -> Needs:
        """Returns what these settings require of the devices and the run; by default nothing."""
        return Needs()

    @classmethod
    def exchanges(cls, config: Any, sizes: Sizes) -> Sequence[Exchange]:
        """Returns the messages of one device in a typical round: it has knowledge to send, and no guard fires.

        This is the only description of a method's messages. Byte counts, and the contract's kinds, columns and shapes,
        are derived from it. If rounds differ, each exchange states its rounds. Do not include messages of the first
        round only (initial weights, the proxy set), or the result after the last round.

        Args:
            config: The method's configuration.
            sizes: Sizes of a run (`self.sizes()`), or example sizes for the table of methods.
        """
        raise NotImplementedError

    def sizes(self) -> Sizes:
        """Returns the sizes of this run: the tensors of its models and the shapes of its features."""
        return Sizes(classes=self.context.classes)

    def run_exchanges(self) -> Sequence[Exchange]:
        """Returns the exchanges of this run."""
        return self.exchanges(self.config, self.sizes())

    def answer_kinds(self) -> Mapping[str, Mapping[str, str]]:
        """Returns for each step the parts of its answer, as part name to kind."""
        return answer_kinds(self.run_exchanges())

    @classmethod
    def columns(cls, config: Any) -> Sequence[str]:
        """Returns the kinds of data that leave a device with these settings, as names in `fleetdistill.COLUMNS`."""
        return columns_of(cls.exchanges(config, Sizes()))

    def requirements(self) -> contract_pb2.Requirements:
        """Returns the contract's requirements, which the front checks for each device."""
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
        """Returns the parameters that every device starts from, or None if each starts from its own."""
        return None

    def extractor_file(self) -> NetworkFile | None:
        """Returns the extractor as an ONNX file for devices without PyTorch, or None if there is none.

        Must return the same bytes each time; the engine uses it to restore a damaged copy in the store.

        Raises:
            ConfigurationError: There should be one, but it cannot be exported.
        """
        return None

    def update_present(self, present: Collection[str]) -> None:
        """Notices which devices are present, also while they are too few for a round; by default does nothing.

        The engine calls this between the rounds of a run without an end: when the devices or the method's state have
        changed, and every ten seconds.

        Args:
            present: Ids of all present devices.
        """

    def is_due(self, present: Mapping[str, str]) -> bool:
        """Returns whether a round with the present devices has work to do; by default True.

        The engine calls this after `update_present`, in a run without an end with enough devices for a round. `present`
        lacks devices that were late repeatedly, if the others alone make a round due.

        Args:
            present: Data version by id of all present devices, hexadecimal; empty if a device reports none.
        """
        return True

    def known_extractor(self, name: str, received: Parts) -> torch.nn.Module | None:
        """Returns the extractor of the features that a device sends, as far as the server knows it; by default None.

        `fleetdistill audit` attacks the features with it, so use the latest weights that the server has.

        Args:
            name: Name of a feature column, or of a part with class statistics or a class table.
            received: Parts of the ask that the device answers.
        """
        return None

    async def round(self, cohort: Cohort) -> None:
        """Runs one round. Must change the method's own state only."""
        raise NotImplementedError

    async def finish(self, cohort: Cohort) -> None:
        """Delivers the final result after the last round; by default does nothing."""

    def forget(self, device: str, notes: Notes) -> None:
        """Deletes one device's part of the state; called between rounds. By default does nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that the next round depends on, as dicts, lists, numbers, strings and tensors."""
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state that `state_dict` returned."""
        raise NotImplementedError

    def networks(self) -> Mapping[str, torch.nn.Module]:
        """Returns the networks that the server half trains, by role; the first one is the model.

        A later run can start from them (`start_from`). Methods share role names, so use a name for one role only.
        """
        return {}

    def global_model(self) -> torch.nn.Module | None:
        """Returns the global model, which maps inputs to logits and is scored after each round; None by default."""
        return None

    @property
    def has_global_model(self) -> bool:
        """Whether `global_model` returns a model once a round is complete; by default, whether it is overridden."""
        return type(self).global_model is not ServerMethod.global_model

    def export(self) -> tuple[torch.nn.Module, tuple[int, ...]] | None:
        """Returns the server's model for `fleetdistill export` and the shape of one input; None if there is none."""
        return None
