"""The base of every section of run.toml, and reading and writing the file."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ConfigDict

from fleetdistill.errors import ConfigurationError, in_words

__all__ = ["read_toml"]


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
