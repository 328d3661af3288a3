"""What to simulate: the settings of a simulated fleet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy.typing as npt

from fleetdistill.models import path_of
from fleetdistill_server.config.run_config import checked_settings
from fleetdistill_server.simulation.data.datasets import Dataset
from fleetdistill_server.simulation.data.own import Arrays, own_dataset

Factory = Callable[..., Any]
"""Makes a torch module."""
CONTROL_ROUNDS = 30
"""Rounds of the controls of a method that itself needs one."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What to simulate.

    Raises:
        ConfigurationError: A function is not at the top level of a module.
        DataError: Arrays of your own are no data set.

    Attributes:
        method: Name of the method.
        modules: Modules to import, which register methods of your own. Over gRPC the processes of server and devices
            import them too. A method that this process has registered needs none.
        settings: The method's settings, as under [method] in run.toml.
        dataset: A name in `datasets.DATASETS`, or data of your own: a `Dataset`, or arrays as `own_dataset` takes them.
            A simulation of your own data keeps them in its folder.
        data_dir: Where the data sets lie; see `load_dataset`.
        image_size: Pixels a side that the images are averaged down to; None for their own.
        train_limit: At most this many training images in the whole fleet.
        test_limit: At most this many test images, a stratified part.
        devices: Number of devices.
        models: Device models, dealt out in turn; by default five different ones that fit the data set. Names,
            `package.module:factory`, or functions at the top level of a module, of (input_shape, classes).
        extractor: What the device models begin with, for methods that have features: likewise, of (input_shape). By
            default the one of the built-in models that fit the data set.
        server_model: The server's model, for methods that train one: likewise, of (feature_shape, classes), or of
            (input_shape, classes) where it reads inputs.
        partition: Kind of the partition over devices, a name in `partition.PARTITIONS`.
        alpha: Concentration of the Dirichlet partitions.
        classes_per_device: Classes of each device, for the partitions that hold some classes only.
        proxy_per_class: Training images of each class, the last ones, that become the proxy set before the others are
            dealt out. None means 8, or half of a class of fewer than 16, for a method that needs a proxy set and 0 for
            the others; a number holds as many out for any method, so that methods compare on the same data.
        validation_share: Share of each device's samples, in [0, 1), that is held out as its validation data: its model
            is replaced only where the accuracy on them does not fall. Stratified; every class keeps a sample to train
            on. 0 for none: every round's model is taken.
        predictors: Names in `fleetdistill.models.PREDICTORS`, dealt out in turn, for class statistics with
            `predictor = "trained"`; by default all of them.
        hostile: How many of the devices, the first ones, are hostile.
        attack: What they do, a name in `hostile.ATTACKS`.
        rounds: Rounds to complete; None for the method's usual number, 30 or, where it has one exchange, 1.
        control_rounds: Rounds that devices train alone, and of FedAvg. None for as many as the method's, but at least
            30 beside a method of one exchange: whoever does not exchange can train for as long as they like.
        seed: Decides partition, models, batches and everything else.
        link: `memory` or `grpc`.
        threads: Threads of every handler.
        knowledge_type: float16, float32 or uint8 on the wire.
        torch_device: Where the server half computes: auto, cpu, cuda.
        out: Folder for report.json, the figure and the models; its folder `work` is made anew.
        with_alone: Train every device alone too.
        with_fedavg: Run FedAvg on the same data too, over memory: the device models' largest on every device, as many
            local passes over the labels as the method makes, and FedAvg's other defaults.
    """

    method: str = "feddkc"
    modules: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    dataset: str | Dataset | Arrays | tuple[npt.ArrayLike, npt.ArrayLike] = "digits"
    data_dir: Path | None = None
    image_size: int | None = None
    train_limit: int | None = None
    test_limit: int | None = None
    devices: int = 5
    models: Sequence[str | Factory] = ()
    extractor: str | Factory = ""
    server_model: str | Factory = ""
    predictors: tuple[str, ...] = ()
    partition: str = "dirichlet_by_class"
    alpha: float = 0.5
    classes_per_device: int = 2
    proxy_per_class: int | None = None
    validation_share: float = 0.0
    hostile: int = 0
    attack: str = ""
    rounds: int | None = None
    control_rounds: int | None = None
    seed: int = 0
    link: Literal["memory", "grpc"] = "memory"
    threads: int = 1
    knowledge_type: Literal["float16", "float32", "uint8"] = "float16"
    torch_device: str = "auto"
    out: Path = Path("out/simulation")
    with_alone: bool = True
    with_fedavg: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.dataset, str | Dataset):
            object.__setattr__(self, "dataset", own_dataset(self.dataset))
        object.__setattr__(self, "models", tuple(path_of(one) for one in self.models))
        object.__setattr__(self, "extractor", path_of(self.extractor))
        object.__setattr__(self, "server_model", path_of(self.server_model))

    @property
    def model_paths(self) -> tuple[str, ...]:
        """`models`, each as a name or path."""
        return tuple(path_of(one) for one in self.models)

    def configuration(self) -> Any:
        """The method's configuration, before the number of classes is known.

        Raises:
            ConfigurationError: The method or a setting is unknown, or out of range.
        """
        return checked_settings(self.method, self.settings)

    @property
    def one_exchange(self) -> bool:
        """Whether the method is through after one round."""
        return bool(self.configuration().usual_rounds == 1)

    @property
    def rounds_to_complete(self) -> int:
        """`rounds`, or the method's usual number."""
        return int(self.configuration().usual_rounds) if self.rounds is None else self.rounds

    @property
    def rounds_of_controls(self) -> int:
        """`control_rounds`, or what is fair."""
        if self.control_rounds is not None:
            return self.control_rounds
        return max(self.rounds_to_complete, CONTROL_ROUNDS) if self.one_exchange else self.rounds_to_complete
