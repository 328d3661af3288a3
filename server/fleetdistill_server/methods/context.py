"""Context of a server half: shapes, seeds, and models whose initial weights are derived from the run's seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from fleetdistill.errors import ConfigurationError
from fleetdistill.models import RECOMMENDED, build_model
from fleetdistill.seeds import derive_seed
from fleetdistill_server.config.run_config import ModelSection
from fleetdistill_server.models import SERVER_MODELS, build_server_model
from fleetdistill_server.training.evaluation import first_of_each_class, load_evaluation
from fleetdistill_server.training.hardware import Hardware
from fleetdistill_server.training.trainer import Trainer

if TYPE_CHECKING:
    from fleetdistill.training.local_training import TensorData
    from fleetdistill.wire.codec import Payload

__all__ = ["MethodContext", "pick_torch_device"]

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
