"""A store on this machine and a server from elsewhere give the same views of a run; commands print the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from operations.conftest import DEVICES, Played
from support.served import RUN
from typer.testing import CliRunner

from fleetdistill.errors import ConfigurationError, RefusedError
from fleetdistill_server.cli.app import app
from fleetdistill_server.operations.client import open_source
from fleetdistill_server.operations.source import Source
from fleetdistill_server.views.reading import VIEWS
from fleetdistill_server.views.runs import View

pytestmark = pytest.mark.slow


def without_disk(view: View) -> View:
    """The view without what changes between two reads."""
    return View(view.lists, {name: value for name, value in view.facts.items() if not name.startswith("disk_")})


READS: dict[str, Callable[[Source], View]] = {
    "health": lambda source: View({}, {"problems": source.problems()}),
    "server": lambda source: without_disk(source.server()),
    "runs": lambda source: source.runs(),
    "run": lambda source: source.run(RUN),
    "devices": lambda source: source.devices(RUN),
    "overview": lambda source: source.overview(),
    "rounds": lambda source: source.rounds(RUN, after=1),
    "traffic": lambda source: source.traffic(RUN),
    "events": lambda source: source.events(RUN, most=3),
    "participants": lambda source: source.participants(RUN),
    "device": lambda source: source.device(RUN, DEVICES[0]),
    "classes": lambda source: source.classes(RUN),
    "round": lambda source: source.round(RUN, 1),
    "settings": lambda source: source.settings(RUN),
}


def read(played: Played, name: str, remote: bool) -> View:
    with open_source(played.store, played.address if remote else None, played.work / "viewer") as source:
        return READS[name](source)


def test_every_view_is_compared() -> None:
    assert READS.keys() == VIEWS.keys() - {"about"}


@pytest.mark.parametrize("name", READS)
def test_both_sources_give_the_same_json(played: Played, name: str) -> None:
    here, there = (read(played, name, remote) for remote in (False, True))
    assert there.json() == here.json()
    assert here.facts or any(here.lists.values())


@pytest.mark.parametrize("words", [["runs", "list"], ["runs", "show", RUN], ["devices", "--run", RUN], ["devices"]])
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_the_commands_print_the_same(played: Played, words: list[str], form: list[str]) -> None:
    assert said(*words, *form, *played.there()) == said(*words, *form, *played.here)


def said(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, done.output
    return done.output


def test_who_reads_is_told_with_the_servers_address(played: Played) -> None:
    with open_source(played.store, played.address, played.work / "viewer") as source:
        facts = source.about().facts
        assert (source.name, source.is_remote) == (played.address, True)
    assert (facts["role"], facts["name"], facts["tls"]) == ("viewer", "the-viewer", True)
    assert facts["listen"] == played.address
    with open_source(played.store, None, None) as source:
        assert source.about().facts["role"] == "local"
        assert source.about().facts["enrol_port"] == facts["enrol_port"] > 0


def test_the_figures_are_those_of_the_run(played: Played) -> None:
    rounds = read(played, "rounds", True).lists["rounds"]
    assert [row["round"] for row in rounds] == [2]
    assert rounds[0]["train_loss"] > 0
    assert rounds[0]["ended_at"] >= rounds[0]["started_at"]
    shown = json.loads(said("runs", "show", RUN, "--json", *played.here))
    assert rounds[0].items() >= shown["rounds"][1].items()
    traffic = read(played, "traffic", True).lists["bytes"]
    assert sum(row["up_sent"] for row in traffic if row["round"]) == sum(row["bytes_up"] for row in shown["rounds"])


def test_devices_are_shown_with_their_part_in_the_run(played: Played) -> None:
    rows = read(played, "participants", True).lists["devices"]
    assert [row["device"] for row in rows] == list(DEVICES)
    for row in rows:
        assert (row["rounds"], row["answers"], row["last_answer"]) == (2, row["asks"], 2)
        assert (row["refusals"], row["late"], row["declined"]) == (0, 0, 0)
        assert row["certificate_expires"].endswith("Z")
    one = read(played, "device", True)
    assert {row["round"] for row in one.lists["asks"]} == {1, 2}
    assert {row["split"] for row in one.lists["figures"]} >= {"train", "test"}
    assert len(one.lists["certificates"]) == 1


def test_classes_are_those_that_devices_allowed(played: Played) -> None:
    view = read(played, "classes", True)
    assert view.facts["classes"] == [str(item) for item in range(10)]
    assert {row["device"]: sum(row["counts"].values()) for row in view.lists["devices"]} == dict.fromkeys(DEVICES, 40)


def test_a_rounds_times_are_in_order(played: Played) -> None:
    view = read(played, "round", True)
    assert view.facts["status"] == "closed"
    for row in view.lists["asks"]:
        assert row["state"] == "acknowledged"
        times = [row[name] for name in ("asked_at", "sent_at", "upload_at", "acknowledged_at")]
        assert times == sorted(times)
        assert row["downloaded_at"] >= row["download_at"]


def test_settings_have_sections_and_what_a_device_needs(played: Played) -> None:
    facts = read(played, "settings", True).facts
    assert facts["settings"]["run"]["method"] == "fedavg"
    assert facts["contract"]["input_shape"] == [1, 8, 8]
    assert "pki" not in json.dumps(facts)


@pytest.mark.parametrize(("remote", "error"), [(False, ConfigurationError), (True, RefusedError)])
def test_what_does_not_exist_is_an_error_that_names_it(played: Played, remote: bool, error: Any) -> None:
    with open_source(played.store, played.address if remote else None, played.work / "viewer") as source:
        for ask in (source.run, source.participants, source.rounds, source.settings, source.events, source.round):
            with pytest.raises(error, match="no run 'nothing'"):
                ask("nothing")
        with pytest.raises(error, match="no device 'nobody'"):
            source.device(RUN, "nobody")
        with pytest.raises(error, match="most is 1001, must be 1 to 1000"):
            source.events(RUN, most=1001)
