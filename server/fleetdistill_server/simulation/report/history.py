"""How the models of a simulated fleet did, round after round."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fleetdistill.methods import config_class, device_class
from fleetdistill_server.simulation.report.metrics import Ints
from fleetdistill_server.simulation.report.scores import Figures, round_figures
from fleetdistill_server.simulation.spec.device import DeviceSpec
from fleetdistill_server.simulation.spec.score_log import START, after_rounds, read_scores
from fleetdistill_server.store.store import Store


@dataclass(frozen=True)
class FleetHistory:
    """Confusion matrices `[C, C]` on the global test part, after each completed round.

    Attributes:
        devices: Device -> those of the model that it has after each round: after its local training, or, where the
            method makes no global model but sends a part of one, the model that is complete on the device (FedDKD_BN).
        took_part: Device -> whether it trained in the round, which is to say that the server has its answer.
        server: Those of the global model; None where the method has none, or where it could not be scored.
        further: Answer -> device -> those of a further answer, such as classstats' `personal`; None before the device
            had it.
        products: Device -> those of the fleet's model on it, which it would be delivered after each round; empty for
            methods whose devices keep what they train.
    """

    devices: Mapping[str, Sequence[Ints]]
    took_part: Mapping[str, Sequence[bool]]
    server: Sequence[Ints | None]
    further: Mapping[str, Mapping[str, Sequence[Ints | None]]] = field(default_factory=dict)
    products: Mapping[str, Sequence[Ints]] = field(default_factory=dict)

    def figures(self, samples_jc: Ints) -> list[Figures]:
        """CDKT-FL's figures of every round, in accuracy; `samples_jc` as in `scores.fleet_figures`."""
        rounds = zip(*self.devices.values(), strict=True)
        return [round_figures(kcc, samples_jc, server) for kcc, server in zip(rounds, self.server, strict=True)]

    def last(self) -> list[Ints]:
        """Those of the devices after the last round."""
        return [counts[-1] for counts in self.devices.values()]


def read_history(store: Store, run: str, specs: Sequence[DeviceSpec]) -> FleetHistory:
    """Reads the history of a finished run from its store and from what the devices noted.

    A device may have noted a score for an answer that came too late or was refused. It then went back to the model of
    before, so only scores whose answer has a receipt count. Whether the round used the answer does not matter: the
    receipt alone makes the device keep what it learned.
    """
    trained = _receipts(store, run)
    closed = [row for row in store.runs.rounds(run) if row["status"] == "closed"]
    numbers = [row["round"] for row in closed]
    noted = {spec.name: _with_receipt(read_scores(spec.scores_file), trained[spec.name]) for spec in specs}
    figures = [json.loads(row["figures"] or "{}") for row in closed]
    server = [np.array(one["global_confusion"], np.int64) if "global_confusion" in one else None for one in figures]
    products = _products(specs, noted, numbers)
    after_training = {name: after_rounds(scores, numbers) for name, scores in noted.items()}
    return FleetHistory(
        devices=products if products and all(one is None for one in server) else after_training,
        took_part={name: [number in scores for number in numbers] for name, scores in noted.items()},
        further=_further(specs, trained, numbers),
        server=server,
        products=products,
    )


def _products(
    specs: Sequence[DeviceSpec], noted: Mapping[str, Mapping[int, Ints]], rounds: Sequence[int]
) -> dict[str, list[Ints]]:
    """What devices noted of the fleet's model; what a round brings counts for the completed round before it."""
    found = {spec.name: read_scores(spec.products_file) for spec in specs}
    if not any(found.values()):
        return {}
    until = [*(number - 1 for number in rounds[1:]), *rounds[-1:]]  # rounds in between fell short
    starts = {name: {START: of[START]} if START in of else {} for name, of in noted.items()}
    return {name: after_rounds(starts[name] | of, until) for name, of in found.items()}


def _receipts(store: Store, run: str) -> Mapping[str, AbstractSet[int]]:
    """Device -> rounds whose answer the server has to a step that ends a round for a device."""
    row = store.runs.get(run)
    assert row is not None  # it is finished
    steps = _metrics_steps(json.loads(row["config"]))
    found = defaultdict[str, set[int]](set)
    for upload in store.asks.uploads(run):
        if upload["step"] in steps:
            found[upload["device"]].add(upload["round"])
    return found


def _metrics_steps(config: Mapping[str, Any]) -> Sequence[str]:
    method, settings = config["run"]["method"], config.get("method", {})
    chosen = config_class(method, settings).from_settings(settings)
    return device_class(method, chosen).metrics_steps(chosen)


def _further(
    specs: Sequence[DeviceSpec], trained: Mapping[str, AbstractSet[int]], rounds: Sequence[int]
) -> dict[str, dict[str, list[Ints | None]]]:
    """What devices noted of further answers in rounds that have a receipt."""
    found = defaultdict[str, dict[str, list[Ints | None]]](dict)
    for spec in specs:
        for answer in spec.further_answers():
            noted = _with_receipt(read_scores(spec.scores_file_of(answer)), trained[spec.name])
            if noted:
                before = sum(number < min(noted) for number in rounds)
                found[answer][spec.name] = [*[None] * before, *after_rounds(noted, rounds[before:])]
    return dict(found)


def _with_receipt(noted: Mapping[int, Ints], rounds: AbstractSet[int]) -> dict[int, Ints]:
    return {number: counts for number, counts in noted.items() if number == START or number in rounds}
