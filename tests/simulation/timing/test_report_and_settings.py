"""What a simulation in simulated time reports, saves and refuses; and its options on the command line."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from support.fleets import SMALL
from typer.testing import CliRunner

from fleetdistill.errors import ConfigurationError
from fleetdistill_lab import FleetBehaviour, Simulation, read_traces, simulate
from fleetdistill_lab.simulation import show
from fleetdistill_lab.simulation.checks import check_settings
from fleetdistill_lab.simulation.fleet import Interrupted
from fleetdistill_lab.simulation.folder import saved_simulation
from fleetdistill_lab.simulation.progress import Progress
from fleetdistill_lab.simulation.report.simulated_time import (
    SimulatedRound,
    SimulatedTimes,
    readable_seconds,
    time_lines,
)
from fleetdistill_server.cli.app import app

ALWAYS, GONE = ((0.0, 1e6, 1.0),), ((0.0, 4.0, 1.0), (1000.0, 1e6, 1.0))
SLOW, LATER = ((0.0, 1e6, 0.1),), ((5.0, 1e6, 1.0),)
BEHAVIOUR = FleetBehaviour(seconds_per_sample=0.0, seconds_per_ask=10.0, traces=(ALWAYS, ALWAYS, SLOW, GONE, LATER))
FLEET = replace(
    SMALL,
    method="fedavg",
    devices=5,
    rounds=2,
    train_limit=150,
    models=("digits_linear",),
    quorum=0.5,
    deadline_seconds=65.0,
    behaviour=BEHAVIOUR,
)


def test_report_has_simulated_time_and_late_dropped_or_absent(tmp_path: Path) -> None:
    """Round 1, 0 s to 65 s: 0 and 1 answer at 10 s; 3 goes at 4 s, its lease ends at 64 s; 2 is late at 65 s (100 s).

    Device 4 joins at 5 s. Round 2 asks all but 3: 0, 1 and 4 answer at 75 s; 2 begins at 100 s, late at 130 s. Then the
    three get the result in 10 s.
    """
    report = simulate(replace(FLEET, out=tmp_path / "out"))
    times = report.simulated_time
    assert times is not None
    first, second = times.rounds
    assert (first.asked, first.answered, first.late, first.dropped) == (4, 2, ["device-2"], ["device-3"])
    assert (first.started, first.ended, first.absent) == (0.0, 65.0, 1), "device 4 has not joined"
    assert (second.asked, second.answered, second.late, second.absent) == (4, 3, ["device-2"], 1)
    assert (second.started, second.ended, times.seconds) == (65.0, 140.0, 140.0)
    two, three = times.devices["device-2"], times.devices["device-3"]
    assert (two.late, two.answered, two.work_seconds) == (2, 0, 200.0), "100 s for each ask, also beyond the deadline"
    assert (three.dropped, three.absent, three.work_seconds) == (1, 1, 4.0)
    written = json.loads((tmp_path / "out" / "report.json").read_text())
    assert written["simulated_time"] == json.loads(json.dumps(asdict(times)))
    assert written["seconds"] == report.seconds != times.seconds
    (line,) = time_lines(times)
    assert line.startswith("simulated time: 2 min 20 s, 1 min 10 s per round (median); devices per outcome over all")
    assert line.endswith("5 answered, 2 late, 1 dropped; 1.0 absent per round")
    saved = saved_simulation(tmp_path / "out")
    assert saved.behaviour == BEHAVIOUR
    again = simulate(replace(saved, out=tmp_path / "out"), if_there="resume")
    assert again.simulated_time == times
    with pytest.raises(ConfigurationError, match="began with other settings: behaviour was"):
        simulate(replace(saved, behaviour=replace(BEHAVIOUR, churn=1.0)), if_there="resume")


def test_device_leaving_after_first_answer_of_round_is_dropped(tmp_path: Path) -> None:
    """Each of the two steps takes 10 s; device 2 goes at 15 s."""
    goes = ((0.0, 15.0, 1.0), (1000.0, 1e6, 1.0))
    behaviour = replace(BEHAVIOUR, traces=(ALWAYS, ALWAYS, goes))
    two_steps: dict[str, Any] = {"method": "feddkd", "settings": {"dkd_steps": 1}, "models": ("digits_mlp_small",)}
    times = simulate(
        replace(FLEET, **two_steps, devices=3, rounds=1, behaviour=behaviour, out=tmp_path / "out")
    ).simulated_time
    assert times is not None
    (only,) = times.rounds
    assert (only.asked, only.answered, only.dropped, only.late) == (3, 2, ["device-2"], [])
    assert (times.devices["device-2"].dropped, times.devices["device-2"].answered) == (1, 0)


def test_a_round_that_ctrl_c_leaves_open_drops_no_device(tmp_path: Path) -> None:
    def interrupt(done: Progress) -> None:
        if (done.phase, done.completed) == ("fleet", 1):
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as interrupted:
        simulate(replace(FLEET, out=tmp_path / "out"), interrupt)
    report = interrupted.value.report
    assert report is not None
    assert report.simulated_time is not None
    last = report.simulated_time.rounds[-1]
    assert (last.round, last.status, last.ended, last.dropped) == (2, "open", None, [])
    assert report.simulated_time.devices["device-0"].dropped == 0


def test_simulation_without_behaviour_reports_no_simulated_time(tmp_path: Path) -> None:
    report = simulate(
        replace(FLEET, behaviour=None, deadline_seconds=None, devices=2, train_limit=60, rounds=1, out=tmp_path / "out")
    )
    assert report.simulated_time is None
    assert time_lines(None) == []


def test_the_usual_length_of_a_round_is_that_of_completed_ones() -> None:
    """Two of 10 s and 30 s, and between them one of 100 s that fell short."""
    ends = [("closed", 0.0, 10.0), ("short", 10.0, 110.0), ("closed", 110.0, 140.0)]
    nobody: dict[str, Any] = {"late": [], "dropped": [], "declined": [], "not_needed": [], "absent": 0}
    rounds = [
        SimulatedRound(round=number, status=status, started=start, ended=end, asked=2, answered=2, **nobody)
        for number, (status, start, end) in enumerate(ends, 1)
    ]
    (line,) = time_lines(SimulatedTimes(140.0, rounds, {}))
    assert line.startswith("simulated time: 2 min 20 s, 20 s per round (median); 1 of 3 rounds fell short; ")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.25, "0.25 s"), (59.0, "59 s"), (60.0, "1 min 00 s"), (3725.0, "1 h 02 min"), (180_000.0, "2 d 02 h")],
)
def test_durations_are_readable(seconds: float, text: str) -> None:
    assert readable_seconds(seconds) == text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"link": "grpc"},
            "simulated time does not work over grpc, whose processes run in real time; use --link memory",
        ),
        (
            {"method": "classstats_secure", "settings": {"epsilon": 3.0, "keys": "certificates"}},
            "keys is 'certificates', whose certificates are valid in real time and not in simulated time",
        ),
        ({"behaviour": None}, "deadline_seconds and over_selection need simulated time"),
        ({"behaviour": None, "deadline_seconds": None, "over_selection": 1.5}, "need simulated time"),
        ({"deadline_seconds": 0.0}, "deadline_seconds is 0.0, must be above 0"),
        ({"over_selection": 0.5}, "over_selection is 0.5, must be from 1 to 10"),
        ({"min_devices": 6}, "min_devices is 6, must be from 1 to devices (5)"),
    ],
)
def test_settings_that_cannot_apply_are_refused(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        check_settings(replace(FLEET, **changes))
    assert expected in str(refused.value)


def wanted_by(monkeypatch: pytest.MonkeyPatch, *options: str) -> Simulation:
    wanted: list[Simulation] = []
    monkeypatch.setattr(show, "simulate_and_show", lambda one, **given: wanted.append(one))
    done = CliRunner().invoke(app, ["simulate", *options])
    assert done.exit_code == 0, done.output
    return wanted[0]


def test_options_describe_fleet_and_replace_settings_of_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text('[fleet]\navailability = "diurnal:0.2"\nchurn = 3.0\naway_seconds = 60\n')
    fleet = ("availability=diurnal:0.4", "compute=lognormal:0.8", "join_late=0.1")
    rounds = ("devices_per_round=4", "over_selection=1.25", "deadline_seconds=90", "min_devices=3")
    settings = [*(f"fleet.{item}" for item in fleet), *(f"simulation.{item}" for item in rounds)]
    one = wanted_by(monkeypatch, str(file), *(word for setting in settings for word in ("--set", setting)))
    assert one.behaviour == FleetBehaviour(
        availability="diurnal:0.4", compute="lognormal:0.8", churn=3.0, away_seconds=60, join_late=0.1
    )
    assert (one.over_selection, one.deadline_seconds, one.min_devices) == (1.25, 90.0, 3)
    csv_file = tmp_path / "phones.csv"
    csv_file.write_text("device,start,end\na,0,40\n")
    traced = wanted_by(monkeypatch, "--set", f"fleet.traces={csv_file}")
    assert traced.behaviour == FleetBehaviour(traces=read_traces(csv_file))
    assert wanted_by(monkeypatch).behaviour is None


def test_round_begins_by_default_with_the_devices_it_needs() -> None:
    assert replace(FLEET, behaviour=None).devices_to_begin == 5
    assert FLEET.devices_to_begin == 2
    assert replace(FLEET, devices_per_round=4).devices_to_begin == 4
    assert replace(FLEET, devices_per_round=4, min_devices=1).devices_to_begin == 1
    assert replace(FLEET, devices=1).devices_to_begin == 1
