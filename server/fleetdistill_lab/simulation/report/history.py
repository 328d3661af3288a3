"""Reads the test results of a simulated fleet's models after each round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fleetdistill.methods import config_class, device_class
from fleetdistill_lab.simulation.report.metrics import Ints
from fleetdistill_lab.simulation.report.scores import Figures, round_figures
from fleetdistill_lab.simulation.spec.device import DeviceSpec
from fleetdistill_lab.simulation.spec.score_log import PRODUCT, START, after_rounds, read_scores
from fleetdistill_server.store.states import RoundStatus
from fleetdistill_server.store.store import Store


@dataclass(frozen=True)
class FleetHistory:
    """Confusion matrices `[C, C]` on the global test set after each completed round.

    Attributes:
        devices: For each device, the matrices of its model after local training. If the method distributes only a
            part of a model (FedDKD_BN), those of the device's complete model.
        took_part: For each device, whether it trained in each round, that is, whether the server has its answer.
        server: Matrices of the global model; None for rounds in which there is none or it could not be scored.
        further: For each further variant, such as classstats' `personal`, and each device, its matrices; None for
            rounds before the device had the variant.
        products: For each device, the matrices of the fleet's model that it would receive after each round; empty for
            methods whose devices keep the models that they train.
    """

    devices: Mapping[str, Sequence[Ints]]
    took_part: Mapping[str, Sequence[bool]]
    server: Sequence[Ints | None]
    further: Mapping[str, Mapping[str, Sequence[Ints | None]]] = field(default_factory=dict)
    products: Mapping[str, Sequence[Ints]] = field(default_factory=dict)

    def figures(self, samples_jc: Ints) -> list[Figures]:
        """Returns every round's CDKT-FL figures, computed from accuracy; `samples_jc` as in `scores.fleet_figures`."""
        rounds = zip(*self.devices.values(), strict=True)
        return [round_figures(kcc, samples_jc, server) for kcc, server in zip(rounds, self.server, strict=True)]

    def last(self) -> list[Ints]:
        """Returns the devices' confusion matrices after the last round."""
        return [counts[-1] for counts in self.devices.values()]


def read_history(store: Store, run: str, specs: Sequence[DeviceSpec]) -> FleetHistory:
    """Reads the history of a run from its store and the devices' score logs.

    Only scores whose answer has a receipt count: after a late or refused answer a device restores its previous model.
    Whether the round used the answer does not matter, because a device keeps its training once it has the receipt.

    Args:
        store: Store that contains the run.
        run: Name of the run.
        specs: The run's devices.
    """
    trained = _receipts(store, run)
    closed = [item for item in store.runs.rounds(run) if item.status is RoundStatus.CLOSED]
    numbers = [item.number for item in closed]
    scores = read_scores(specs[0].scores_file)
    noted = {spec.name: _with_receipt(scores[""][spec.name], trained[spec.name]) for spec in specs}
    figures = [item.figures for item in closed]
    server = [
        np.array(figure["global_confusion"], np.int64) if "global_confusion" in figure else None for figure in figures
    ]
    products = _products(scores.get(PRODUCT, {}), noted, numbers)
    after_training = {name: after_rounds(of, numbers) for name, of in noted.items()}
    return FleetHistory(
        devices=products if products and all(item is None for item in server) else after_training,
        took_part={name: [number in of for number in numbers] for name, of in noted.items()},
        further={
            name: _further(of, trained, numbers) for name, of in sorted(scores.items()) if name not in ("", PRODUCT)
        },
        server=server,
        products=products,
    )


def _products(
    found: Mapping[str, Mapping[int, Ints]], noted: Mapping[str, Mapping[int, Ints]], rounds: Sequence[int]
) -> dict[str, list[Ints]]:
    """Returns the scores of the fleet's model; a model received in a round counts for the last completed round."""
    if not found:
        return {}
    until = [*(number - 1 for number in rounds[1:]), *rounds[-1:]]  # the rounds in between fell short
    starts = {name: {START: of[START]} if START in of else {} for name, of in noted.items()}
    return {name: after_rounds(start | dict(found.get(name, {})), until) for name, start in starts.items()}


def _receipts(store: Store, run: str) -> Mapping[str, AbstractSet[int]]:
    """Returns for each device the rounds in which the server has its answer to a step with metrics."""
    steps = _metrics_steps(store.runs.existing(run).config)
    result = defaultdict[str, set[int]](set)
    for upload in store.asks.uploads(run):
        if upload.step in steps:
            result[upload.device].add(upload.round)
    return result


def _metrics_steps(config: Mapping[str, Any]) -> Sequence[str]:
    method = config["run"]["method"]
    chosen = config_class(method).from_settings(config.get("method", {}))
    return device_class(method).metrics_steps(chosen)


def _further(
    scores: Mapping[str, Mapping[int, Ints]], trained: Mapping[str, AbstractSet[int]], rounds: Sequence[int]
) -> dict[str, list[Ints | None]]:
    """Returns the devices' scores of a further variant in rounds that have a receipt."""
    result: dict[str, list[Ints | None]] = {}
    for device, of in scores.items():
        noted = _with_receipt(of, trained[device])
        if noted:
            before = sum(number < min(noted) for number in rounds)
            result[device] = [*[None] * before, *after_rounds(noted, rounds[before:])]
    return result


def _with_receipt(noted: Mapping[int, Ints], rounds: AbstractSet[int]) -> dict[int, Ints]:
    return {number: counts for number, counts in noted.items() if number == START or number in rounds}
