"""Whole audits of small fleets, and the command."""

from __future__ import annotations

import json

import pytest
from audit.conftest import run_of
from typer.testing import CliRunner

from fleetdistill.errors import ConfigurationError
from fleetdistill_server.audit.audit import Audit, audit, record_run, simulation_of
from fleetdistill_server.audit.public_set import split_public
from fleetdistill_server.audit.table import view
from fleetdistill_server.cli.app import app
from fleetdistill_server.simulation.data.datasets import load_dataset


def small(method: str, device: str = "", **settings) -> Audit:
    return Audit(config=run_of(method, device, **settings), data=load_dataset("digits"), devices=2, rows=120, rounds=1)


def test_features_of_a_shallow_extractor_link_most_rows() -> None:
    found = audit(small("feddkc"))
    assert found.worst is not None
    assert found.worst.linked > 0.5  # chance is 1 / (decoys + 1)
    assert found.trained_rows == 120
    assert found.worst.rows == found.attacked_rows <= 120  # at most 60 of each device
    assert found.decoys >= 100
    assert found.classes == 1  # by the labels
    assert found.parts["metrics"] == {}


def test_every_message_is_recorded_as_it_was_sent() -> None:
    wanted = small("fedavg", "digits_linear")
    recorded = record_run(wanted, split_public(wanted.data, wanted.rows, wanted.seed))
    messages = recorded.record.of("device-0")
    assert [(one.round, one.step) for one in messages] == [(1, "train"), (1, "deliver")]
    assert set(messages[0].sent) == {"parameters", "metrics"}
    assert sum(len(rows) for rows in recorded.rows.values()) == 120
    other = recorded.record.of("device-1")[0]
    assert other.received["parameters"] is messages[0].received["parameters"]  # one payload, kept once


def test_predictions_cannot_be_asked_about_a_row() -> None:
    found = audit(small("cdkt"))
    assert found.worst is None
    assert found.parts["knowledge"] == {}
    assert found.classes is not None
    shown = view(found)
    assert shown.facts["linked"] is None
    assert [row["attack"] for row in shown.lists["parts"]] == [None, None]


@pytest.mark.parametrize(
    ("method", "settings", "rounds"),
    [("fedavg", {}, 5), ("classstats", {}, 1), ("classstats", {"features": "averaged", "extractor_rounds": 7}, 8)],
)
def test_rounds_that_the_method_needs(method: str, settings, rounds: int) -> None:
    data = load_dataset("digits")
    wanted = Audit(config=run_of(method, "digits_linear", **settings), data=data)
    assert simulation_of(wanted, data).rounds == rounds


def test_too_few_rounds_for_the_method() -> None:
    with pytest.raises(ConfigurationError, match="extractor_rounds is 5"):
        audit(small("classstats", features="averaged"))


def test_the_command_prints_a_table_and_writes_the_figures(tmp_path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        '[run]\nname = "x"\nmethod = "fedavg"\n[contract]\nclasses = 10\ninput_shape = [1, 8, 8]\n'
        '[model]\ndevice = "digits_linear"\n'
    )
    options = ["--data", "digits", "--rounds", "1", "--devices", "2", "--rows", "80", "--out", str(tmp_path / "out")]
    shown = CliRunner().invoke(app, ["audit", str(config), *options])
    assert shown.exit_code == 0, shown.output
    assert "fedavg on digits: 2 devices, 80 rows, 1 round" in shown.output
    written = json.loads((tmp_path / "out" / "audit.json").read_text())
    (parameters, metrics) = written["parts"]
    assert (parameters["part"], parameters["rows"], metrics["attack"]) == ("parameters", 80, None)
    assert written["linked"] == parameters["linked"]
    assert written["chance"]["linked"] == 1 / (written["decoys"] + 1)
    assert f"{parameters['linked']:.3f}" in shown.output


def test_the_command_reports_a_missing_set(tmp_path) -> None:
    config = tmp_path / "run.toml"
    config.write_text('[run]\nname = "x"\n[contract]\nclasses = 10\ninput_shape = [1, 8, 8]\n')
    shown = CliRunner().invoke(app, ["audit", str(config), "--data", str(tmp_path / "none.npz")])
    assert shown.exit_code == 1
    assert "there is no file" in shown.output
