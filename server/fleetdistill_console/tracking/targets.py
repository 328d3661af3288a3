"""`--track`: where figures are copied to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from fleetdistill.errors import ConfigurationError, in_words
from fleetdistill_server.extras import require

MLFLOW, TENSORBOARD = "mlflow", "tensorboard"
_PACKAGES = {MLFLOW: "mlflow", TENSORBOARD: "tensorboard"}


@dataclass(frozen=True)
class Target:
    """A place that figures are copied to.

    Attributes:
        kind: `mlflow` or `tensorboard`.
        where: URI of an MLflow tracking server, or a directory of event files.
    """

    kind: str
    where: str

    def __str__(self) -> str:
        """Returns the target without the user and the password of its URI."""
        parts = urlsplit(self.where)
        host = parts.netloc.rpartition("@")[2]
        return f"{self.kind}:{urlunsplit(parts._replace(netloc=host)) if '@' in parts.netloc else self.where}"

    @property
    def secrets(self) -> list[str]:
        """The parts of the URI that must not be logged, the longest first."""
        result = urlsplit(self.where)
        user = result.netloc.rpartition("@")[0]
        return [f"{user}@", *([result.password] if result.password else [])] if user else []


@dataclass(frozen=True)
class Tracking:
    """What is copied where.

    Attributes:
        targets: Places that figures are copied to; none for no tracking.
        experiment: MLflow experiment and folder below the TensorBoard directory; empty for MLflow's
            `MLFLOW_EXPERIMENT_NAME`, or `fleetdistill`, and for no folder.
        title: Name of the run there; empty for a name made from the run's settings.
    """

    targets: tuple[Target, ...] = ()
    experiment: str = ""
    title: str = ""


NOT_TRACKED = Tracking()
"""Copies nothing."""


def read_targets(values: Iterable[str]) -> tuple[Target, ...]:
    """Reads the values of `--track`, and creates the directories of TensorBoard.

    Raises:
        ConfigurationError: A value is malformed, its extra is not installed, or its directory cannot be created.
    """
    return tuple(_read(value) for value in dict.fromkeys(values))


def _read(value: str) -> Target:
    kind, _, where = value.partition(":")
    target = Target(kind, where)
    if kind not in _PACKAGES or not where:
        raise ConfigurationError(
            f"--track is {str(target) if where else value!r}, expected mlflow:URI, such as "
            "mlflow:http://127.0.0.1:5000, or tensorboard:DIRECTORY"
        )
    require(f"--track {kind}", _PACKAGES[kind], kind)
    if kind == TENSORBOARD:
        return Target(kind, _directory(where))
    return target


def _directory(where: str) -> str:
    try:
        Path(where).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"--track tensorboard:{where}: cannot create it: {in_words(error)}") from error
    return str(Path(where).resolve())
