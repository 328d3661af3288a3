"""Data from which a simulation's report is built, with the results of its controls: local-only training and FedAvg."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fleetdistill.training.figures import Confusion, Counts
from fleetdistill_lab.simulation.data.datasets import Dataset
from fleetdistill_lab.simulation.data.split import Partition
from fleetdistill_lab.simulation.report.comparison import Cost
from fleetdistill_lab.simulation.report.history import FleetHistory
from fleetdistill_lab.simulation.spec.device import DeviceSpec
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.config.run_config import RunConfig
from fleetdistill_server.store.store import Store


@dataclass(frozen=True)
class FedAvgControl:
    """Results of the FedAvg control.

    Attributes:
        model: Model of every device.
        settings: FedAvg's settings.
        history: History of the run; device models are those after local training, before the next averaging.
        cost: Cost of the run.
        top_k: History of the run's top-k scores; None without them.
    """

    model: str
    settings: dict[str, Any]
    history: FleetHistory
    cost: Cost
    top_k: FleetHistory | None = None


@dataclass(frozen=True)
class Controls:
    """Results of a simulation's controls.

    Attributes:
        alone: For each device id, the figures of local-only training after each round, None where it was not scored;
            empty without this control.
        fedavg: Results of FedAvg; None without this control.
    """

    alone: Mapping[str, list[Counts | None]]
    fedavg: FedAvgControl | None


@dataclass(frozen=True)
class ExportedModel:
    """ONNX files of one device, with paths relative to the simulation's folder.

    Attributes:
        file: The app's model.
        max_difference: Largest absolute difference between onnxruntime's and PyTorch's logits over all files.
        variants: File of each variant, `general` first; empty for a single model.
    """

    file: str
    max_difference: float
    variants: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Data from which a simulation's report is built, after at least one completed round.

    Attributes:
        wanted: Settings of the simulation.
        store: Store of the run.
        config: Configuration of the run.
        data: The data set.
        split: Partition of the training data over the devices.
        specs: The devices.
        history: History of the run.
        cost: Cost of the run.
        controls: Results of the finished controls.
        top_k: History of the run's top-k scores; None without them.
        top_k_alone: Confusion matrices of the top-k scores of local-only training, by device.
        exports: Exported models of the devices that have one.
        seconds: Duration since the last start, in seconds, controls included.
        finished: False if the simulation was interrupted.
    """

    wanted: Simulation
    store: Store
    config: RunConfig
    data: Dataset
    split: Partition
    specs: Sequence[DeviceSpec]
    history: FleetHistory
    cost: Cost
    controls: Controls
    seconds: float
    top_k: FleetHistory | None = None
    top_k_alone: Mapping[str, Confusion] = field(default_factory=dict)
    exports: Mapping[str, ExportedModel] = field(default_factory=dict)
    finished: bool = True

    @property
    def run(self) -> str:
        """Name of the run."""
        return self.config.run.name
