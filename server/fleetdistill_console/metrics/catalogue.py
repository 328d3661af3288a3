"""Every metric of a server: its name, type, labels and meaning. The only place where they are defined.

Names follow Prometheus' conventions: the prefix `fleetdistill_`, base units (seconds, bytes, ratios), and `_total` for
counters. docs/how-to/monitor-a-server.md has the same table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prometheus_client.metrics_core import Metric


@dataclass(frozen=True)
class Description:
    """A metric.

    Attributes:
        name: Name; a histogram's samples have the suffixes `_bucket`, `_sum` and `_count`.
        type: Type in Prometheus' text format.
        labels: Names of the labels.
        help: One sentence for `# HELP`.
        buckets: Upper bounds of a histogram's buckets.
    """

    name: str
    type: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()

    @property
    def samples(self) -> tuple[str, ...]:
        """Names of the samples, which queries use."""
        if self.type != "histogram":
            return (self.name,)
        return tuple(f"{self.name}_{suffix}" for suffix in ("bucket", "sum", "count"))


def _gauge(name: str, help: str, *labels: str) -> Description:
    return Description(f"fleetdistill_{name}", "gauge", labels, help)


def _counter(name: str, help: str, *labels: str) -> Description:
    return Description(f"fleetdistill_{name}_total", "counter", labels, help)


def _histogram(name: str, help: str, buckets: tuple[float, ...]) -> Description:
    return Description(f"fleetdistill_{name}", "histogram", (), help, buckets)


BUILD = _gauge("build_info", "1; the label has the version of the server.", "version")
STORE_UP = _gauge("store_up", "Whether the store could be read for this scrape: 1 or 0.")
RUNS = _gauge("runs", "Runs in the store by status.", "status")
RUN_INFO = _gauge("run_info", "1 for the status that a run has.", "run", "method", "status")
PRESENT = _gauge("devices_present", "Devices that are checked in to a run.", "run")
ASKS = _gauge("asks", "Asks of a run's newest round that are answered or out, and all that are open.", "run", "state")
COMPLETED = _gauge("run_completed_rounds", "Completed rounds of a run; less after a rollback.", "run")
WANTED = _gauge("run_wanted_rounds", "Rounds that a run ends after; 0 for a run until stopped.", "run")
SHORT = _gauge("run_short_rounds", "Rounds in a row that fell short, up to now.", "run")
DEADLINE = _gauge("run_deadline_seconds", "[run] deadline_seconds.", "run")
UNFINISHED = _gauge(
    "run_unfinished_since_timestamp_seconds",
    "Start of the first round since the last completed one; absent while no round is due.",
    "run",
)
LAST_COMPLETED = _gauge("run_last_completed_timestamp_seconds", "End of a run's last completed round.", "run")
ROUND_SECONDS = _gauge("last_round_duration_seconds", "Duration of a run's last completed round.", "run")
ACCURACY = _gauge(
    "last_round_accuracy_ratio",
    "Accuracy that devices reported for the last completed round, averaged over the devices.",
    *("run", "split"),
)
LOSS = _gauge(
    "last_round_loss",
    "Loss that devices reported for the last completed round, averaged over the devices.",
    *("run", "split"),
)
GLOBAL_ACCURACY = _gauge(
    "last_round_global_accuracy_ratio",
    "Accuracy of the global model on [evaluation] data after the last completed round.",
    "run",
)
METHOD_FIGURE = _gauge(
    "last_round_method_figure",
    "Number that the method reported for the last completed round, as in `runs show`.",
    *("run", "figure"),
)
SUMS = _counter(
    "secure_sums",
    "Secure sums of a run in its events, not yet reviewed by a cryptographer; outcome is made or failed.",
    *("run", "outcome"),
)
SUM_DEVICES = _gauge(
    "last_secure_sum_devices",
    "Devices of a run's last secure sum that were asked and answered each step, and its limits q and t.",
    *("run", "state"),
)
SUM_SECONDS = _gauge("last_secure_sum_duration_seconds", "Duration of a run's last secure sum, made or failed.", "run")
BEGUN = _counter("uploads_begun", "Upload calls that reached the front.")
ACKNOWLEDGED = _counter("uploads_acknowledged", "Answers that were committed, so that their receipt exists.")
REFUSED = _counter("uploads_refused", "Upload calls that ended with an error code of the server.", "code")
BYTES = _counter(
    "link_bytes",
    "Bytes of payloads on the link, after compression; kind is that of the part, envelope or refused.",
    *("direction", "kind"),
)
CALLS = _counter(
    "calls",
    "Calls that ended, by method; code is ok, an error code of the server, or broken.",
    *("method", "code"),
)
RECEIPT = _histogram(
    "receipt_duration_seconds",
    "Seconds from the last byte of an answer to its receipt: checks, fsync and commit.",
    (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
GROUPS = _histogram(
    "commit_group_size",
    "Jobs that the front commits together, with one fsync.",
    (1, 2, 5, 10, 20, 50, 100, 200, 500),
)
LAG = _histogram(
    "front_event_loop_lag_seconds",
    "Delay of a timer of the front's event loop.",
    (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0),
)
TICK = _gauge("front_last_tick_timestamp_seconds", "Last time at which the front's event loop ran a timer.")
PHASE = _gauge("engine_phase", "1 for what a run's engine does at present, 0 for everything else.", "run", "phase")
PROGRESS = _gauge(
    "engine_progress_ratio", "Completed part of the engine's current training; 0 outside one and for short ones.", "run"
)
GPU_MEMORY = _gauge(
    "engine_gpu_memory_bytes",
    "Memory of the engine's GPU: used by tensors (allocated), kept by PyTorch (reserved), free and total.",
    *("run", "state"),
)
BEAT = _gauge(
    "engine_last_heartbeat_timestamp_seconds",
    "Last heartbeat of a run's engine, one a second, also while it trains; absent while it starts or does not run.",
    "run",
)
UP = _gauge(
    "process_up",
    "1 for a process of the server that runs; 0 for others, and for a front that fails again and again.",
    *("process", "run"),
)
RESTARTS = _counter("process_restarts", "Restarts of a process since the server was started.", "process", "run")
MEMORY = _gauge("process_resident_memory_bytes", "Memory of a process, with its children's.", *("process", "run"))
CPU = _counter(
    "process_cpu_seconds", "Processor time of a process and its children, since its last start.", *("process", "run")
)
DISK_USED = _gauge("disk_used_bytes", "Size of the store's directory, measured at most every 30 seconds.")
DISK_FREE = _gauge("disk_free_bytes", "Free space on the store's disk.")
DISK_KEEP_FREE = _gauge("disk_keep_free_bytes", "[server] keep_free_bytes, below which uploads are refused.")
DISK_BUDGET = _gauge("disk_budget_bytes", "[server] disk_budget_bytes; 0 for no limit.")
BACKUP = _gauge("last_backup_timestamp_seconds", "When the newest backup was made; absent if none was.")
CERTIFICATE = _gauge(
    "certificate_expiry_timestamp_seconds",
    "End of the validity of the server's certificate or of the CA that signed it.",
    "certificate",
)

CATALOGUE = tuple(value for value in list(globals().values()) if isinstance(value, Description))
"""All metrics."""


class Samples:
    """Collects values and returns them as metrics."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def add(self, what: Description, value: float, *labels: str) -> Samples:
        """Adds a value with the values of the metric's labels, in their order."""
        name = what.name.removesuffix("_total") if what.type == "counter" else what.name
        metric = self._metrics.setdefault(what.name, Metric(name, what.help, what.type))
        metric.add_sample(what.name, dict(zip(what.labels, labels, strict=True)), value)
        return self

    def metrics(self) -> list[Metric]:
        """Returns the metrics in the order in which they were first added."""
        return list(self._metrics.values())
