"""The files in which front and engines keep their metrics, and their merging at a scrape."""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from prometheus_client import values
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

from fleetdistill_server.store.blobs import disk_errors

_DIRECTORY = "metrics"
_GAUGES = "gauge_livemostrecent"
OF_A_FRONT, OF_AN_ENGINE = ("counter", "histogram", _GAUGES), (_GAUGES,)
"""Beginnings of the names that prometheus-client gives to a process's files, by type and merging of the metrics."""
_FILE_BYTES = 256 << 10
"""Room for more samples than a process can have: about 250 bytes for each of the methods' codes."""
FRONT = "front"


def engine_of(run: str) -> str:
    """Returns the task of a run's engine, in characters that are safe in file names."""
    return f"engine-{sha256(run.encode()).hexdigest()[:16]}"


def clear(store: Path) -> None:
    """Deletes the files of an earlier server of a store. Raises StoreError."""
    with disk_errors("clearing the metrics"):
        shutil.rmtree(store / _DIRECTORY, ignore_errors=True)
        (store / _DIRECTORY).mkdir(mode=0o700, exist_ok=True)


def keep_values(store: Path, task: str, kinds: Iterable[str]) -> None:
    """Makes this process's metrics live in files of its task, from the values of an earlier process on.

    Call it before the first metric is created. The files get their full size at once, because a page of a mapped file
    that does not fit on the disk would end the process.

    Raises:
        OSError: There is no space for the files.
    """
    directory = store / _DIRECTORY
    directory.mkdir(mode=0o700, exist_ok=True)
    for kind in kinds:
        _write_zeros(_path(store, kind, task))
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(directory)
    values.ValueClass = values.MultiProcessValue(lambda: task)


def keep_only_engines(store: Path, runs: Iterable[str]) -> None:
    """Deletes the gauges of all engines but those of some runs; they would otherwise stay as they were."""
    kept = {_path(store, _GAUGES, engine_of(run)) for run in runs}
    with contextlib.suppress(OSError):
        for path in (store / _DIRECTORY).glob(f"{_GAUGES}_engine-*.db"):
            if path not in kept:
                path.unlink(missing_ok=True)


def _path(store: Path, kind: str, task: str) -> Path:
    return store / _DIRECTORY / f"{kind}_{task}.db"


def _write_zeros(path: Path) -> None:
    """Writes a file of zeros, which is an empty one to prometheus-client, unless it exists."""
    if not path.exists():
        fresh = path.with_suffix(".new")
        fresh.write_bytes(bytes(_FILE_BYTES))
        fresh.replace(path)


class FilesCollector:
    """Merges the files of all processes at a scrape."""

    def __init__(self, store: Path) -> None:
        self._merged = MultiProcessCollector(None, str(store / _DIRECTORY))

    def collect(self) -> Iterable[Metric]:
        """Returns the metrics; none if a process begins or ends at this moment and changes its files."""
        try:
            return list(self._merged.collect())
        except (OSError, struct.error, RuntimeError):
            return []
