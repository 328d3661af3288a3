"""How the engine's process ends, and what the supervisor makes of it; no process is started here."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetdistill.errors import ConfigurationError, NoSpaceError, RunError, StoreError
from fleetdistill_server.config.run_config import RunConfig, load_run_config
from fleetdistill_server.engine import engine, process
from fleetdistill_server.event_kinds import ENGINE_FAILED
from fleetdistill_server.service import supervisor
from fleetdistill_server.service.processes import EXIT_CONFIGURATION, EXIT_NO_SPACE
from fleetdistill_server.service.registration import register
from fleetdistill_server.service.supervisor import MAX_RESTARTS, Supervisor
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
        self.failures = 0
        self.starts = 0
        self.started = time.monotonic()
        self._code = code

    def poll(self) -> int:
        return self._code

    def restart(self) -> None:
        self.failures += 1
        self.start_again()

    def start_again(self) -> None:
        self.starts += 1


@pytest.fixture
def serving(config: Path) -> Iterator[Supervisor]:
    made = Supervisor(load_run_config(config))
    yield made
    made.store.close()
    made.lock.close()


def look(serving: Supervisor, engine: Ended, times: int) -> None:
    serving.engine = engine  # type: ignore[assignment]
    for _ in range(times):
        serving.look_after_engine()


def test_an_engine_without_space_is_started_again_and_again(
    serving: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "NO_SPACE_SECONDS", 0.0)
    child = Ended(EXIT_NO_SPACE)
    look(serving, child, 4 * MAX_RESTARTS)
    assert (child.starts, child.failures) == (2 * MAX_RESTARTS, 0)
    assert (serving.store.runs.get(RUN) or {})["status"] == "preparing"


def test_but_not_at_once(serving: Supervisor) -> None:
    child = Ended(EXIT_NO_SPACE)
    look(serving, child, 4)
    assert child.starts == 0, "the front is looked after meanwhile"


def test_failures_of_an_engine_that_has_lived_long_do_not_add_up(
    serving: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run without an end may idle for months, with no round that would be completed between two failures."""
    monkeypatch.setattr(supervisor, "STEADY_SECONDS", 0.0)
    child = Ended(1)
    look(serving, child, 4 * MAX_RESTARTS)
    assert child.starts == 4 * MAX_RESTARTS


def test_an_engine_that_is_given_up_is_told_though_the_disk_is_full(
    serving: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise NoSpaceError("the disk is full")

    monkeypatch.setattr(serving.store.runs, "end", full)
    with pytest.raises(RunError, match=f"the engine failed {MAX_RESTARTS + 1} times at the same point, last with 1"):
        look(serving, Ended(1), MAX_RESTARTS + 1)
