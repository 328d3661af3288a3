"""How the engine's process ends, and what the supervisor makes of it; no process is started here."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fleetdistill.errors import ConfigurationError, NoSpaceError, RunError, StoreError
from fleetdistill_server.config.run_config import RunConfig, load_run_config
from fleetdistill_server.config.server_config import ServerConfig
from fleetdistill_server.engine import engine, process
from fleetdistill_server.event_kinds import ENGINE_FAILED
from fleetdistill_server.service import engine_process
from fleetdistill_server.service.engine_process import MAX_RESTARTS
from fleetdistill_server.service.engine_slots import Slot
from fleetdistill_server.service.processes import EXIT_CONFIGURATION, EXIT_NO_SPACE
from fleetdistill_server.service.reconciliation import Reconciliation
from fleetdistill_server.service.registration import register, serve_run
from fleetdistill_server.service.wakeups import Ends
from fleetdistill_server.store.store import Store

RUN = "ends"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(
        f"[run]\nname = '{RUN}'\n[contract]\nclasses = 10\ninput_shape = [1, 8, 8]\n"
        f"[server]\nstore = {json.dumps(str(tmp_path / 'store'))}\n"
    )
    return path


def end_of(config: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> int:
    """Exit status of an engine that fails with this error."""

    async def fail(self: engine.Engine) -> None:
        raise error

    monkeypatch.setattr(engine.Engine, "run", fail)
    return engine_main(config, monkeypatch)


def engine_main(config: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(process, "end_with_parent", lambda parent: None)
    monkeypatch.setattr(process, "start_heartbeat", lambda directory: None)
    monkeypatch.setattr(sys, "argv", ["engine", str(config)])
    return process.main()


def failures(config: Path) -> list[str]:
    store = Store.open(config.parent / "store")
    texts = [row["text"] for row in store.history.events(RUN, ENGINE_FAILED)]
    store.close()
    return texts


def test_a_full_disk_has_an_exit_status_of_its_own_and_is_no_failure(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert end_of(config, monkeypatch, NoSpaceError("the disk is full")) == EXIT_NO_SPACE
    assert failures(config) == []


def test_a_disk_that_is_full_before_the_engine_begins_is_told_so_too(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(directory: Path) -> Store:
        raise NoSpaceError("the disk is full")

    monkeypatch.setattr(Store, "open", full)
    assert engine_main(config, monkeypatch) == EXIT_NO_SPACE


def test_an_engine_whose_run_is_cancelled_has_not_failed(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(config.parent / "store")
    register(store, load_run_config(config))

    async def cancelled(self: engine.Engine) -> None:
        assert store.runs.cancel(RUN, "by the operator, after 0 rounds")
        store.runs.assert_not_cancelled(RUN)

    monkeypatch.setattr(engine.Engine, "run", cancelled)
    assert engine_main(config, monkeypatch) == 0
    assert failures(config) == []
    store.close()


@pytest.mark.parametrize("error", [RunError("taken over"), ConfigurationError("[method] x: unknown")])
def test_what_cannot_work_has_one_too(config: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    assert end_of(config, monkeypatch, error) == EXIT_CONFIGURATION
    assert failures(config) == [str(error)], "the supervisor's error quotes it"


def test_a_failure_is_noted_in_the_store(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert end_of(config, monkeypatch, StoreError("the database failed")) == 1
    assert end_of(config, monkeypatch, ZeroDivisionError("division")) == 1
    assert failures(config) == ["StoreError: the database failed", "ZeroDivisionError: division"]


def test_what_nobody_foresaw_in_a_configuration_is_not_hidden(
    config: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(path: Path) -> RunConfig:
        raise RecursionError("so deep")

    monkeypatch.setattr(process, "load_run_config", fail)
    assert engine_main(config, monkeypatch) == 1
    assert "RecursionError: so deep" in capfd.readouterr().err


# --- the supervisor


class Ended:
    """A child whose process always ends with one exit status."""

    def __init__(self, code: int) -> None:
        self.process: Any = self
        self.arguments: list[str] = []
        self.failures = 0
        self.starts = 0
        self.started = time.monotonic()
        self._code = code

    def poll(self) -> int:
        return self._code

    def end(self, grace_seconds: float = 0.0) -> bool:
        return True

    def start_again(self) -> None:
        self.starts += 1


class Seconds:
    """A clock that each look advances by a second."""

    def __init__(self, start: float) -> None:
        self.now = start

    def __call__(self) -> float:
        return self.now


@dataclass
class Service:
    """A service whose engines end as the test says."""

    engines: Reconciliation
    store: Store
    seconds: Seconds
    failed: list[tuple[str, str]]
    child: Ended | None = None

    def look(self, code: int, times: int) -> Ended:
        self.child = self.child or Ended(code)
        for _ in range(times):
            self.seconds.now += 1
            self.engines.look()
        return self.child


@pytest.fixture
def service(config: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    loaded = load_run_config(config)
    store = Store.open(config.parent / "store")
    serve_run(store, loaded)
    seconds, failed = Seconds(time.monotonic()), list[tuple[str, str]]()
    settings = ServerConfig(server=loaded.server)
    told = lambda run, reason: failed.append((run, reason))  # noqa: E731
    engines = Reconciliation(store, settings, [Slot(Ends())], "", None, [], told)
    made = Service(engines, store, seconds, failed)
    monkeypatch.setattr(engine_process, "Child", lambda *_: made.child)
    monkeypatch.setattr(engine_process.time, "monotonic", seconds)  # type: ignore[attr-defined]
    yield made
    store.close()


def test_an_engine_without_space_is_started_again_and_again(service: Service) -> None:
    child = service.look(EXIT_NO_SPACE, 1 + 11 * 4 * MAX_RESTARTS)
    assert (child.starts, child.failures) == (4 * MAX_RESTARTS, 0)
    assert (service.store.runs.get(RUN) or {})["status"] == "preparing"


def test_but_not_at_once(service: Service) -> None:
    child = service.look(EXIT_NO_SPACE, 9)
    assert child.starts == 0, "the front is looked after meanwhile"


def test_failures_of_an_engine_that_has_lived_long_do_not_add_up(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run without an end may idle for months, with no round that would be completed between two failures."""
    monkeypatch.setattr(engine_process, "STEADY_SECONDS", 0.0)
    child = service.look(1, 12 * MAX_RESTARTS)
    assert child.starts >= 4 * MAX_RESTARTS
    assert service.failed == []


def test_a_run_whose_engine_is_given_up_is_stopped_with_the_reason(service: Service) -> None:
    service.store.history.add_event(RUN, ENGINE_FAILED, "ZeroDivisionError: division")
    child = service.look(1, 4 * MAX_RESTARTS)
    reason = f"the engine failed {MAX_RESTARTS + 1} times at the same point, last with 1: ZeroDivisionError: division"
    row = service.store.runs.get(RUN) or {}
    assert (row["status"], row["reason"], row["engine"], child.starts) == ("stopped", reason, None, MAX_RESTARTS)
    assert service.failed == [(RUN, reason)]
    assert service.engines.engines == {}, "its place is free for another run"


def test_an_engine_that_is_given_up_is_told_though_the_disk_is_full(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise NoSpaceError("the disk is full")

    monkeypatch.setattr(service.store.led, "hold_failed", full)
    service.look(EXIT_CONFIGURATION, 3)
    assert service.failed[0][1].startswith("the engine cannot run this configuration: see ")
    assert list(service.engines.engines) == [RUN], "so that the reason is stored when there is space again"
