"""Whole audits of small fleets, and the command."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from audit.conftest import run_of, small
from rich.table import Table
from torch import nn
from typer.testing import CliRunner

from fleetdistill.errors import RunError
from fleetdistill.privacy.accountant import discrete_mu_for, mu_for
from fleetdistill.training.model import SplitModel
from fleetdistill_lab.audit.audit import Audit, audit, bound, record_run, report, simulation_of
from fleetdistill_lab.audit.output import tables, view
from fleetdistill_lab.audit.public_set import split_public
from fleetdistill_lab.simulation.data.datasets import load_dataset
from fleetdistill_server.cli.app import app


def test_features_of_a_shallow_extractor_link_most_rows() -> None:
    result = audit(small("feddkc"))
    assert result.worst is not None
    assert result.worst.linked > 0.5  # chance is 1 / (decoys + 1)
    assert result.trained_rows == 120
    assert result.worst.rows == result.attacked_rows <= 120  # at most 60 of each device
    assert result.decoys >= 100
    assert result.classes == 1  # by the labels
    assert result.parts["metrics"] == {}


def test_every_message_is_recorded_as_it_was_sent() -> None:
    wanted = small("fedavg", "digits_linear")
    recorded = record_run(wanted, split_public(wanted.data, wanted.rows, wanted.seed))
    messages = recorded.record.of("device-0")
    assert [(message.round, message.step) for message in messages] == [(1, "train"), (1, "deliver")]
    assert set(messages[0].sent) == {"parameters", "metrics"}
    assert sum(len(rows) for rows in recorded.rows.values()) == 120
    other = recorded.record.of("device-1")[0]
    assert other.received["parameters"] is messages[0].received["parameters"]  # one payload, kept once


def test_predictions_cannot_be_asked_about_a_row() -> None:
    result = audit(small("cdkt"))
    assert result.worst is None
    assert result.parts["knowledge"] == {}
    assert result.classes is not None
    shown = view(result)
    assert shown.facts["linked"] is None
    assert [row["attack"] for row in shown.lists["parts"]] == [None, None]


def test_tensors_of_a_method_are_said_to_be_not_attacked() -> None:
    shown = view(audit(small("fd", "cdkt_digits_small")))
    assert shown.facts["unattacked"] == {"classes": ["logits"], "counts": ["counts"]}
    table, *lines = tables(shown)
    assert isinstance(table, Table)
    assert next(iter(table.columns[1].cells)) == "not attacked"
    said = " ".join(map(str, lines))
    assert "classes: not attacked, because" in said
    assert "declared to contain logits of the device" in said
    assert "share of" not in said.replace("class shares of", ""), "no row was attacked"
    assert "rows that stand out among" in " ".join(map(str, tables(view(audit(small("fedavg", "digits_linear"))))[1:]))


@pytest.mark.long
def test_class_statistics_are_asked_by_means_and_directions() -> None:
    result = audit(small("classstats"))
    assert result.worst in result.parts["statistics"].values()
    shown = [row["attack"] for row in view(result).lists["parts"] if row["part"] == "statistics"]
    assert shown == ["means", "covariance", "means and covariance", "directions"]
    assert result.parts["statistics"]["means"].auc > 0.5  # chance is 0.5


def test_gradients_of_few_rows_are_called_invertible() -> None:
    result = audit(small("feddkd", "digits_linear", dkd_batch_size=4, dkd_steps=1))
    assert result.smallest_batch == 4
    assert "gradient of 4 rows: gradients of fewer than 32 rows can be inverted" in str(tables(view(result))[2])
    usual = dataclasses.replace(result, smallest_batch=32)
    assert len(tables(view(usual))) == len(tables(view(result))) - 1


# --- private answers


@pytest.mark.parametrize(("epsilon", "most"), [(0.3, "0.00134"), (1, "0.00238"), (3, "0.00887"), (10, "0.1379")])
def test_pri_10_no_attack_links_more_than_the_noise_allows(epsilon: float, most: str) -> None:
    digits = len(most) - 2
    assert f"{bound(0.001, mu_for(epsilon, 1e-5)):.{digits}f}" == most
    assert bound(0.001, 0) == pytest.approx(0.001)


@pytest.mark.long
def test_attacks_on_private_sums_stay_below_the_bound() -> None:
    wanted = dataclasses.replace(small("classstats_private", epsilon=10), rows=400)
    result = audit(wanted)  # 200 rows a device; at 57 the noise could end the run
    assert result.mu is not None
    assert result.mu == pytest.approx(discrete_mu_for(10, 1e-5))
    assert result.mu < mu_for(10, 1e-5)  # exact noise is a little larger
    assert result.bound == pytest.approx(bound(1 / (result.decoys + 1), result.mu))
    assert list(result.parts) == ["statistics"], "nothing else leaves"
    result.check_bound()
    assert "The devices' noise bounds linked at" in str(tables(view(result))[2])


# --- secure sums


def test_the_sum_is_attacked_and_no_single_part() -> None:
    wanted = Audit(
        config=run_of("classstats_secure", epsilon=10), data=load_dataset("digits"), devices=3, rows=600, rounds=1
    )
    recorded = record_run(wanted, split_public(wanted.data, wanted.rows, wanted.seed))
    (summed,) = recorded.sums
    assert summed.devices == tuple(sorted(recorded.rows)) == ("device-0", "device-1", "device-2")
    labels = np.concatenate([rows.labels for rows in recorded.rows.values()])
    assert summed.part.counts == pytest.approx(np.bincount(labels), abs=40)  # the noise's standard deviation is 2
    result = report(wanted, split_public(wanted.data, wanted.rows, wanted.seed), recorded)
    assert result.sums == (3,)
    assert {part: list(attacks) for part, attacks in result.parts.items()} == {
        "keys": [],
        "boxes": [],
        "numbers": [],
        "shares": [],
        "sum of 3 devices": ["sums"],
    }
    assert result.worst is result.parts["sum of 3 devices"]["sums"]
    assert result.worst.rows == result.attacked_rows
    assert result.mu == pytest.approx(discrete_mu_for(10, 1e-5))  # three of three devices' noise is enough
    assert result.bound is not None
    result.check_bound()
    assert result.classes is not None
    assert result.classes < 0.5, "the sum's class shares are not a device's"
    shown = view(result)
    assert shown.facts["sums"] == [3]
    said = " ".join(str(line) for line in tables(shown))
    assert "The server has the sum of 3 devices, and sees no single device's part" in said
    assert f"linked for the sum: {result.worst.linked:.3f}" in said
    assert "not yet reviewed by a cryptographer" in said


@pytest.mark.long
def test_a_sum_without_noise_is_attacked_as_class_statistics() -> None:
    wanted = dataclasses.replace(small("classstats_summed"), devices=3)
    recorded = record_run(wanted, split_public(wanted.data, wanted.rows, wanted.seed))
    (summed,) = recorded.sums
    labels = np.concatenate([rows.labels for rows in recorded.rows.values()])
    assert summed.part.counts.max() <= np.bincount(labels).max(), "rows of small classes are left out"
    result = report(wanted, split_public(wanted.data, wanted.rows, wanted.seed), recorded)
    assert list(result.parts["sum of 3 devices"]) == ["means", "covariance", "means and covariance"]
    assert result.bound is None
    assert "The server has the sum of 3 devices" in " ".join(str(line) for line in tables(view(result)))


@pytest.mark.long
def test_other_methods_have_no_sums() -> None:
    result = audit(small("classstats"))
    assert result.sums == ()
    assert not any("the sum of" in str(line) for line in tables(view(result)))


def test_an_attack_above_the_bound_is_an_error() -> None:
    """Features that link most rows, if they were called private."""
    result = audit(small("feddkc"))
    assert result.bound is None
    result.check_bound()
    with pytest.raises(RunError, match=r"but the devices' noise allows at most 0\.0"):
        dataclasses.replace(result, mu=0.3).check_bound()


@pytest.mark.parametrize(("method", "rounds"), [("fedavg", 5), ("classstats", 1)])
def test_rounds_that_the_method_needs(method: str, rounds: int) -> None:
    data = load_dataset("digits")
    wanted = Audit(config=run_of(method, "digits_linear"), data=data)
    assert simulation_of(wanted, data).rounds == rounds


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


@pytest.mark.long
@pytest.mark.pictures
def test_the_command_draws_pictures(tmp_path) -> None:
    config = tmp_path / "run.toml"
    config.write_text('[run]\nname = "x"\nmethod = "feddkc"\n[contract]\nclasses = 10\ninput_shape = [1, 8, 8]\n')
    options = ["--data", "digits", "--rounds", "1", "--devices", "2", "--rows", "60", "--out", str(tmp_path / "out")]
    shown = CliRunner().invoke(app, ["audit", str(config), *options, "--pictures", "--other", "digits"])
    assert shown.exit_code == 0, shown.output
    same, other = json.loads((tmp_path / "out" / "audit.json").read_text())["pictures"]
    assert same["source"] == "cut, round 1, public rows of the same kind"
    assert other["source"] == "cut, round 1, rows of digits"
    assert same["reidentified"] > 0.2  # chance is .001
    assert (tmp_path / "out" / "pictures.png").read_bytes().startswith(b"\x89PNG")


def test_pictures_need_images(tmp_path) -> None:
    config = tmp_path / "run.toml"
    settings = '[method]\nfeatures = "model"\n[model]\nextractor = "identity"\n'
    config.write_text(
        f'[run]\nname = "x"\nmethod = "classstats"\n[contract]\nclasses = 2\ninput_shape = [6]\n{settings}'
    )
    inputs = np.random.default_rng(0).random((200, 6), dtype=np.float32)
    np.savez(tmp_path / "set.npz", inputs=inputs, labels=np.arange(200) % 2)
    given = ["audit", str(config), "--data", str(tmp_path / "set.npz"), "--out", str(tmp_path / "out")]
    given += ["--model", "audit.test_audit:vectors", "--rows", "80"]
    assert CliRunner().invoke(app, given).exit_code == 0
    shown = CliRunner().invoke(app, [*given, "--other", "digits"])
    assert "--other has no effect without --pictures" in shown.output
    shown = CliRunner().invoke(app, [*given, "--pictures"])
    assert "--pictures needs images" in shown.output


def vectors(input_shape, classes: int) -> SplitModel:
    return SplitModel({"stem": nn.Identity(), "head": nn.Linear(input_shape[0], classes)}, cut="stem")


def test_the_command_reports_a_missing_set(tmp_path) -> None:
    config = tmp_path / "run.toml"
    config.write_text('[run]\nname = "x"\n[contract]\nclasses = 10\ninput_shape = [1, 8, 8]\n')
    shown = CliRunner().invoke(app, ["audit", str(config), "--data", str(tmp_path / "none.npz")])
    assert shown.exit_code == 1
    assert "there is no file" in shown.output
