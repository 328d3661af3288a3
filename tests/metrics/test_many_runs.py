"""The metrics of a server of many runs: of each run, and of the engines that run at present."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.processes import free_port
from support.scraping import scraped_until
from support.serving import call, serve, write_config


@pytest.mark.long
@pytest.mark.slow
def test_runs_come_and_engines_go(tmp_path: Path) -> None:
    where, port = ["--store", str(tmp_path / "store")], free_port()
    server = tmp_path / "server.toml"
    server.write_text(
        f"[server]\nlisten = '127.0.0.1:0'\nstore = {json.dumps(str(tmp_path / 'store'))}\n"
        f"metrics = '127.0.0.1:{port}'\nengines_at_once = 2\n"
    )
    run = write_config(tmp_path, run_name="first", run_rounds=2)
    with serve(server) as running:
        running.port()
        empty = scraped_until(port, lambda now: now.value("process_up", process="front"), "the front")
        assert empty.by("process_up", process="engine") == {}
        assert sum(empty.by("runs").values()) == 0
        call("runs", "create", str(run), "--start", *where)
        call("runs", "clone", "first", "second", "--start", *where)
        both = scraped_until(
            port,
            lambda now: len(now.by("engine_phase", phase="waiting")) == len(now.by("devices_present")) == 2,
            "both engines",
        )
        assert both.by("process_up", process="engine") == {("engine", "first"): 1.0, ("engine", "second"): 1.0}
        assert both.by("devices_present") == {("first",): 0.0, ("second",): 0.0}
        waiting = scraped_until(
            port, lambda now: now.value("runs", status="waiting for devices") == 2, "both runs to wait for devices"
        )
        assert {key[2] for key in waiting.by("run_info")} == {"waiting for devices"}
        call("runs", "pause", "first", *where)
        scraped_until(
            port,
            lambda now: (
                now.by("engine_phase", phase="waiting").keys() == {("waiting", "second")}
                and now.by("process_up", process="engine").keys() == {("engine", "second")}
            ),
            "the engine of the paused run to end, with its metrics",
        )
        paused = scraped_until(port, lambda now: now.value("runs", status="paused"), "the paused run")
        assert {key[2] for key in paused.by("run_info", run="first")} == {"paused"}
        call("runs", "delete", "first", "--yes", *where)
        gone = scraped_until(port, lambda now: not now.by("run_info", run="first"), "the deleted run to go")
        assert gone.by("devices_present") == {("second",): 0.0}
