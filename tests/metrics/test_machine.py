"""Figures of the server's machine, each with its label."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
from cryptography import x509
from support.processes import python
from support.secured import make_pki

from fleetdistill.link.credentials import AUTHORITIES
from fleetdistill_console.metrics.files import FilesCollector, clear
from fleetdistill_console.metrics.machine import MachineCollector
from fleetdistill_server.config.server_config import ServerSection
from fleetdistill_server.security.pki import SERVER
from fleetdistill_server.service.engine_files import engine_directory
from fleetdistill_server.service.heartbeat import FILE
from fleetdistill_server.service.process_state import ENGINE, FRONT, ProcessState


def collected(config: ServerSection, processes: Sequence[ProcessState] = ()) -> dict[str, dict[tuple[str, ...], float]]:
    """Values by name of the sample, and by the values of its labels."""
    result: dict[str, dict[tuple[str, ...], float]] = {}
    for metric in MachineCollector(config, lambda: processes).collect():
        for sample in metric.samples:
            result.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return result


def test_each_certificate_has_its_own_end(tmp_path: Path) -> None:
    make_pki(tmp_path / "pki")
    config = ServerSection(store=str(tmp_path), pki=str(tmp_path / "pki"), enrol_listen="127.0.0.1:0")
    ends = {
        name: x509.load_pem_x509_certificates((tmp_path / "pki" / file).read_bytes())[0].not_valid_after_utc.timestamp()
        for name, file in (("server", SERVER), ("ca", AUTHORITIES))
    }
    assert ends["server"] < ends["ca"]
    shown = collected(config)["fleetdistill_certificate_expiry_timestamp_seconds"]
    assert shown == {(name,): end for name, end in ends.items()}


def test_stopped_process_is_down_and_keeps_its_restart_count(tmp_path: Path) -> None:
    clear(tmp_path)
    processes = [ProcessState(FRONT, "", os.getpid(), 1), ProcessState(ENGINE, "digits", None, 4)]
    result = collected(ServerSection(store=str(tmp_path)), processes)
    assert result["fleetdistill_process_up"] == {(FRONT, ""): 1, (ENGINE, "digits"): 0}
    assert result["fleetdistill_process_restarts_total"] == {(FRONT, ""): 1, (ENGINE, "digits"): 4}
    assert set(result["fleetdistill_process_resident_memory_bytes"]) == {(FRONT, "")}


def test_an_engine_that_does_not_run_has_no_phase(tmp_path: Path) -> None:
    """Its file still says what it did when it ended."""
    clear(tmp_path)
    code = "from pathlib import Path; from fleetdistill_console.metrics.engine import EngineMeter; "
    python(f"{code}EngineMeter(Path({str(tmp_path)!r}), 'digits')")
    phases = []
    for pid in (os.getpid(), None):
        collected(ServerSection(store=str(tmp_path)), [ProcessState(ENGINE, "digits", pid, 0)])
        samples = [sample for metric in FilesCollector(tmp_path).collect() for sample in metric.samples]
        phases.append({sample.labels["phase"] for sample in samples if sample.value == 1})
    assert phases == [{"preparing"}, set()]


def test_an_engine_that_runs_has_its_last_heartbeat(tmp_path: Path) -> None:
    """One that starts has none yet, and that of one that has ended says nothing."""
    clear(tmp_path)
    for run in ("hangs", "over"):
        path = engine_directory(tmp_path, run) / FILE
        path.parent.mkdir(parents=True)
        path.touch()
        os.utime(path, (1000.0, 1000.0))
    own = os.getpid()
    processes = [ProcessState(ENGINE, run, pid, 0) for run, pid in (("hangs", own), ("starts", own), ("over", None))]
    shown = collected(ServerSection(store=str(tmp_path)), processes)
    assert shown["fleetdistill_engine_last_heartbeat_timestamp_seconds"] == {("hangs",): 1000.0}


def test_the_limits_of_the_disk_are_those_of_the_settings(tmp_path: Path) -> None:
    result = collected(ServerSection(store=str(tmp_path), keep_free_bytes=3, disk_budget_bytes=5_000_000))
    assert result["fleetdistill_disk_keep_free_bytes"] == {(): 3}
    assert result["fleetdistill_disk_budget_bytes"] == {(): 5_000_000}


def test_the_size_of_the_store_and_the_free_space_of_its_disk(tmp_path: Path) -> None:
    (tmp_path / "payload").write_bytes(bytes(1000))
    result = collected(ServerSection(store=str(tmp_path)))
    assert result["fleetdistill_disk_used_bytes"] == {(): 1000}
    assert result["fleetdistill_disk_free_bytes"][()] > 1000


def test_the_memory_of_a_process_includes_that_of_its_children(tmp_path: Path) -> None:
    clear(tmp_path)
    config, own = ServerSection(store=str(tmp_path)), [ProcessState(ENGINE, "digits", os.getpid(), 0)]
    name = "fleetdistill_process_resident_memory_bytes"
    code = "held = b'x' * (256 << 20); print('ready', flush=True); input()"
    before = collected(config, own)[name][ENGINE, "digits"]
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        more = collected(config, own)[name][ENGINE, "digits"] - before
        child.communicate(b"\n")
    assert more > 128 << 20


def test_processor_time_is_that_of_the_user_and_the_system(tmp_path: Path) -> None:
    clear(tmp_path)
    code = "import os\nwhile os.times().system < 0.05: os.listdir('/')\nprint('ready', flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        config, process = ServerSection(store=str(tmp_path)), psutil.Process(child.pid)
        before = sum(process.cpu_times()[:2])
        used = collected(config, [ProcessState(FRONT, "", child.pid, 0)])
        user, system, *_ = process.cpu_times()
        child.communicate(b"\n")
    assert system >= 0.05
    (seconds,) = used["fleetdistill_process_cpu_seconds_total"].values()
    assert before <= seconds <= user + system
