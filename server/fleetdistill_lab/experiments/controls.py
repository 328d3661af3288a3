"""Controls of a comparison: the entries without which it says little, and the lines that add them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fleetdistill.errors import ConfigurationError
from fleetdistill_server.methods import server_class
from fleetdistill_server.methods.traffic import Exchange, Sizes, is_over_early, usual_exchanges

if TYPE_CHECKING:
    from fleetdistill_lab.simulation.spec.settings import Simulation

__all__ = ["TUNE", "Control", "missing_controls"]

TUNE = "tune"
_ALWAYS: Mapping[str, str] = {
    "fedavg": "FedAvg, the weighted mean of the models",
    "no_transfer": "training alone",
}
_FIXED = ("scattering", "identity")
"""Extractors without weights, whose features are the same with all methods."""


@dataclass(frozen=True)
class Control:
    """An entry that a comparison lacks.

    Attributes:
        label: Label to give it; `TUNE` for tuned rates, which are no entry.
        words: What it is.
        method: Its method; by default the label.
        settings, simulation: Its settings, as an experiment's file has them.
    """

    label: str
    words: str
    method: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    simulation: Mapping[str, Any] = field(default_factory=dict)

    def caution(self, is_file: bool) -> str:
        """Returns the sentence that it is missing, with the lines to add to a file, or else to `compare`."""
        return f"A control is missing: {self.words}; {self._in_file() if is_file else self._of_compare()}."

    def _in_file(self) -> str:
        if self.label == TUNE:
            return 'add [tune] with setting = "method.learning_rate" and values, such as [0.005, 0.02, 0.08]'
        tables = {"settings": self.settings, "simulation": self.simulation}
        given = [f'method = "{self.method}"'] * bool(self.method) + [
            f"{name} = {{ {', '.join(f'{key} = {json.dumps(value)}' for key, value in of.items())} }}"
            for name, of in tables.items()
            if of
        ]
        return " ".join([f"add [methods.{self.label}]", *[f"with {' and '.join(given)}"] * bool(given)])

    def _of_compare(self) -> str:
        if self.label == TUNE:
            return "an experiment's file has it with [tune]"
        given = {**self.settings, **{f"simulation.{name}": value for name, value in self.simulation.items()}}
        options = [f" --set '{self.label}.{name}={json.dumps(value)}'" for name, value in given.items()]
        return f"add --method {self.label}{f'={self.method}' * bool(self.method)}{''.join(options)}"


def missing_controls(runs: Sequence[Simulation], is_tuned: bool) -> list[Control]:
    """Returns the controls that a comparison lacks.

    Args:
        runs: Its runs of one seed.
        is_tuned: Whether the learning rate is tuned for each method.
    """
    methods = {one.method for one in runs}
    found = [Control(name, words) for name, words in _ALWAYS.items() if name not in methods]
    found += [*_falling_rate(runs), *_equal_exchanges(runs), *_own(runs), *_on_features(runs)]
    return found if is_tuned else [*found, Control(TUNE, "a learning rate that is tuned for each method")]


def _rounds(runs: Sequence[Simulation]) -> int:
    return max((one.rounds_to_complete for one in runs), default=0)


def _of(runs: Sequence[Simulation], method: str) -> list[Simulation]:
    return [one for one in runs if one.method == method]


def _falling_rate(runs: Sequence[Simulation]) -> Iterator[Control]:
    """Yields FedAvg with a rate that falls to a tenth over the run."""
    fedavg = _of(runs, "fedavg")
    rounds = _rounds(fedavg[:1] or runs)
    decays = [(one.configuration().learning_rate_round_decay, one.rounds_to_complete) for one in fedavg]
    if rounds > 1 and not any(decay ** (number - 1) < 0.1005 for decay, number in decays):
        decay = math.floor(1e4 * 0.1 ** (1 / (rounds - 1))) / 1e4
        settings = {"learning_rate_round_decay": decay}
        yield Control("falling_rate", "FedAvg with a rate that falls to a tenth", "fedavg", settings)


def _exchanges(one: Simulation) -> Sequence[Exchange]:
    return server_class(one.method).exchanges(one.configuration(), Sizes())


def _equal_exchanges(runs: Sequence[Simulation]) -> Iterator[Control]:
    """Yields FedAvg with as many exchanges as a method that exchanges models several times in a round."""
    wanted, of = 0, ""
    for one in runs:
        usual = usual_exchanges(_exchanges(one))
        number = sum(item.times for item in usual) * one.rounds_to_complete
        if number > wanted and any(item.setting for item in usual):
            wanted, of = number, one.method
    if _rounds(_of(runs, "fedavg")) < wanted:
        words = f"FedAvg with as many exchanges and bytes as {of}"
        yield Control("equal_exchanges", words, "fedavg", simulation={"rounds": wanted})


def _own(runs: Sequence[Simulation]) -> Iterator[Control]:
    """Yields each method without its own part: `control` of its configuration."""
    configs = [one.configuration() for one in runs]
    methods = {type(config): one.method for config, one in zip(configs, runs, strict=True)}
    for kind, method in methods.items():
        wanted = vars(kind).get("control", {})  # what is a base class's own need not be this method's
        if not isinstance(wanted, Mapping):
            raise ConfigurationError(
                f"{kind.__name__}.control is of type {type(wanted).__name__}, must be a class attribute with settings "
                'by their names, such as {"exchange": False}'
            )
        alike = [config for config in configs if type(config) is kind]
        if not any(all(getattr(config, name) == value for name, value in wanted.items()) for config in alike):
            said = " and ".join(f"{name} = {json.dumps(value)}" for name, value in wanted.items())
            yield Control(f"{method}_control", f"{method} with {said}, without what is its own", method, wanted)


def _on_features(runs: Sequence[Simulation]) -> Iterator[Control]:
    """Yields FedAvg and training alone on the fixed features of methods that finish early."""
    early = [one for one in runs if is_over_early(_exchanges(one))]
    found = {getattr(one.configuration(), "features", one.extractor) for one in early}
    for features in (name for name in _FIXED if name in found):
        for method, words in (("fedavg", "FedAvg"), ("no_transfer", "training alone")):
            if not any(_is_on(one, features) for one in _of(runs, method)):
                simulation = {"models": [f"linear:{features}"]}
                label = f"{method}_on_{features}"
                yield Control(label, f"{words} on the features {features}", method, simulation=simulation)


def _is_on(one: Simulation, features: str) -> bool:
    models = one.model_paths or (one.extractor,)
    return any(features in str(model) for model in models)
