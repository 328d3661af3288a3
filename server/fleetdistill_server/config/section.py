"""The base of every section of run.toml, reading and writing the file, and error messages for its settings."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from fleetdistill.errors import ConfigurationError, in_words
from fleetdistill.names import NAME_RULE, did_you_mean

__all__ = ["read_toml"]

_MAX_VALUE = 80
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_BRANCHES = ("int", "float", "str", "bool")
"""Names that Pydantic appends to a setting's location for the branches of a union."""

_WHOLE, _NUMBER, _TEXT = "a whole number", "a number", "text in quotes"
EXPECTED: Mapping[str, Callable[[dict[str, Any]], str]] = {
    "int_type": lambda of: _WHOLE,
    "int_from_float": lambda of: _WHOLE,
    "int_parsing_size": lambda of: f"{_WHOLE} of fewer digits",
    "float_type": lambda of: _NUMBER,
    "finite_number": lambda of: "a finite number",
    "string_type": lambda of: _TEXT,
    "bool_type": lambda of: "true or false",
    "list_type": lambda of: "a list",
    "dict_type": lambda of: "a section of settings",
    "model_type": lambda of: "a section of settings",
    "greater_than": lambda of: f"above {of['gt']:g}",
    "greater_than_equal": lambda of: f"at least {of['ge']}",
    "less_than": lambda of: f"below {of['lt']}",
    "less_than_equal": lambda of: f"at most {of['le']}",
    "too_short": lambda of: f"a list of at least {of['min_length']}",
    "string_too_long": lambda of: f"at most {of['max_length']} characters",
    "string_pattern_mismatch": lambda of: NAME_RULE,  # names are the only settings with a pattern
    "literal_error": lambda of: str(of["expected"]),
    "value_error": lambda of: str(of["error"]).removeprefix("must be "),
}
"""Maps Pydantic's error types to texts for what was expected, given the error's context."""


class Settings(BaseModel):
    """Immutable settings that accept no unknown key and convert no types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, regex_engine="python-re")


class Section(Settings):
    """A section of run.toml; its numbers are finite."""

    model_config = ConfigDict(allow_inf_nan=False)


def read_toml(path: Path) -> dict[str, Any]:
    """Returns the contents of a TOML file, unchecked.

    Raises:
        ConfigurationError: The file cannot be read or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigurationError(f"there is no file {path}; enter the path of a TOML file, such as run.toml") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path}: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read {path}: {in_words(error)}") from error


def as_toml(config: BaseModel) -> str:
    """Returns a configuration in the format of run.toml, including all defaults."""
    return tomli_w.dumps(config.model_dump(by_alias=True, exclude_none=True))


def sentences(error: ValidationError, known: Mapping[str, Sequence[str]], section: str = "") -> str:
    """Returns the error message, which gives each problem's location, value and expected value.

    Args:
        error: Pydantic's error.
        known: Settings by section; the sections are under "".
        section: Section of all settings, for the settings of a method.
    """
    problems: dict[str, list[ErrorDetails]] = {}
    for one in error.errors():
        problems.setdefault(_where(one, section), []).append(one)
    return "; ".join(_sentence(where, ones, known, section) for where, ones in problems.items())


def _sentence(where: str, found: Sequence[ErrorDetails], known: Mapping[str, Sequence[str]], section: str) -> str:
    first = found[0]
    path = _path(first, section)
    if first["type"] in _UNKNOWN:
        return f"{where}: {_unknown(path, known)}"
    if first["type"] == "missing":
        return f"{where} is missing"
    expected = " or ".join(dict.fromkeys(_expected(item) for item in found))
    if first["type"] == "value_error" and len(path) == 1:
        return f"{where}: {expected}"  # the error concerns the whole section, so its value does not help
    value = first["input"]
    close = did_you_mean(value, _choices(first)) if isinstance(value, str) else ""
    return f"{where} is {_shown(value)}, must be {expected}{close}"


def _unknown(path: Sequence[str], known: Mapping[str, Sequence[str]]) -> str:
    """Returns the message for an unknown key, with the section it belongs to or a similar name, and all known keys."""
    what, there = ("setting", known[path[0]]) if path[1:] else ("section", known[""])
    elsewhere = [name for name, keys in known.items() if path[-1] in keys and name]
    hint = f"; it belongs to [{elsewhere[0]}]." if path[1:] and elsewhere else did_you_mean(path[-1], there)
    return f"unknown {what}{f'{hint} Known' if hint else '; known'} are {', '.join(there)}"


def _expected(one: ErrorDetails) -> str:
    say = EXPECTED.get(one["type"])
    return say(one.get("ctx", {})) if say else "of another type"


def _choices(one: ErrorDetails) -> list[str]:
    expected = one["ctx"]["expected"] if one["type"] == "literal_error" else ""
    return re.findall(r"'([^']*)'", expected)


def _path(one: ErrorDetails, section: str) -> list[str]:
    path = [*([section] if section else []), *(str(part) for part in one["loc"])]
    return path[:-1] if len(path) > 2 and path[-1] in _BRANCHES else path


def _where(one: ErrorDetails, section: str) -> str:
    path = _path(one, section)
    key = ".".join(part or '""' for part in path[1:])
    return f"[{path[0]}] {key}".strip()


def _shown(value: object) -> str:
    """Returns a value in a notation close to TOML, truncated to `_MAX_VALUE` characters."""
    text = "none" if value is None else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}..."
