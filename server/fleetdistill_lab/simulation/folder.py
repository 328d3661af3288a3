"""Manages a simulation's folder: saves its settings for a resume and protects existing files."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal

from fleetdistill.errors import ConfigurationError, DataError
from fleetdistill.state.file_lock import lock_file
from fleetdistill_lab.simulation.data.datasets import Dataset
from fleetdistill_lab.simulation.data.own import digest_of, read_dataset, save_dataset
from fleetdistill_lab.simulation.report.plots import FIGURES
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_lab.simulation.timing.behaviour import saved_behaviour

IfThere = Literal["refuse", "overwrite", "resume"]
_MARKER = "made-by-fleetdistill"
_SETTINGS = "simulation.json"
_DATA = "dataset.npz"
"""File with a copy of the user's own data, so that a resumed simulation does not depend on the original."""
_FREE_TO_CHANGE = ("data_dir", "workers", "backend", "ray_address", "export", "figure", "panels")
"""Settings that do not change the run, so that a resumed simulation may have others."""
_RESULTS = ("report.json", *(f"fleet.{kind}" for kind in FIGURES), "onnx")


def check_folder(wanted: Simulation, if_there: IfThere) -> None:
    """Checks whether `open_folder` would accept the folder, without changing anything.

    Raises:
        ConfigurationError: The folder contains a simulation and `if_there` is `refuse`, or one with other settings
            and `if_there` is `resume`.
        DataError: The folder's `work` contains files that no simulation wrote.
    """
    work = wanted.out / "work"
    if work.exists() and not (work / _MARKER).exists() and any(work.iterdir()):
        raise DataError(f"{work} is not empty and was not created by a simulation; choose another --out folder")
    if if_there == "refuse":
        _refuse(wanted.out)
    if if_there == "resume" and _is_begun(wanted.out):
        _check_same(wanted)


@contextlib.contextmanager
def open_folder(wanted: Simulation, if_there: IfThere) -> Iterator[Path]:
    """Creates or reopens a simulation's work folder and locks it for the duration of the context.

    Args:
        wanted: Settings of the simulation, which are saved in the folder.
        if_there: How to handle an earlier simulation in `out`: `refuse` raises an error, `overwrite` deletes it, and
            `resume` continues it, or begins if there is none.

    Yields:
        The folder `work` under `out`.

    Raises:
        ConfigurationError: See `check_folder`.
        DataError: See `check_folder`; or another simulation is running in the folder.
    """
    check_folder(wanted, if_there)
    work = wanted.out / "work"
    work.mkdir(parents=True, exist_ok=True)
    (work / _MARKER).touch()
    lock = lock_file(work / "lock")
    if lock is None:
        raise DataError(f"another simulation is running in {wanted.out}; wait for it, or choose another --out folder")
    with lock:
        if if_there != "resume" or not _is_begun(wanted.out):
            _clear(wanted.out)
            _save_settings(wanted)
        yield work.resolve()


def discard_folder(out: Path) -> None:
    """Deletes a simulation that has no round, and its folder if nothing else is in it."""
    shutil.rmtree(out / "work")
    with contextlib.suppress(OSError):
        out.rmdir()


def _is_begun(out: Path) -> bool:
    return (out / "work" / _SETTINGS).exists()


def _save_settings(wanted: Simulation) -> None:
    """Saves the settings atomically and last, because they mark the folder as containing a simulation."""
    if isinstance(wanted.dataset, Dataset):
        save_dataset(wanted.dataset, wanted.out / "work" / _DATA)
    file = wanted.out / "work" / _SETTINGS
    new = file.with_suffix(".new")
    new.write_text(json.dumps(settings_as_json(wanted), indent=1))
    new.replace(file)


def saved_settings(out: Path) -> tuple[dict[str, Any], float]:
    """Returns the settings that `open_folder` saved, and the Unix time at which the simulation began."""
    file = out / "work" / _SETTINGS
    values: dict[str, Any] = json.loads(file.read_text())
    return values, file.stat().st_mtime


def saved_simulation(out: Path) -> Simulation:
    """Loads the settings of the simulation in a folder.

    Raises:
        ConfigurationError: The folder does not contain a simulation.
    """
    try:
        values: dict[str, Any] = json.loads((out / "work" / _SETTINGS).read_text())
        for name, value in values.items():
            if isinstance(value, list):
                values[name] = tuple(value)
        if isinstance(values["dataset"], dict):
            values["dataset"] = read_dataset(out / "work" / _DATA)
        if values.get("behaviour"):
            values["behaviour"] = saved_behaviour(values["behaviour"])
        values["data_dir"] = Path(values["data_dir"]) if values["data_dir"] else None
        return Simulation(**values, out=out)
    except (OSError, ValueError, KeyError, TypeError, DataError) as error:
        raise ConfigurationError(f"{out} contains no simulation to resume; start one without --resume") from error


def _refuse(out: Path) -> None:
    if _is_begun(out) or (out / "report.json").exists():
        raise ConfigurationError(
            f"{out} contains an earlier simulation; continue it with --resume, replace it with --overwrite, or choose "
            "another folder with --out"
        )


def _check_same(wanted: Simulation) -> None:
    began, now = settings_as_json(saved_simulation(wanted.out)), settings_as_json(wanted)
    compared = {**deciding(began), **deciding(now)}
    changed = [f"{name} was {began[name]!r}, is {now[name]!r}" for name in compared if now[name] != began.get(name)]
    if changed:
        raise ConfigurationError(
            f"the simulation in {wanted.out} began with other settings: {'; '.join(changed)}; use the original "
            "settings, or replace it with --overwrite"
        )


def settings_as_json(wanted: Simulation) -> dict[str, Any]:
    """Returns all settings except `out`, whose path may differ on a resume."""
    values = {field.name: getattr(wanted, field.name) for field in fields(wanted) if field.name != "out"}
    if wanted.behaviour is not None:
        values["behaviour"] = asdict(wanted.behaviour)
    if isinstance(wanted.dataset, Dataset):
        values["dataset"] = {"name": wanted.dataset.name, "sha256": digest_of(wanted.dataset)}
    known: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return known


def deciding(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of `settings_as_json` that decide the results: the backend only if it changes how they round."""
    free = set(_FREE_TO_CHANGE) - ({"backend"} if settings["backend"] == "stacked" else set())
    return {name: value for name, value in settings.items() if name not in free}


def _clear(out: Path) -> None:
    """Deletes an earlier simulation's files, its settings first; keeps the marker and the lock."""
    (out / "work" / _SETTINGS).unlink(missing_ok=True)
    for path in [*(out / name for name in _RESULTS), *(out / "work").iterdir()]:
        if path.name in (_MARKER, "lock"):
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
