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
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from fleetdistill_server.store.blobs import disk_errors

_DIRECTORY = "metrics"
_KINDS = ("counter", "histogram", "gauge_livemostrecent")
"""Beginnings of the names that prometheus-client gives to its files."""
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


def keep_values(store: Path, task: str) -> None:
    """Makes this process's metrics live in files of its task, from the values of an earlier process on.

    Call it before the first metric is created. The files get their full size at once, because a page of a mapped file
    that does not fit on the disk would end the process.

    Raises:
        OSError: There is no space for the files.
    """
    directory = store / _DIRECTORY
    directory.mkdir(mode=0o700, exist_ok=True)
    for kind in _KINDS:
        _write_zeros(directory / f"{kind}_{task}.db")
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(directory)
    values.ValueClass = values.MultiProcessValue(lambda: task)


def forget_values(store: Path, tasks: Iterable[str]) -> None:
    """Deletes the gauges of ended processes, which would otherwise stay as they were."""
    for task in tasks:
        with contextlib.suppress(FileNotFoundError):
            mark_process_dead(task, str(store / _DIRECTORY))


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
