"""The definition of an experiment: methods over seeds and a grid of settings, read from a TOML file."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from fleetdistill.errors import ConfigurationError, DataError
from fleetdistill.methods import config_class
from fleetdistill.methods.outside import import_modules
from fleetdistill.names import unknown_name
from fleetdistill_lab.experiments.metrics import METRICS, Target
from fleetdistill_lab.simulation.checks import check_settings, check_used
from fleetdistill_lab.simulation.folder import deciding, settings_as_json
from fleetdistill_lab.simulation.options import absolute_paths, check_section, merge_settings
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.config.section import read_toml

__all__ = [
    "SCALE",
    "Cell",
    "Claim",
    "Experiment",
    "MethodEntry",
    "Sections",
    "Tune",
    "find_experiment",
    "join_names",
    "parse_seeds",
    "read_experiment",
]

Sections = Mapping[str, Mapping[str, Any]]
"""Settings by section: `simulation`, `partition`, `fleet`, and `method` for all methods that have the setting."""
SECTIONS = ("simulation", "partition", "fleet", "method")
_VALIDATION = {"simulation.test_part": "local_split", "simulation.test_limit": None, "simulation.score_rows": None}
"""Changes of settings for runs that are scored on held-out training rows; the limits are about other rows."""
SCALE = "paper"
"""The scale of a file's settings outside [scales]."""


def parse_seeds(text: str) -> list[int]:
    """Returns the seeds of a text such as `0-4` or `0,2,7`, in its order.

    Raises:
        ConfigurationError: The text has another form, or a seed occurs twice.
    """
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (not dash or last.isdecimal())):
            raise ConfigurationError(f"seeds is {text!r}, expected numbers and ranges such as 0-4 or 0,2,7")
        seeds += range(int(first), int(last or first) + 1)
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigurationError(f"seeds is {text!r}; each seed must occur once, and a range must not be empty")
    return seeds


def _read_seeds(given: Any) -> Any:
    try:
        seeds = parse_seeds(given) if isinstance(given, str) else given
    except ConfigurationError as error:
        raise ValueError(error) from error
    if isinstance(seeds, list) and any(seeds.count(seed) > 1 for seed in seeds):
        raise ValueError(f"seeds is {seeds}; each seed must occur once")
    return seeds


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MethodEntry(_Part):
    """A method of an experiment, under its label.

    Attributes:
        method: Name of the method; by default the label.
        settings: Settings of the method, which precede those for all methods.
        simulation: Settings of the simulation for this method only.
    """

    method: str = ""
    settings: dict[str, Any] = {}
    simulation: dict[str, Any] = {}


class Claim(_Part):
    """What a source says of the order of methods.

    Attributes:
        order: Labels, the best one first.
        metric: Name of the metric in `METRICS`; by default the experiment's first one.
        text: The claim in words.
        at: Grid points that the claim is about, by name; all if it is empty.
    """

    order: list[str] = Field(min_length=2)
    metric: str = ""
    text: str = ""
    at: list[str] = []


class Tune(_Part):
    """A setting whose value is chosen for each method and grid point, on validation data.

    The validation data are 20 % of each device's training rows, with the first seed; the other seeds and all test
    data are not looked at.

    Attributes:
        setting: The setting, such as `method.learning_rate`. A method without it is not tuned.
        values: Values to try.
        metric: Name in `METRICS` of what is best with the chosen value.
    """

    setting: str
    values: list[Any] = Field(min_length=2)
    metric: str = "accuracy"


class _File(_Part):
    """Contents of an experiment's file."""

    title: str = ""
    source: str = ""
    note: str = ""
    seeds: Annotated[tuple[int, ...], BeforeValidator(_read_seeds)]
    metrics: list[str] = ["accuracy", "own_accuracy", "trained", "own_trained"]
    reference: str = ""
    target: Target | None = None
    tune: Tune | None = None
    simulation: dict[str, Any] = {}
    partition: dict[str, Any] = {}
    fleet: dict[str, Any] = {}
    method: dict[str, Any] = {}
    grid: dict[str, list[Any] | dict[str, dict[str, Any]]] = {}
    methods: dict[str, MethodEntry] = Field(min_length=1)
    claims: list[Claim] = []
    printed: dict[str, dict[str, dict[str, float]]] = {}


_KEYS: Mapping[int | str, Iterable[str]] = {
    "target": Target.model_fields,
    "tune": Tune.model_fields,
    "methods": MethodEntry.model_fields,
    "claims": Claim.model_fields,
}
"""Keys of the parts of a file that have keys of their own."""


@dataclass(frozen=True)
class Cell:
    """One run of an experiment's grid.

    Attributes:
        label: Label of the method.
        point: Name of the grid point, such as `alpha 0.1`; empty without a grid.
        simulation: The run; its `out` is not set.
        sections: The same settings as a file for `fleetdistill simulate` has them, with absolute paths.
        tried: The tried value of a tuned setting; empty otherwise.
        run: Name of the run, made of the method and a digest of all settings that decide the results. Cells with the
            same settings share a run, such as those of a control that lacks the grid's setting.
    """

    label: str
    point: str
    simulation: Simulation
    sections: Sections
    run: str
    tried: str = ""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Methods to run over seeds and a grid of settings.

    Attributes:
        name: Name of the file, without its suffix.
        title: What is shown.
        seeds: Seeds. All runs of a seed and a grid point have the same data and partition, and the same initial weights
            where methods distribute them for the same network.
        methods: Methods by label.
        source: Publication that the experiment follows.
        note: What differs from it.
        scale: Name of the scale.
        metrics: Names in `METRICS`, one table each.
        reference: Label of the method from which differences are.
        target: Levels of a metric for rounds, exchanges, steps and bytes to them.
        tune: Setting to tune for each method; None for none.
        sections: Settings of all runs.
        grid: For each axis, the settings of its points by their name.
        claims: What the source says of the methods' order.
        printed: Values that the source prints, by metric, label and grid point.
        printed_elsewhere: Those of the source's grid points that the scale does not have.
        folder: What paths of the settings are relative to: the folder of the file.
        is_file: Whether it is a file's, so that advice says what to write there and not what to give `compare`.
    """

    name: str
    title: str
    seeds: Sequence[int]
    methods: Mapping[str, MethodEntry]
    source: str = ""
    note: str = ""
    scale: str = SCALE
    metrics: Sequence[str] = ("accuracy", "own_accuracy", "trained", "own_trained")
    reference: str = ""
    target: Target | None = None
    tune: Tune | None = None
    sections: Sections = field(default_factory=dict)
    grid: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    claims: Sequence[Claim] = ()
    printed: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    printed_elsewhere: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    folder: Path = Path()
    is_file: bool = False

    @property
    def tuned_setting(self) -> str:
        """The setting that is tuned, as `section.key`; empty without `tune`."""
        return "" if self.tune is None else _full(self.tune.setting)

    @property
    def points(self) -> dict[str, dict[str, Any]]:
        """The grid's points by name, with their settings as `section.key`."""
        axes = [list(points.items()) for points in self.grid.values()]
        return {
            ", ".join(name for name, _ in chosen): {key: value for _, of in chosen for key, value in of.items()}
            for chosen in itertools.product(*axes)
        }

    def tuning_cells(self) -> list[tuple[Any, Cell]]:
        """Returns the runs from which tuned values are chosen, each with its value; empty without `tune`.

        Raises:
            ConfigurationError: As for `cells`.
        """
        self.check_names()
        if self.tune is None:
            return []
        key, changes = self.tuned_setting, dict(_VALIDATION)
        tries = [
            (label, point, value)
            for point in self.points
            for label in self.methods
            if self._is_tuned(label)
            for value in self.tune.values
        ]
        cells = self._cells((label, point, self.seeds[0], {**changes, key: value}) for label, point, value in tries)
        return [
            (value, replace(cell, tried=f"{self.tune.setting} = {value}"))
            for (_, _, value), cell in zip(tries, cells, strict=True)
        ]

    def _is_tuned(self, label: str) -> bool:
        section, _, name = self.tuned_setting.partition(".")
        return section != "method" or name in self.settings_of(label)

    def cells(self, tuned: Mapping[tuple[str, str], Any] | None = None) -> list[Cell]:
        """Returns all cells in the order of their runs: a stopped experiment has whole grid points.

        A difference and its p value need all seeds of a grid point, and no other point.

        Args:
            tuned: Chosen values by label and grid point.

        Raises:
            ConfigurationError: A method, a setting or a label is unknown, or a setting is out of range.
        """
        key, chosen = self.tuned_setting, tuned or {}
        return self._cells(
            (label, point, seed, {key: chosen[label, point]} if (label, point) in chosen else {})
            for point in self.points
            for seed in self.seeds
            for label in self.methods
        )

    def _cells(self, wanted: Iterable[tuple[str, str, int, Mapping[str, Any]]]) -> list[Cell]:
        """Returns cells, given the arguments of `_cell`; raises ConfigurationError with all that is wrong."""
        problems, result = dict.fromkeys(self._wrong_names(), ""), []
        for label, point, seed, changes in wanted:
            try:
                result.append(self._cell(label, point, seed, changes))
            except (ConfigurationError, DataError) as error:
                problems.setdefault(str(error), f"{join_names(label, point)}: ")
        _refuse(where + said for said, where in problems.items())
        return result

    def settings_of(self, label: str) -> set[str]:
        """Returns the names of the settings of a label's method."""
        return {item.name for item in fields(config_class(self.methods[label].method or label))}

    def _cell(self, label: str, point: str, seed: int, changes: Mapping[str, Any]) -> Cell:
        """Returns a cell with further settings, by `section.key`, that precede all others."""
        entry, settings = self.methods[label], self.points[point]
        method, known = entry.method or label, self.settings_of(label)
        of_point = {name: _of_section(settings, name) for name in SECTIONS}
        for_all = {**self.sections.get("method", {}), **of_point["method"]}
        sections = {
            "simulation": {
                "export": "none",
                **self.sections.get("simulation", {}),
                **of_point["simulation"],
                **entry.simulation,
                "method": method,
                "seed": seed,
                "with_alone": False,
                "with_fedavg": False,
            },
            **{name: {**self.sections.get(name, {}), **of_point[name]} for name in ("partition", "fleet")},
            "method": {**{name: value for name, value in for_all.items() if name in known}, **entry.settings},
        }
        for name, values in sections.items():
            merged = {**values, **_of_section(changes, name)}
            given = {key: value for key, value in merged.items() if value is not None}
            sections[name] = absolute_paths(name, given, self.folder)
        sections = {name: values for name, values in sections.items() if values}
        checked, problems = {}, []
        for name, values in sections.items():
            try:
                checked[name] = check_section("", name, values)
            except (ConfigurationError, DataError) as error:
                problems.append(str(error))
        _refuse(problems)
        simulation = merge_settings(None, checked)
        check_settings(simulation)
        self._check_levels(simulation)
        own = {**of_point["simulation"], **entry.simulation}
        # A setting of [simulation] may be for some of the grid's partitions only.
        check_used(simulation.partition_path, own if self._partitions_vary else sections["simulation"])
        return Cell(label, point, simulation, sections, f"{method}-{_digest(simulation)}")

    def _check_levels(self, simulation: Simulation) -> None:
        name = str(getattr(simulation.dataset, "name", simulation.dataset))
        for key in ("level", "second_level"):
            given = getattr(self.target, key, None)
            if isinstance(given, dict) and name not in given:
                raise ConfigurationError(f"[target] {key}: {unknown_name('data set', name, given)}")

    @property
    def _partitions_vary(self) -> bool:
        of_methods = any("partition" in entry.simulation for entry in self.methods.values())
        return of_methods or any("simulation.partition" in settings for settings in self.points.values())

    def check_names(self) -> None:
        """Raises ConfigurationError for labels, metrics, points and settings that do not exist."""
        _refuse(self._wrong_names())

    def _wrong_names(self) -> Iterator[str]:
        methods = {entry.method or label: label for label, entry in self.methods.items()}
        settings, all_known = set[str](), True
        for label in methods.values():
            try:
                settings |= self.settings_of(label)
            except ConfigurationError as error:
                all_known = False
                yield str(error)
        keys = [key for points in self.grid.values() for of in points.values() for key in of]
        for key in (*keys, *filter(None, [self.tuned_setting])):
            if key.partition(".")[0] not in SECTIONS:
                yield f"{key}: {unknown_name('section', key.partition('.')[0], SECTIONS)}"
        given = [
            *self.sections.get("method", {}),
            *(key.partition(".")[2] for key in keys if key.startswith("method.")),
        ]
        for name in given:
            if all_known and name not in settings:
                of = f"method.{name}: none of {', '.join(methods)} has this setting"
                yield f"{of}: {unknown_name('setting', name, sorted(settings))}"
        tuned = [self.tune.metric] if self.tune else []
        for metric in (*self.metrics, *tuned, *self.printed, *(claim.metric for claim in self.claims if claim.metric)):
            if metric not in METRICS:
                yield unknown_name("metric", metric, METRICS)
            elif (needed := METRICS[metric].needs_target) and getattr(self.target, needed, None) is None:
                yield f"metric {metric} needs a [target] with metric and {needed}"
        labels = [self.reference or next(iter(self.methods)), *(name for claim in self.claims for name in claim.order)]
        for label in (*labels, *(label for of in self.printed.values() for label in of)):
            if label not in self.methods:
                yield unknown_name("label of a method", label, self.methods)
        points = [point for of in self.printed.values() for values in of.values() for point in values]
        for point in (*points, *(point for claim in self.claims for point in claim.at)):
            if point not in self.points:
                yield unknown_name("grid point", point, self.points)

    def first_seed(self) -> list[Cell]:
        """Returns the cells of the first seed, of all grid points; raises ConfigurationError as `cells`."""
        return replace(self, seeds=self.seeds[:1]).cells()

    def without_other_points(self, others: Iterable[str]) -> Experiment:
        """Returns a copy without claims about grid points of another scale only, whose printed values are apart."""
        gone = {point for point in others if point not in self.points}
        here, elsewhere = (
            {
                metric: {
                    label: chosen
                    for label, values in of.items()
                    if (chosen := {point: value for point, value in values.items() if (point in gone) == is_gone})
                }
                for metric, of in self.printed.items()
            }
            for is_gone in (False, True)
        )
        kept = [(claim, [point for point in claim.at if point not in gone]) for claim in self.claims]
        claims = [claim.model_copy(update={"at": at}) for claim, at in kept if at or not claim.at]
        return replace(self, printed=here, printed_elsewhere=elsewhere, claims=claims)


def _refuse(problems: Iterable[str]) -> None:
    """Raises ConfigurationError with all problems, each once, if there are any."""
    if found := list(dict.fromkeys(problems)):
        raise ConfigurationError("; ".join(found))


def join_names(*names: str) -> str:
    """Returns the names of a cell, such as its label and grid point, without empty ones."""
    return ", ".join(name for name in names if name)


def _of_section(settings: Mapping[str, Any], section: str) -> dict[str, Any]:
    return {key.partition(".")[2]: value for key, value in settings.items() if key.partition(".")[0] == section}


def _digest(simulation: Simulation) -> str:
    """Returns a digest of all settings that decide a simulation's results, the method's defaults included."""
    settings = settings_as_json(simulation)
    settings["settings"] = asdict(simulation.configuration())
    return hashlib.sha256(json.dumps(deciding(settings), sort_keys=True, default=str).encode()).hexdigest()[:12]


def packaged() -> dict[str, Path]:
    """Returns the files of the experiments that come with the package, by name."""
    folder = Path(str(resources.files("fleetdistill_lab.experiments"))) / "definitions"
    return {file.stem: file for file in sorted(folder.glob("*.toml"))}


def find_experiment(name: str) -> Path:
    """Returns the file of an experiment, given its path, or its name if it comes with the package.

    Raises:
        ConfigurationError: There is no such file.
    """
    path, known = Path(name), packaged()
    if path.suffix == ".toml" or path.exists():
        return path
    if name not in known:
        raise ConfigurationError(f"{unknown_name('experiment', name, known)}; or enter the path of a TOML file")
    return known[name]


def read_experiment(file: Path, scale: str = "") -> Experiment:
    """Reads an experiment.

    Args:
        file: TOML file; docs/how-to/run-experiments.md describes its contents.
        scale: Name of a section under [scales] whose settings replace those of the file; empty or `paper` for none.

    Raises:
        ConfigurationError: The file cannot be read, an entry is unknown or has another type, or a setting of a run is
            out of range.
    """
    contents = read_toml(file)
    scales = contents.pop("scales", {})
    result = usual = _make(file, contents, SCALE)
    try:
        if scale and scale != SCALE:
            if scale not in scales:
                raise ConfigurationError(unknown_name("scale", scale, (SCALE, *scales)))
            usual.check_names()
            changes = dict(scales[scale])
            if "note" in changes:  # what the file's own note discloses is true with any scale
                changes["note"] = f"{contents.get('note', '')} Scale {scale}: {changes['note']}".strip()
            grid = {**contents.get("grid", {}), **changes.pop("grid", {})}  # an axis is replaced, not merged
            result = _make(file, {**_merge(contents, changes), "grid": grid}, scale).without_other_points(usual.points)
        one_seed = replace(result, seeds=result.seeds[:1])
        one_seed.cells()
        one_seed.tuning_cells()
    except ConfigurationError as error:
        raise ConfigurationError(f"{file}: {str(error).removeprefix(f'{file}: ')}") from error
    return result


def _make(file: Path, contents: Mapping[str, Any], scale: str) -> Experiment:
    try:
        read = _File.model_validate(contents)
    except ValidationError as error:
        found = {_where(one): one for one in reversed(error.errors())}  # of each place the first one
        said = "; ".join(_in_words(*item) for item in reversed(found.items()))
        raise ConfigurationError(f"{file}: {said}") from error
    modules = read.simulation.get("modules")
    if isinstance(modules, list) and all(isinstance(module, str) for module in modules):  # else a later check says so
        import_modules(modules, f"{file}: [simulation] modules")
    return Experiment(
        name=file.stem,
        title=read.title or file.stem,
        source=read.source,
        note=read.note,
        scale=scale,
        seeds=read.seeds,
        metrics=read.metrics,
        reference=read.reference,
        target=read.target,
        tune=read.tune,
        sections={name: getattr(read, name) for name in SECTIONS},
        grid={axis: _points(axis, points) for axis, points in read.grid.items()},
        methods=read.methods,
        claims=read.claims,
        printed=read.printed,
        folder=file.parent,
        is_file=True,
    )


def _where(error: ErrorDetails) -> str:
    """Returns a place of a file, without what Pydantic appends for the branches of a union."""
    return ".".join(part for part in map(str, error["loc"]) if not part.startswith(("list[", "dict[", "float")))


def _in_words(where: str, error: ErrorDetails) -> str:
    """Returns what is wrong at a place of a file."""
    if error["type"] != "extra_forbidden":
        said = error["msg"].removeprefix("Value error, ")
        return said if said.startswith(f"{where} is ") else f"{where}: {said}"
    known = _KEYS[error["loc"][0]] if len(error["loc"]) > 1 else [*_File.model_fields, "scales"]
    return f"{where}: {unknown_name('key', str(error['loc'][-1]), known)}"


def _points(axis: str, points: Sequence[Any] | Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the points of an axis by name: a setting's values, or named points with several settings each."""
    if isinstance(points, Mapping):
        return {name: {_full(key): value for key, value in settings.items()} for name, settings in points.items()}
    short = axis.partition(".")[2] or axis
    return {f"{short} {_text(value)}": {_full(axis): value} for value in points}


def _text(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, list) else str(value)


def _full(key: str) -> str:
    return key if "." in key else f"simulation.{key}"


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a nested mapping with changes; mappings in both are merged."""
    result = dict(base)
    for name, value in changes.items():
        old = result.get(name)
        result[name] = _merge(old, value) if isinstance(value, dict) and isinstance(old, dict) else value
    return result
