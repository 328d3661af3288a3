"""Settings of a simulated fleet."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fleetdistill.models import path_of
from fleetdistill_lab.simulation.timing.behaviour import FleetBehaviour
from fleetdistill_server.config.run_config import check_settings, with_features

if TYPE_CHECKING:  # torch: the command line shows its options without it
    import numpy.typing as npt

    from fleetdistill_lab.simulation.data.datasets import Dataset
    from fleetdistill_lab.simulation.data.own import Arrays

Factory = Callable[..., Any]
"""Function that builds a torch module."""
DEVICES = 5
"""Number of devices by default, unless each client of the data set is one."""
CONTROL_ROUNDS = 30
"""Number of rounds of the controls for a method with one exchange."""
MAX_SCORED_ROUNDS = 10
"""Number of rounds after which device models are scored, at most, with `score = "sampled"`."""
MAX_SCORED_ROWS = 1000
"""Number of test rows on which device models are scored, at most, with `score = "sampled"`."""


SCORED = ("sampled", "devices", "global", "none")
EXPORTED = ("one", "best", "all", "none")


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Settings of a simulation.

    Raises:
        ConfigurationError: A model function is not at the top level of a module.
        DataError: The arrays in `dataset` do not form a data set.

    Attributes:
        method: Name of the method.
        modules: Module that registers your own methods, such as package.module. Over gRPC, the server's and the
            devices' processes import them too, and so do workers. Not needed for methods that this process has
            registered.
        settings: The method's settings, as under [method] in run.toml.
        dataset: Data set: digits, fashion-mnist, mnist, cifar10, cifar100, emnist-letters, femnist-digits, femnist,
            svhn, cinic10 or five-digits, the path of an .npz file, or `hf:NAME` of the Hugging Face Hub. The file is
            for `read_dataset`; from Python also a `Dataset`, or arrays for `own_dataset`. A simulation keeps a copy of
            your own data.
        client_column: Column of an `hf:` data set with the client of each row, for the partition `by_client`.
        data_dir: Folder of the data sets, to which missing ones are downloaded. See `load_dataset`.
        image_size: Height and width that images are reduced to by averaging; None keeps their size.
        train_limit: Largest number of training images in the whole fleet; None for all.
        test_limit: Largest number of test images, a stratified subset; None for all.
        devices: Number of devices, by default 5, or with the partition `by_client` one for each client of the data set.
            0 for the default.
        models: Device model, several of which are assigned in turn: a name, or package.module:factory. By default
            five different ones that fit the data set. From Python also a top-level function of (input_shape, classes).
        extractor: Extractor of all device models, for methods that use features: a name, `package.module:factory`,
            `torchvision:NETWORK` or `timm:NETWORK`, or a top-level function of (input_shape). By default that of the
            built-in models. With another one, `models` is by default one linear layer on it; with one of torchvision or
            timm, the method's setting `features` is by default `model`.
        extractor_weights: Weights of an extractor of torchvision or timm: the path of a file, or a name in the
            library's list. By default those that the library recommends, which it downloads.
        server_model: Server model, for methods that train one: a name, `package.module:factory`, or a top-level
            function of (feature_shape, classes), or of (input_shape, classes) if the model reads inputs.
        partition: Partition of the data over devices: a name in `partition.PARTITIONS`, or package.module:function.
            From Python also a top-level function of (labels, devices, seed) that returns the rows of each device.
        alpha: Concentration of the Dirichlet partition over devices, above 0.
        classes_per_device: Number of classes per device, for the partitions by classes.
        partition_settings: The partition's further parameters, such as `min_size` or `balance`, as under [partition] in
            the settings file. See the partition's function in `partition`.
        test_part: Test rows on which a device's own figures are computed: `global`, `local_split`, `local_like`,
            `local_labels` or `local_client`. `global`: all test rows, with each class weighted by the device's training
            rows. With the others each device has test rows of its own, and the test set is their union, all of which
            is scored. `local_split`: a fifth of the device's rows, stratified if each of its classes has two rows; the
            data set's test rows are not used. `local_like`: the data set's test rows, partitioned in the shares of the
            training rows. `local_labels`: 1 / devices of the test rows of each class that the device has.
            `local_client`: the test rows of the device's client, for the partition `by_client` and a data set with
            `test_clients`.
        proxy_per_class: Number of training images per class, the last ones, to hold out as the proxy set. None means
            0 for methods without a proxy set, and else 8, or half the smallest class if it has fewer than 16. Set it
            for all methods of a comparison, so that they train on the same data.
        validation_share: Fraction of each device's samples to hold out as validation data, in [0, 1), stratified. A
            device's model is replaced only if its validation accuracy does not fall; with 0, it is always replaced.
        predictors: Names in `fleetdistill.models.PREDICTORS`, assigned in turn, for class statistics with
            `predictor = "trained"`; by default all of them.
        hostile: Number of hostile devices; the first ones are hostile.
        attack: The hostile devices' attack, a name in `hostile.ATTACKS`.
        rounds: Number of rounds, by default 30, or 1 for a method with one exchange.
        devices_per_round: Number of devices that each round draws at random and waits for; 0 for all present devices.
        over_selection: Number of devices to ask for each of `devices_per_round`, from 1 to 10. Needs `behaviour`.
        quorum: Fraction of a round's devices that must answer, in (0, 1].
        deadline_seconds: Simulated seconds from an ask to its deadline; None for run.toml's default. Needs `behaviour`.
        min_devices: Number of devices that must be present for a round to begin; None for all devices, or with
            `behaviour` for `devices_per_round`, but at least 2.
        behaviour: When the devices are available and how fast they are, in simulated time; None if they are always
            available and answer immediately. Needs the link `memory`.
        control_rounds: Number of rounds of the controls; None for the method's number, but at least 30 for a method
            with one exchange, since training without exchanges has no communication cost.
        seed: Seed of the partition, the models, the batches and all other random choices.
        link: Link to the devices, memory (one process) or grpc.
        durable: Whether server and devices write and fsync all their files over the memory link too; see
            `docs/how-to/simulate-large-fleets.md`. Over gRPC they always do.
        workers: Number of processes that compute the devices' work, or `auto`; 0 for the simulation's own process, or
            over gRPC for one per processor. `auto` uses one per processor if the first round shows that this saves
            time. With any number the results are the same to the bit. A number does not work with `durable`.
        backend: What computes the devices' work: `local` for `workers`, `ray` for a Ray cluster, or `stacked` to train
            tiny networks of one architecture together.
        ray_address: Address of a Ray cluster, as in `ray.init`; empty for `workers` Ray workers on this machine.
        threads: Number of torch threads of the engine and of each device.
        knowledge_type: Element type of knowledge on the wire: float16, float32 or uint8.
        torch_device: Torch device of the server half and of the devices' training: cpu, cuda, or auto for CUDA if there
            is one. Results are equal to the bit on one kind of torch device only.
        out: Folder for report.json, the figure and the models. Its subfolder `work` has the simulation's state.
        score: Models that are scored on the test set: `sampled`, `devices`, `global` or `none`. `sampled`: the global
            model after each round on all rows, and the device models at the end and at up to ten points before on at
            most 1,000 rows. `devices`: the same after each round on all rows, the models of devices that took no part
            included. `global`: the global model only.
        score_every: Rounds from one score of the device models to the next, or with `global` of the global model;
            None for the rule of `score`. The last round is always scored.
        score_rows: Number of test rows on which device models are scored, drawn once by class; None for the rule of
            `score`. Needs `test_part = "global"`.
        top_k: Number of classes among which the true one counts in the top-k accuracies, which are reported beside
            accuracies; below the number of classes. None for no such accuracies.
        export: Devices whose models are written as ONNX at the end: `one`, `best`, `all`, `none` or a number.
            `one` of each architecture, `best` for the most accurate one of each, `all` that took part, or the first
            ones that did.
        figure: Type of the figure fleet.png, fleet.pdf or fleet.svg.
        panels: Panel of the figure: traffic, rounds, data or gains; repeatable, by default all. One is as wide as a
            column of a journal (84 mm), several are as wide as a page (174 mm).
        with_alone: Whether to train every device without the fleet as a control.
        with_fedavg: Whether to run FedAvg on the same data as a control, over the in-memory link. Every device has the
            largest of the device models and makes as many passes over the labels as in the method. All other settings
            are FedAvg's defaults.
    """

    method: str = "classstats"
    modules: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    dataset: str | Dataset | Arrays | tuple[npt.ArrayLike, npt.ArrayLike] = "digits"
    client_column: str = ""
    data_dir: Path | None = None
    image_size: int | None = None
    train_limit: int | None = None
    test_limit: int | None = None
    devices: int = 0
    models: Sequence[str | Factory] = ()
    extractor: str | Factory = ""
    extractor_weights: str = ""
    server_model: str | Factory = ""
    predictors: tuple[str, ...] = ()
    partition: str | Callable[..., Any] = "dirichlet_by_class"
    alpha: float = 0.5
    classes_per_device: int = 2
    partition_settings: Mapping[str, Any] = field(default_factory=dict)
    test_part: Literal["global", "local_split", "local_like", "local_labels", "local_client"] = "global"
    proxy_per_class: int | None = None
    validation_share: float = 0.0
    hostile: int = 0
    attack: str = ""
    rounds: int | None = None
    devices_per_round: int = 0
    over_selection: float = 1.0
    quorum: float = 2 / 3
    deadline_seconds: float | None = None
    min_devices: int | None = None
    behaviour: FleetBehaviour | None = None
    control_rounds: int | None = None
    seed: int = 0
    link: Literal["memory", "grpc"] = "memory"
    durable: bool = False
    workers: int | Literal["auto"] = 0
    backend: Literal["local", "ray", "stacked"] = "local"
    ray_address: str = ""
    threads: int = 1
    knowledge_type: Literal["float16", "float32", "uint8"] = "float16"
    torch_device: str = "auto"
    out: Path = Path("out/simulation")
    score: Literal["sampled", "devices", "global", "none"] = "sampled"
    score_every: int | None = None
    score_rows: int | None = None
    top_k: int | None = None
    export: Literal["one", "best", "all", "none"] | int = "one"
    figure: Literal["png", "pdf", "svg"] = "png"
    panels: tuple[str, ...] = ()
    with_alone: bool = True
    with_fedavg: bool = True

    def __post_init__(self) -> None:
        for name in ("export", "workers"):
            value = getattr(self, name)
            if isinstance(value, str) and value.lstrip("-").isdecimal():
                object.__setattr__(self, name, int(value))
        if not isinstance(self.dataset, str) or self.dataset.endswith(".npz"):
            object.__setattr__(self, "dataset", _as_dataset(self.dataset))
        object.__setattr__(self, "partition", path_of(self.partition))
        if not self.devices and self.partition_path != "by_client":
            object.__setattr__(self, "devices", DEVICES)
        object.__setattr__(self, "out", Path(self.out))
        object.__setattr__(self, "models", tuple(path_of(model) for model in self.models))
        object.__setattr__(self, "extractor", path_of(self.extractor))
        object.__setattr__(self, "server_model", path_of(self.server_model))

    @property
    def model_paths(self) -> tuple[str, ...]:
        """Device models, each as a name or `package.module:factory`."""
        return tuple(path_of(model) for model in self.models)

    @property
    def partition_path(self) -> str:
        """Partition, as a name or `package.module:function`."""
        return path_of(self.partition)

    def configuration(self) -> Any:
        """Returns the method's configuration, without checks that need the number of classes.

        Raises:
            ConfigurationError: The method or a setting is unknown, or a setting is out of range.
        """
        return check_settings(self.method, with_features(self.method, self.settings, path_of(self.extractor)))

    @property
    def devices_to_begin(self) -> int:
        """Number of present devices with which a round begins: `min_devices`, or its default."""
        if self.min_devices is not None:
            return self.min_devices
        return self.devices if self.behaviour is None else min(max(self.devices_per_round, 2), self.devices)

    @property
    def scores_devices(self) -> bool:
        """Whether device models are scored."""
        return self.score in ("sampled", "devices")

    @property
    def rounds_between_scores(self) -> int:
        """Rounds from one score to the next: `score_every`, or its default."""
        if self.score_every is not None:
            return self.score_every
        return math.ceil(self.rounds_to_complete / MAX_SCORED_ROUNDS) if self.score == "sampled" else 1

    def rows_scored(self, test_rows: int) -> int:
        """Number of rows of the test set on which device models are scored: `score_rows`, or its default."""
        if self.test_part != "global":
            return test_rows
        if self.score_rows is not None:
            return min(self.score_rows, test_rows)
        return min(MAX_SCORED_ROWS, test_rows) if self.score == "sampled" else test_rows

    @property
    def has_workers(self) -> bool:
        """Whether the settings ask for other processes to compute the devices' work."""
        return self.workers != 0 or self.backend != "local"

    @property
    def one_exchange(self) -> bool:
        """Whether the method finishes after one round."""
        return bool(self.configuration().usual_rounds == 1)

    @property
    def rounds_to_complete(self) -> int:
        """Number of rounds: `rounds`, or its default."""
        return int(self.configuration().usual_rounds) if self.rounds is None else self.rounds

    @property
    def rounds_of_controls(self) -> int:
        """Number of rounds of the controls: `control_rounds`, or its default."""
        if self.control_rounds is not None:
            return self.control_rounds
        return max(self.rounds_to_complete, CONTROL_ROUNDS) if self.one_exchange else self.rounds_to_complete


def _as_dataset(given: str | Dataset | Arrays | tuple[npt.ArrayLike, npt.ArrayLike]) -> Dataset:
    from fleetdistill_lab.simulation.data.datasets import Dataset
    from fleetdistill_lab.simulation.data.own import own_dataset, read_dataset

    if isinstance(given, str):
        return read_dataset(Path(given))
    return given if isinstance(given, Dataset) else own_dataset(given)
