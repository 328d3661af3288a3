"""The run of a finished simulation: its store, and what only its report contains."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fleetdistill.errors import ConfigurationError
from fleetdistill_server.operations.source import LocalStore
from fleetdistill_server.store.states import RoundStatus
from fleetdistill_server.views.reading import Query
from fleetdistill_server.views.runs import TableRow, View


class SimulatedRun(LocalStore):
    """Reads a simulation's store; adds the accuracy of devices alone, and the classes of their training data.

    Args:
        out: The simulation's output directory.

    Raises:
        ConfigurationError: The directory does not contain a simulation with a report.
    """

    def __init__(self, out: Path) -> None:
        super().__init__(out / "work" / "store")
        try:
            self._report: dict[str, Any] = json.loads((out / "report.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{out} contains no report of a simulation; complete it with --resume") from error

    def read(self, query: Query) -> View:
        """Reads one view."""
        if query.view == "rounds":
            every = super().read(Query("rounds", query.run)).lists["rounds"]
            alone = with_alone(every, self._report["alone_accuracy_by_round"])
            return View({"rounds": [row for row in alone if row["round"] > query.after]})
        if query.view == "classes":
            return View(
                {"devices": training_classes(self._report["devices"])}, {"classes": self._report["class_names"]}
            )
        return super().read(query)


def with_alone(rounds: Sequence[TableRow], by_device: Mapping[str, Sequence[float]]) -> list[TableRow]:
    """Returns rounds with the mean accuracy of the devices that trained alone for as many rounds.

    Args:
        rounds: All rounds of the run.
        by_device: Accuracy after each round of local-only training, by device; empty without this control.
    """
    means = iter([fmean(rates) for rates in zip(*by_device.values(), strict=True)])
    return [
        {**row, "alone_accuracy": next(means, None) if row["status"] == RoundStatus.CLOSED else None} for row in rounds
    ]


def training_classes(devices: Sequence[TableRow]) -> list[TableRow]:
    """Returns the devices of a report as in the view `classes`."""
    return [
        {
            "device": device["name"],
            "split": "train",
            "counts": {str(label): count for label, count in enumerate(device["samples_by_class"]) if count},
        }
        for device in devices
    ]
