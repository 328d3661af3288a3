"""Runs every method with every seed and reads what came out; a run that is finished is not repeated."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from fleetdistill.errors import ConfigurationError
from fleetdistill.methods import config_class
from fleetdistill_lab.simulation.checks import check_settings
from fleetdistill_lab.simulation.fleet import simulate
from fleetdistill_lab.simulation.folder import check_folder
from fleetdistill_lab.simulation.options import merge_settings
from fleetdistill_lab.simulation.report.comparison import ComparisonRow
from fleetdistill_lab.simulation.spec.settings import Simulation

__all__ = ["Result", "read_seeds", "run", "simulations"]

Sections = Mapping[str, Mapping[str, Any]]
"""Settings by section: `simulation`, `fleet`, `method` for all methods, and the name of a method for that one."""


@dataclass(frozen=True)
class Result:
    """One model of one run.

    Attributes:
        method: The run's method.
        seed: Its seed.
        row: The model's figures; its name is the same for all seeds.
    """

    method: str
    seed: int
    row: ComparisonRow


def read_seeds(text: str) -> list[int]:
    """Returns the seeds of a text such as `0-4` or `0,2,7`, in its order.

    Raises:
        ConfigurationError: The text has another form, or a seed occurs twice.
    """
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (not dash or last.isdecimal())):
            raise ConfigurationError(f"--seeds is {text!r}, expected numbers and ranges such as 0-4 or 0,2,7")
        seeds += range(int(first), int(last or first) + 1)
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigurationError(f"--seeds is {text!r}; each seed must occur once, and a range must not be empty")
    return seeds


def simulations(methods: Sequence[str], seeds: Sequence[int], sections: Sections, out: Path) -> list[Simulation]:
    """Returns the simulations to run, seeds outermost, so that a stopped comparison has whole seeds.

    All runs of a seed share data, partition and initial weights, so that their differences are paired. Controls are
    methods like any other: `fedavg`, and `no_transfer` for devices that train alone.

    Raises:
        ConfigurationError: A method or a setting is unknown or out of range, or no method has a setting of [method].
    """
    settings = {method: _settings(method, sections) for method in methods}
    for name in sections.get("method", {}):
        if not any(name in of for of in settings.values()):
            raise ConfigurationError(f"method.{name}: none of {', '.join(methods)} has this setting")
    result = []
    for seed in seeds:
        for method in methods:
            base = Simulation(method=method, seed=seed, out=out / method / f"seed-{seed}")
            shared = {name: sections[name] for name in ("simulation", "fleet") if name in sections}
            wanted = merge_settings(base, {**shared, "method": settings[method]})
            check_settings(wanted)
            result.append(replace(wanted, with_alone=False, with_fedavg=False))
    return result


def _settings(method: str, sections: Sections) -> dict[str, Any]:
    known = {field.name for field in fields(config_class(method))}
    for_all = {name: value for name, value in sections.get("method", {}).items() if name in known}
    return {**for_all, **sections.get(method, {})}


def run(
    wanted: Sequence[Simulation],
    on_begin: Callable[[int, Simulation], object] = lambda number, simulation: None,
    *,
    overwrite: bool = False,
) -> Iterator[Result]:
    """Runs simulations and yields the figures of their models, in order; continues one that was interrupted.

    Args:
        wanted: The simulations.
        on_begin: Called before each simulation that is run, with its number from 0.
        overwrite: Whether to repeat all of them.

    Raises:
        ConfigurationError: A folder has a simulation with other settings; nothing has been run then.
    """
    for simulation in wanted:
        check_folder(simulation, "overwrite" if overwrite else "resume")
    for number, simulation in enumerate(wanted):
        file = simulation.out / "report.json"
        if overwrite or not (file.exists() and json.loads(file.read_text())["finished"]):
            on_begin(number, simulation)
            simulate(simulation, if_there="overwrite" if overwrite else "resume")
        for row in json.loads(file.read_text())["comparison"]:
            yield Result(simulation.method, simulation.seed, ComparisonRow(**row))
