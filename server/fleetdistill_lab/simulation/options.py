"""Options of `simulate`, and its settings in a file and with `--set`, made from the fields of `Simulation`.

A setting is defined once, in `Simulation` or `FleetBehaviour`: name, type, default and description. The usual ones have
an option; the file and `--set` take all.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from pydantic import TypeAdapter, ValidationError

from fleetdistill.errors import ConfigurationError
from fleetdistill.names import unknown_name
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_lab.simulation.timing.behaviour import FleetBehaviour
from fleetdistill_lab.simulation.timing.traces import read_traces
from fleetdistill_server.config.section import read_toml

OPTIONS: dict[str, tuple[str, Any]] = {
    "method": ("--method", str),
    "modules": ("--import", list[str]),
    "dataset": ("--dataset", str),
    "data_dir": ("--data-dir", Path),
    "devices": ("--devices", int),
    "models": ("--model", list[str]),
    "extractor": ("--extractor", str),
    "alpha": ("--alpha", float),
    "rounds": ("--rounds", int),
    "seed": ("--seed", int),
    "link": ("--link", str),
    "workers": ("--workers", str),
    "score": ("--score", str),
    "score_every": ("--score-every", int),
    "score_rows": ("--score-rows", int),
    "export": ("--export", str),
    "figure": ("--figure", str),
    "panels": ("--panels", list[str]),
    "out": ("--out", Path),
}
"""Fields of `Simulation` that have an option, with its name and type; an option with a list can be repeated."""
_VARIABLES = {"data_dir": "FLEETDISTILL_DATA"}
_SECTIONS = {"simulation": Simulation, "fleet": FleetBehaviour}
"""Sections with the fields of a class."""
_CHECKED_LATER = {"method": "settings", "partition": "partition_settings"}
"""Sections with the settings of what a field names, and the fields of `Simulation` that have them."""
_PATHS = {"simulation": ("dataset", "data_dir", "extractor_weights"), "fleet": ("traces",)}
"""Settings that are paths; a data set, or an extractor's weights, may also be a name."""
_NO_LIST = ("tuple_type", "sequence_str", "is_instance_of")
"""pydantic's errors for a value that is not a list."""
_OTHER_SECTIONS = (*_CHECKED_LATER.values(), "behaviour")
"""Fields of `Simulation` that have a section of their own."""


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorates a command: it takes an option for each entry of OPTIONS, by the field's name."""
    described = dict(_descriptions(Simulation))
    defaults = {field.name: field.default or None for field in dataclasses.fields(Simulation) if field.name in OPTIONS}
    own = inspect.signature(command, eval_str=True).parameters.values()
    made = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults[name],
            annotation=Annotated[kind | None, typer.Option(flag, envvar=_VARIABLES.get(name), help=described[name])],
        )
        for name, (flag, kind) in OPTIONS.items()
    ]
    parameters = [item for item in own if item.kind != inspect.Parameter.VAR_KEYWORD]
    first = [parameter for parameter in parameters if parameter.kind != inspect.Parameter.KEYWORD_ONLY]
    command.__signature__ = inspect.Signature([*first, *made, *parameters[len(first) :]])  # type: ignore[attr-defined]
    command.__annotations__ = {item.name: item.annotation for item in (*parameters, *made)}
    return command


def _descriptions(described: type) -> Iterator[tuple[str, str]]:
    """Yields the name and the first sentence of each entry under `Attributes:` in a class's docstring."""
    text = (inspect.getdoc(described) or "").partition("Attributes:\n")[2]
    for name, entry in re.findall(r"^    (\w+): (.*?)(?=^    \w|\Z)", text, re.MULTILINE | re.DOTALL):
        sentence = re.split(r"(?<=[.;])\s", " ".join(entry.split()))[0]
        yield name, f"{sentence.rstrip('.;')}.".replace("`", "")


def read_settings(file: Path | None, texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Reads the settings of a file and of `--set`, which precede those of the file.

    Args:
        file: TOML file with the sections [simulation], [method], [partition] and [fleet], or some of them, or None.
        texts: Settings as `section.key=value` with a TOML value; an unquoted word is a string.

    Returns:
        Settings by section, with the types of their fields. Paths in the file are relative to the file.

    Raises:
        ConfigurationError: The file cannot be read, or a section or a setting is unknown or has another type.
        DataError: A file of traces cannot be read.
    """
    sections: dict[str, dict[str, Any]] = {}
    for where, section, values in _given(file, texts):
        sections.setdefault(section, {}).update(check_section(where, section, values))
    return sections


def read_values(file: Path | None, texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """As `read_settings`, with the checked values as a TOML file has them and absolute paths."""
    sections: dict[str, dict[str, Any]] = {}
    for where, section, values in _given(file, texts):
        check_section(where, section, values)
        sections.setdefault(section, {}).update(values)
    return sections


def _given(file: Path | None, texts: Sequence[str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields where each setting is, its section, and the values with absolute paths."""
    if file is not None:
        for section, values in read_toml(file).items():
            if not isinstance(values, dict):
                raise ConfigurationError(f"{file}: {section} is outside a section; put it below [simulation]")
            yield f"{file}: ", section, absolute_paths(section, values, file.parent)
    for text in texts:
        section, key, value = _parse(text)
        yield "--set ", section, absolute_paths(section, {key: value}, Path())


def absolute_paths(section: str, values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the settings of a section, with those that are relative paths made absolute.

    Args:
        section: Name of the section.
        values: Its settings.
        folder: What the paths are relative to.
    """
    result = dict(values)
    for key in _PATHS.get(section, ()):
        if isinstance(value := values.get(key), str):
            path = folder.absolute() / Path(value).expanduser()
            is_name = {"dataset": path.suffix != ".npz", "extractor_weights": not path.is_file()}.get(key, False)
            result[key] = value if is_name else str(path)
    return result


def _parse(text: str) -> tuple[str, str, Any]:
    where, equals, value = text.partition("=")
    section, dot, key = where.strip().partition(".")
    if not equals or not dot:
        raise ConfigurationError(
            f"--set is {text!r}, expected section.key=value, such as method.refinement=kkr or simulation.quorum=0.5"
        )
    try:
        return section, key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return section, key, value


def check_section(where: str, section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a section with the types of its class; a method's or partition's are checked later."""
    if section in _CHECKED_LATER:
        return dict(values)
    if section not in _SECTIONS:
        raise ConfigurationError(f"{where}{unknown_name('section', section, (*_SECTIONS, *_CHECKED_LATER))}")
    types = {
        field.name: field.type for field in dataclasses.fields(_SECTIONS[section]) if field.name not in _OTHER_SECTIONS
    }
    module = vars(sys.modules[_SECTIONS[section].__module__])
    checked, problems = dict[str, Any](), list[str]()
    for key, value in values.items():
        if key not in types:
            problems.append(f"{where}[{section}] {unknown_name('setting', key, types)}")
        elif key == "traces":
            checked[key] = read_traces(str(value))
        elif key == "dataset":
            checked[key] = str(value)
        else:
            kind = get_type_hints(type("Field", (), {"__annotations__": {key: types[key]}}), module)[key]
            try:
                checked[key] = _typed(f"{where}[{section}] {key}", value, kind)
            except ConfigurationError as error:
                problems.append(str(error))
    if problems:
        raise ConfigurationError("; ".join(problems))
    return checked


def _typed(name: str, value: Any, kind: Any) -> Any:
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        expected = f", expected a list, such as {json.dumps([str(value)])}" if first["type"] in _NO_LIST else ""
        is_list = isinstance(value, list) and not first["loc"]
        hint = "; to try several values, put the list in [grid] of an experiment's file" if is_list else ""
        raise ConfigurationError(f"{name} is {value!r}{expected or ': ' + first['msg']}{hint}") from error


def merge_settings(base: Simulation | None, sections: Mapping[str, Mapping[str, Any]]) -> Simulation:
    """Returns a simulation with the settings of sections; all others are those of `base`, or without it the defaults.

    Raises:
        ConfigurationError: A setting is out of range.
    """
    fields = dict(sections.get("simulation", {}))
    for section, name in _CHECKED_LATER.items():
        if section in sections:
            fields[name] = {**(getattr(base, name) if base else {}), **sections[section]}
    if "fleet" in sections:
        earlier = base.behaviour if base else None
        fields["behaviour"] = dataclasses.replace(earlier or FleetBehaviour(), **sections["fleet"])
    return dataclasses.replace(base, **fields) if base else Simulation(**fields)


def not_begun(out: Path) -> str:
    """Returns the line that is printed after Ctrl-C before a simulation has begun."""
    return f"interrupted before the simulation started; nothing was changed in {out}; run the command again"
