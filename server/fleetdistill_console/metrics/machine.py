"""Figures of the server's machine: disk, processes, certificates, version."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import psutil
from cryptography import x509
from prometheus_client.metrics_core import Metric

from fleetdistill.errors import StoreError
from fleetdistill.link.credentials import AUTHORITIES
from fleetdistill.version import VERSION
from fleetdistill_console.metrics import catalogue
from fleetdistill_console.metrics.catalogue import Samples
from fleetdistill_console.metrics.files import keep_only_engines
from fleetdistill_server.config.server_config import ServerSection
from fleetdistill_server.security.pki import SERVER
from fleetdistill_server.service.engine_files import engine_directory
from fleetdistill_server.service.heartbeat import FILE
from fleetdistill_server.service.process_state import ENGINE, ProcessState
from fleetdistill_server.store.disk_space import bytes_under

MEASURED_SECONDS = 30.0
"""Time for which the measured size of the store answers further scrapes; a large store has many files."""
Processes = Callable[[], Sequence[ProcessState]]


class MachineCollector:
    """Measures at each scrape, except for the size of the store.

    Args:
        config: Settings of the server.
        processes: Returns the processes that the supervisor runs.
        clock: A monotonic clock in seconds.
    """

    def __init__(
        self, config: ServerSection, processes: Processes, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._store = Path(config.store)
        self._processes = processes
        self._clock = clock
        self._lock = threading.Lock()
        self._measured: tuple[float, int] | None = None

    def collect(self) -> Iterable[Metric]:
        """Returns the metrics; those that cannot be measured are missing."""
        samples = Samples().add(catalogue.BUILD, 1, VERSION)
        samples.add(catalogue.DISK_KEEP_FREE, self._config.keep_free_bytes)
        samples.add(catalogue.DISK_BUDGET, self._config.disk_budget_bytes)
        with contextlib.suppress(OSError, StoreError):
            samples.add(catalogue.DISK_FREE, shutil.disk_usage(self._store).free)
            samples.add(catalogue.DISK_USED, self._used())
        self._add_certificates(samples)
        self._add_processes(samples)
        return samples.metrics()

    def _used(self) -> int:
        with self._lock:
            if self._measured is None or self._clock() - self._measured[0] >= MEASURED_SECONDS:
                self._measured = self._clock(), bytes_under(self._store)
            return self._measured[1]

    def _add_certificates(self, samples: Samples) -> None:
        tls = self._config.tls()
        files = {} if tls is None else {"server": tls.directory / SERVER, "ca": tls.directory / AUTHORITIES}
        for name, path in files.items():
            with contextlib.suppress(OSError, ValueError):  # it is being replaced
                first = x509.load_pem_x509_certificates(path.read_bytes())[0]
                samples.add(catalogue.CERTIFICATE, first.not_valid_after_utc.timestamp(), name)

    def _add_processes(self, samples: Samples) -> None:
        processes = self._processes()
        keep_only_engines(
            self._store, [process.run for process in processes if process.name == ENGINE and process.pid is not None]
        )
        for process in processes:
            samples.add(catalogue.UP, int(process.works), process.name, process.run)
            samples.add(catalogue.RESTARTS, process.restarts, process.name, process.run)
            if process.pid is not None:
                _add_use(samples, process, process.pid)
                if process.name == ENGINE:
                    beat = engine_directory(self._store, process.run) / FILE
                    with contextlib.suppress(OSError):  # it starts
                        samples.add(catalogue.BEAT, beat.stat().st_mtime, process.run)


def _add_use(samples: Samples, one: ProcessState, pid: int) -> None:
    """Adds memory and processor time of a process with its children, such as those of torchrun."""
    memory, seconds = 0, 0.0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for member in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error), member.oneshot():
                memory += member.memory_info().rss
                seconds += sum(member.cpu_times()[:2])
        samples.add(catalogue.MEMORY, memory, one.name, one.run)
        samples.add(catalogue.CPU, seconds, one.name, one.run)
