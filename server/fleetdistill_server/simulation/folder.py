"""The folder of a simulation: what it began with, so that it can go on, and that nothing is overwritten unasked."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from fleetdistill.errors import ConfigurationError, DataError
from fleetdistill.state.file_lock import lock_file
from fleetdistill_server.simulation.data.datasets import Dataset
from fleetdistill_server.simulation.data.own import digest_of, read_dataset, save_dataset
from fleetdistill_server.simulation.spec.settings import Simulation

IfThere = Literal["refuse", "overwrite", "resume"]
_MARKER = "made-by-fleetdistill"
_SETTINGS = "simulation.json"
_DATA = "dataset.npz"
"""Data of the user's own, which may be elsewhere when the simulation goes on."""
_RESULTS = ("report.json", "fleet.png", "onnx")


def check_folder(wanted: Simulation, if_there: IfThere) -> None:
    """Checks whether `open_folder` would take the folder; changes nothing.

    Raises:
        ConfigurationError: There is a simulation that is not to be overwritten, or one with other settings to resume.
        DataError: The folder holds files of others.
    """
    work = wanted.out / "work"
    if work.exists() and not (work / _MARKER).exists() and any(work.iterdir()):
        raise DataError(f"{work} is not empty and was not made by a simulation; choose another out folder")
    if if_there == "refuse":
        _refuse(wanted.out)
    if if_there == "resume" and _is_begun(wanted.out):
        _check_same(wanted)


@contextlib.contextmanager
def open_folder(wanted: Simulation, if_there: IfThere) -> Iterator[Path]:
    """Makes the work folder of a simulation, or takes it up again, and keeps others out of it meanwhile.

    Args:
        wanted: The simulation; its settings are kept in the folder.
        if_there: What to do with an earlier simulation in `out`: `refuse`, `overwrite` it, or `resume` it where it was.
            To resume where there is none is to begin.

    Yields:
        The folder `work` under `out`.

    Raises:
        ConfigurationError, DataError: As `check_folder`, or another simulation runs in the folder.
    """
    check_folder(wanted, if_there)
    work = wanted.out / "work"
    work.mkdir(parents=True, exist_ok=True)
    (work / _MARKER).touch()
    lock = lock_file(work / "lock")
    if lock is None:
        raise DataError(f"another simulation runs in {wanted.out}; wait for its end, or choose another out folder")
    with lock:
        if if_there != "resume" or not _is_begun(wanted.out):
            _clear(wanted.out)
            _save_settings(wanted)
        yield work.resolve()


def _is_begun(out: Path) -> bool:
    return (out / "work" / _SETTINGS).exists()


def _save_settings(wanted: Simulation) -> None:
    """Whole or not at all: a folder without them holds no simulation."""
    if isinstance(wanted.dataset, Dataset):
        save_dataset(wanted.dataset, wanted.out / "work" / _DATA)
    file = wanted.out / "work" / _SETTINGS
    new = file.with_suffix(".new")
    new.write_text(json.dumps(_as_json(wanted), indent=1))
    new.replace(file)


def saved_simulation(out: Path) -> Simulation:
    """The simulation that a folder was made for.

    Raises:
        ConfigurationError: There is none.
    """
    try:
        values: dict[str, Any] = json.loads((out / "work" / _SETTINGS).read_text())
        for name, value in values.items():
            if isinstance(value, list):
                values[name] = tuple(value)
        if isinstance(values["dataset"], dict):
            values["dataset"] = read_dataset(out / "work" / _DATA)
        values["data_dir"] = Path(values["data_dir"]) if values["data_dir"] else None
        return Simulation(**values, out=out)
    except (OSError, ValueError, KeyError, TypeError, DataError) as error:
        raise ConfigurationError(f"{out} holds no simulation to resume; begin one without --resume") from error


def _refuse(out: Path) -> None:
    if _is_begun(out) or (out / "report.json").exists():
        raise ConfigurationError(
            f"{out} holds an earlier simulation; --resume goes on with it, --overwrite replaces it, --out names "
            "another folder"
        )


def _check_same(wanted: Simulation) -> None:
    began, now = _as_json(saved_simulation(wanted.out)), _as_json(wanted)
    changed = [f"{name} was {began[name]!r}, is {now[name]!r}" for name in now if now[name] != began.get(name)]
    if changed:
        raise ConfigurationError(
            f"the simulation in {wanted.out} began with other settings: {'; '.join(changed)}; give the first ones, "
            "or replace it with --overwrite"
        )


def _as_json(wanted: Simulation) -> dict[str, Any]:
    """All settings but the folder, which another start may name from elsewhere."""
    values = {one.name: getattr(wanted, one.name) for one in fields(wanted) if one.name != "out"}
    if isinstance(wanted.dataset, Dataset):
        values["dataset"] = {"name": wanted.dataset.name, "sha256": digest_of(wanted.dataset)}
    known: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return known


def _clear(out: Path) -> None:
    """Deletes what an earlier simulation left, its settings first; the marker and the lock stay."""
    (out / "work" / _SETTINGS).unlink(missing_ok=True)
    for path in [*(out / name for name in _RESULTS), *(out / "work").iterdir()]:
        if path.name in (_MARKER, "lock"):
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
