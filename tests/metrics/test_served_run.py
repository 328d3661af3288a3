"""The metrics of a served run with real devices: complete, equal to the store, and without secrets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from metrics.promtool import needs_promtool, promtool
from support.open_device import open_device
from support.processes import PATIENCE_SECONDS, free_port, wait_until
from support.scraping import Scraped, scraped_until
from support.secured import make_pki
from support.served import RUN, served
from torch import nn

from fleetdistill import COLUMNS
from fleetdistill.models import build_model
from fleetdistill_console.metrics.catalogue import CATALOGUE
from fleetdistill_console.metrics.engine import PHASES
from fleetdistill_server.security.tokens import create_tokens, load_enrol_port
from fleetdistill_server.store.store import Store

pytestmark = pytest.mark.slow
DEVICES = ("camera-7", "camera-8")
MISSING = {
    "fleetdistill_engine_gpu_memory_bytes",  # without a GPU
    "fleetdistill_last_backup_timestamp_seconds",  # none is made; see test_runs.py
    "fleetdistill_secure_sums_total",  # FedAvg makes none; see test_runs.py
    "fleetdistill_last_secure_sum_devices",
    "fleetdistill_last_secure_sum_duration_seconds",
    "fleetdistill_last_round_method_figure",  # FedAvg declares none; see tests/views/test_surfaces.py
    "fleetdistill_uploads_refused_total",  # see test_crashes.py
}
"""Metrics that this run does not have."""


@dataclass
class Watched:
    """A finished run.

    Attributes:
        during: Scrapes while it was running.
        after: Scrape after its end.
        work: Folder with its store.
        tokens: Secrets that nobody may read.
    """

    during: list[Scraped]
    after: Scraped
    work: Path
    tokens: list[str]


def digits(part: int) -> tuple[np.ndarray, np.ndarray]:
    """Separable images of ten classes."""
    labels = np.arange(40) % 10
    images = np.random.default_rng(part).random((40, 1, 8, 8)) * 0.3
    images[np.arange(40), 0, labels % 8] += 0.5 + labels[:, None] // 8
    return images.astype(np.float32), labels


SCRAPED = threading.Event()
"""Set once a scrape has both devices; they do not train before."""


def wait_for_scrape(model: nn.Module, inputs: object) -> None:
    if model.training:
        SCRAPED.wait(PATIENCE_SECONDS)


def make_model() -> nn.Module:
    model = build_model("digits_linear")
    model.register_forward_pre_hook(wait_for_scrape)
    return model


def take_part(address: str, work: Path, name: str, token: str) -> None:
    """A device of the SDK, until the end of the run."""
    inputs, labels = digits(DEVICES.index(name))
    own: dict[str, Any] = {
        "data": (inputs[:30], labels[:30]),
        "test_data": (inputs[30:], labels[30:]),
        "allow": COLUMNS,
    }
    with open_device(
        server=address,
        enrolment=token,
        model=make_model,
        state_dir=work / name,
        device_id=name,
        export="never",
        **own,
    ) as device:
        device.run()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    work = tmp_path_factory.mktemp("watched")
    authority, port = make_pki(work / "pki"), free_port()
    inputs, labels = digits(9)
    np.savez(work / "evaluation.npz", inputs=inputs, labels=labels)
    listen = {"pki": str(work / "pki"), "enrol_listen": "127.0.0.1:0", "metrics": f"127.0.0.1:{port}"}
    settings: dict[str, dict[str, Any]] = {
        "run": {"method": "fedavg", "rounds": 3},
        "contract": {"classes": 10, "input_shape": [1, 8, 8]},
        "model": {"extractor": "", "server": "", "device": "digits_linear"},
        "evaluation": {"data": str(work / "evaluation.npz")},
        "server": listen,
    }
    with served(work, settings) as address, ThreadPoolExecutor(len(DEVICES)) as pool:
        store = Store.open(work / "store")
        wait_until(lambda: load_enrol_port(work / "store"), "the enrolment port")
        tokens = create_tokens(store, authority, load_enrol_port(work / "store") or 0, 2, 600.0, "", [])
        store.close()
        during = [scraped_until(port, lambda now: now.value("engine_phase", phase="waiting"), "the engine")]
        parts = [pool.submit(take_part, address, work, *item) for item in zip(DEVICES, tokens, strict=True)]
        wanted = "fleetdistill_run_unfinished_since_timestamp_seconds"
        during.append(
            scraped_until(
                port,
                lambda now: wanted in now.names and now.value("devices_present", run=RUN) == len(DEVICES),
                "both devices in an open run",
            )
        )
        SCRAPED.set()
        while not all(part.done() for part in parts):
            during.append(Scraped(port))
        for part in parts:
            part.result()
        after = scraped_until(
            port,
            lambda now: (
                now.value("run_info", status="finished")
                and not now.value("devices_present")
                and not now.by("engine_phase")
            ),
            "the end of the run, of its devices and of its engine",
        )
    return Watched(during, after, work, tokens)


@pytest.fixture
def store(watched: Watched) -> Iterator[Store]:
    one = Store.open(watched.work / "store")
    yield one
    one.close()


def test_every_metric_of_the_catalogue_exists(watched: Watched) -> None:
    seen = set().union(*(item.names for item in (*watched.during, watched.after)))
    absent = {metric.name for metric in CATALOGUE if not set(metric.samples) <= seen}
    assert absent == MISSING
    assert seen <= {name for metric in CATALOGUE for name in metric.samples}


def test_counts_are_those_of_the_store(watched: Watched, store: Store) -> None:
    now = watched.after
    assert now.value("uploads_acknowledged_total") == len(store.asks.uploads(RUN)) > 0
    assert now.value("uploads_begun_total") == now.value("calls_total", method="Upload")
    sums: dict[tuple[str, ...], float] = {}
    for row in store.history.traffic_by_kind(RUN):
        key = row.direction, row.kind
        sums[key] = sums.get(key, 0) + row.sent_bytes
    assert now.by("link_bytes_total") == sums
    assert now.value("receipt_duration_seconds_count") == len(store.asks.uploads(RUN))
    assert now.value("commit_group_size_sum") >= now.value("commit_group_size_count") > 0


def test_figures_of_the_run_are_those_of_the_store(watched: Watched, store: Store) -> None:
    now, progress = watched.after, store.runs.progress(RUN)
    assert progress is not None
    last = progress.rounds[-1]
    assert now.value("run_completed_rounds", run=RUN) == progress.run["completed_rounds"] == 3
    assert now.value("last_round_accuracy_ratio", run=RUN, split="test") == pytest.approx(last.test_accuracy)
    assert now.value("last_round_duration_seconds", run=RUN) == pytest.approx(last.round.seconds)
    figures = store.runs.rounds(RUN)[-1].figures
    assert figures["global_accuracy"] == now.value("last_round_global_accuracy_ratio", run=RUN)
    assert now.by("asks", run=RUN) == {(RUN, "answered"): 4.0, (RUN, "open"): 0.0, (RUN, "out"): 0.0}
    assert max(item.value("devices_present", run=RUN) for item in watched.during) == 2


def test_the_engine_says_what_it_does_until_its_end(watched: Watched) -> None:
    phases = {key for item in watched.during for key, value in item.by("engine_phase").items() if value}
    assert phases <= {(name, RUN) for name in PHASES}
    assert ("waiting", RUN) in phases
    assert watched.after.by("engine_phase") == {}


def test_nothing_in_the_metrics_is_secret_or_names_a_device(watched: Watched) -> None:
    text = "\n".join(item.text for item in (*watched.during, watched.after))
    keys = [path.read_text() for path in watched.work.rglob("*.pem")]
    lines = [line for key in keys for line in key.splitlines() if len(line) > 40]
    assert lines
    for secret in (*DEVICES, *watched.tokens, *lines):
        assert secret not in text
    assert "camera" not in text
    assert str(watched.work) not in text, "no path of the machine"


@needs_promtool
def test_promtool_finds_no_fault_in_the_reply(watched: Watched) -> None:
    promtool("check", "metrics", stdin=watched.after.text)
