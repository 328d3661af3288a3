"""Data from which a simulation's report is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleetdistill_server.config.run_config import RunConfig
from fleetdistill_server.simulation.data.datasets import Dataset
from fleetdistill_server.simulation.data.split import Partition
from fleetdistill_server.simulation.report.controls import Controls
from fleetdistill_server.simulation.report.history import FleetHistory
from fleetdistill_server.simulation.spec.device import DeviceSpec
from fleetdistill_server.simulation.spec.settings import Simulation
from fleetdistill_server.store.store import Store


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
        controls: Results of the finished controls.
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
    controls: Controls
    seconds: float
    finished: bool = True

    @property
    def run(self) -> str:
        """Name of the run."""
        return self.config.run.name
