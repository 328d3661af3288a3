"""Reads the test results of a simulated fleet's models after each round."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

from fleetdistill.methods import config_class, device_class
from fleetdistill.training.figures import Confusion
from fleetdistill_lab.simulation.report.metrics import Ints
from fleetdistill_lab.simulation.report.scores import Counted, Figures, round_figures
from fleetdistill_lab.simulation.spec.device import DeviceSpec
from fleetdistill_lab.simulation.spec.score_log import (
    ALONE,
    DELIVERED,
    GLOBAL,
    PRODUCT,
    START,
    after_rounds,
    confusion_of,
    read_scores,
)
from fleetdistill_server.store.states import RoundStatus
from fleetdistill_server.store.store import Store


@dataclass(frozen=True)
class FleetHistory:
    """Confusion matrices on the test set after each completed round; None where nothing was scored.

    Attributes:
        devices: For each device, the matrices of its model after local training. If the method distributes only a
            part of a model (FedDKD_BN), those of the device's complete model. None before a device's first score.
        took_part: For each device, whether it trained in each round, that is, whether the server has its answer.
        server: Matrices of the global model; None for rounds in which there is none or it could not be scored.
        further: For each further variant, such as classstats' `personal`, and each device, its matrices; None for
            rounds before the device had the variant.
        products: For each device, the matrices of the fleet's model that it would receive after each round; empty for
            methods whose devices keep the models that they train.
        delivered: For each scored device, the matrix of the model that its app has at the end; empty before the end.
        own: The matrices on each device's own test rows; None for a fleet without such rows.
    """

    devices: Mapping[str, Sequence[Confusion | None]]
    took_part: Mapping[str, Sequence[bool]]
    server: Sequence[Confusion | None]
    further: Mapping[str, Mapping[str, Sequence[Confusion | None]]] = field(default_factory=dict)
    products: Mapping[str, Sequence[Confusion | None]] = field(default_factory=dict)
    delivered: Mapping[str, Confusion] = field(default_factory=dict)
    own: OwnHistory | None = None

    def figures(self, samples_jc: Ints) -> list[Figures]:
        """Returns every round's CDKT-FL figures, computed from accuracy; `samples_jc` as in `scores.fleet_figures`."""
        rounds = zip(*self.devices.values(), strict=True)
        own = itertools.repeat(None) if self.own is None else zip(*self.own.devices.values(), strict=True)
        of_rounds = zip(rounds, self.server, own, strict=False)
        return [round_figures(device_k, samples_jc, server, own_k) for device_k, server, own_k in of_rounds]

    def counted(self) -> list[Counted]:
        """Returns for every round the number of devices that its figures are over."""
        begun = {name: list(itertools.accumulate(of, max)) for name, of in self.took_part.items()}
        scored = [
            [begun[name][number] for name, of in self.devices.items() if of[number] is not None]
            for number in range(len(self.server))
        ]
        return [{"devices": len(of), "untrained": of.count(False)} for of in scored]

    def last(self) -> list[Confusion | None]:
        """Returns the devices' confusion matrices after the last round."""
        return [counts[-1] for counts in self.devices.values()]

    def last_own(self) -> list[Confusion | None] | None:
        """Returns those on the devices' own test rows; None for a fleet without such rows."""
        return None if self.own is None else self.own.last()


@dataclass(frozen=True)
class OwnHistory(FleetHistory):
    """The same matrices on each device's own rows of the test set; None for a device without such rows.

    `server` has None only, because each device has another matrix of the global model.

    Attributes:
        of_global: For each device, the matrix of the global model at the end; empty without one, and before the end.
        alone: For each device, the matrix of local-only training at the end; empty without this control.
    """

    of_global: Mapping[str, Confusion] = field(default_factory=dict)
    alone: Mapping[str, Confusion] = field(default_factory=dict)

    def last_further(self, variant: str, device: str) -> Confusion | None:
        """Returns the matrix of a device's further variant after the last round; None if it was not scored."""
        of = self.further.get(variant, {})
        return of[device][-1] if device in of else None


def read_top_k(store: Store, run: str, specs: Sequence[DeviceSpec]) -> FleetHistory | None:
    """Reads the history of a run's top-k scores; None if its devices have none. The global model has only the last."""
    return None if specs[0].top_k is None else read_history(store, run, specs, top_k=True)


def read_top_k_alone(specs: Sequence[DeviceSpec]) -> dict[str, Confusion]:
    """Returns the confusion matrices of the top-k scores of local-only training, by device."""
    return {name: of[max(of)] for name, of in read_scores(specs[0].top_k_file).get(ALONE, {}).items()}


def read_history(store: Store, run: str, specs: Sequence[DeviceSpec], *, top_k: bool = False) -> FleetHistory:
    """Reads the history of a run from its store and the devices' score logs.

    Only scores whose answer has a receipt count: after a late or refused answer a device restores its previous model.
    Whether the round used the answer does not matter, because a device keeps its training once it has the receipt.

    Args:
        store: Store that contains the run.
        run: Name of the run.
        specs: The run's devices.
        top_k: Whether to read the top-k scores instead, which are on the test set only.
    """
    whole = FleetHistory(**_read(store, run, specs, own=False, top_k=top_k))
    if top_k or not any(spec.own_test_file for spec in specs):
        return whole
    at_end = read_scores(specs[0].scores_file, own=True)
    single = {name: {device: of[START] for device, of in at_end.get(name, {}).items()} for name in (GLOBAL, ALONE)}
    own = OwnHistory(**_read(store, run, specs, own=True, top_k=False), of_global=single[GLOBAL], alone=single[ALONE])
    return replace(whole, own=own)


def _read(store: Store, run: str, specs: Sequence[DeviceSpec], *, own: bool, top_k: bool) -> dict[str, Any]:
    """Returns the fields of a `FleetHistory` on the test set, or on the devices' own rows."""
    trained = rounds_with_receipts(store, run)
    closed = [item for item in store.runs.rounds(run) if item.status is RoundStatus.CLOSED]
    numbers = [item.number for item in closed]
    scored = [specs[0].is_scored(number) for number in numbers[:-1]] + [True] * bool(numbers)
    scores = read_scores(specs[0].top_k_file if top_k else specs[0].scores_file, own=own)
    noted = {spec.name: _with_receipt(scores[""][spec.name], trained[spec.name]) for spec in specs}
    figures = [item.figures for item in closed]
    server = [
        confusion_of(figure["global_confusion"], specs[0].classes) if "global_confusion" in figure else None
        for figure in figures
    ]
    if top_k:
        of_global = scores.get(GLOBAL, {}).get("", {})
        server = [of_global.get(number) for number in numbers]
    is_global = any(item is not None for item in server)
    shares = shares_global_model(store.runs.existing(run).config["run"]["method"], specs)
    delivered = {name: of[max(of)] for name, of in scores.get(DELIVERED, {}).items()}
    if own:
        server = [None] * len(numbers)
    if shares:
        products = {spec.name: server for spec in specs} if specs[0].score_every else {}
        if own and products:
            delivered = {name: of[START] for name, of in scores.get(GLOBAL, {}).items()}
        elif server[-1:] and server[-1] is not None and specs[0].score_every:
            delivered = dict.fromkeys(products, server[-1])
    else:
        products = _in_scored(_products(scores.get(PRODUCT, {}), noted, numbers), scored)
    if not products:
        _add_delivered(noted, delivered, trained)
    after_training = _in_scored({name: after_rounds(of, numbers) for name, of in noted.items()}, scored)
    return {
        "devices": after_training if is_global or not products else products,
        "took_part": {spec.name: [number in trained[spec.name] for number in numbers] for spec in specs},
        "further": {
            name: _in_scored(_further(of, trained, numbers), scored)
            for name, of in sorted(scores.items())
            if name not in ("", PRODUCT, DELIVERED, ALONE, GLOBAL)
        },
        "server": server,
        "products": products,
        "delivered": delivered,
    }


def _in_scored(
    by_device: Mapping[str, Sequence[Confusion | None]], scored: Sequence[bool]
) -> dict[str, list[Confusion | None]]:
    """Returns the matrices of rounds in which device models are scored, and None for the others."""
    return {
        name: [counts if due else None for counts, due in zip(of, scored, strict=True)]
        for name, of in by_device.items()
    }


def shares_global_model(method: str, specs: Sequence[DeviceSpec]) -> bool:
    """Returns whether every device receives the global model and uses it."""
    return device_class(method).shares_fleet_model and not any(spec.validation_file for spec in specs)


def _add_delivered(
    noted: Mapping[str, dict[int, Confusion]],
    delivered: Mapping[str, Confusion],
    trained: Mapping[str, AbstractSet[int]],
) -> None:
    """Adds the scores at the end of devices whose last training was not scored; they keep the model that they train."""
    for name, counts in delivered.items():
        if trained[name] and max(trained[name]) not in noted[name]:
            noted[name][max(trained[name])] = counts


def _products(
    found: Mapping[str, Mapping[int, Confusion]], noted: Mapping[str, Mapping[int, Confusion]], rounds: Sequence[int]
) -> dict[str, list[Confusion | None]]:
    """Returns the scores of the fleet's model; a model received in a round counts for the last completed round."""
    if not found:
        return {}
    until = [*(number - 1 for number in rounds[1:]), *rounds[-1:]]  # the rounds in between fell short
    starts = {name: {START: of[START]} if START in of else {} for name, of in noted.items()}
    return {name: after_rounds(start | dict(found.get(name, {})), until) for name, start in starts.items()}


def rounds_with_receipts(store: Store, run: str) -> Mapping[str, AbstractSet[int]]:
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
    scores: Mapping[str, Mapping[int, Confusion]], trained: Mapping[str, AbstractSet[int]], rounds: Sequence[int]
) -> dict[str, list[Confusion | None]]:
    """Returns the devices' scores of a further variant in rounds that have a receipt."""
    result: dict[str, list[Confusion | None]] = {}
    for device, of in scores.items():
        noted = _with_receipt(of, trained[device])
        if noted:
            result[device] = after_rounds(noted, rounds)
    return result


def _with_receipt(noted: Mapping[int, Confusion], rounds: AbstractSet[int]) -> dict[int, Confusion]:
    return {number: counts for number, counts in noted.items() if number == START or number in rounds}
