"""A simulated private fleet: over both links, from the command line, with a hostile device, and with too few rows."""

from __future__ import annotations

import json
import math
from contextlib import closing
from dataclasses import replace

import pytest
from support.long import long_except
from typer.testing import CliRunner

from fleetdistill.errors import ConfigurationError
from fleetdistill.methods import METHODS, config_class
from fleetdistill.privacy.accountant import discrete_mu_for
from fleetdistill_lab.simulation.fleet import simulate
from fleetdistill_lab.simulation.report.report import privacy_lines, report_title
from fleetdistill_lab.simulation.show import exchange_lines
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.cli.app import app
from fleetdistill_server.service.served import NOT_SERVED
from fleetdistill_server.store.store import Store
from fleetdistill_server.views.runs import run

SENTENCE = "each row of each device is (8, 1e-5)-private against the server"
SUMMING = [method for method in METHODS if config_class(method).sums_securely]
FLEET = Simulation(
    method="classstats_private",
    settings={"dimensions": 32, "epsilon": 8.0},
    devices=3,
    models=("digits_linear",),
    partition="iid",
    test_limit=120,
    with_alone=False,
    with_fedavg=False,
)


@pytest.mark.long
@pytest.mark.parametrize("link", ["memory", pytest.param("grpc", marks=[pytest.mark.slow, pytest.mark.long])])
def test_a_private_fleet_learns_and_says_what_its_epsilon_means(tmp_path, link):
    report = simulate(replace(FLEET, link=link, out=tmp_path))
    assert (report.mean_accuracy_fleet or 0.0) > 0.8, "digits, 479 rows a device; 0.93 without noise"
    assert report.global_accuracy_by_round[-1] == pytest.approx(report.mean_accuracy_fleet, abs=0.02)
    saved = json.loads((tmp_path / "report.json").read_text())
    result = math.sqrt(3) * 479 * discrete_mu_for(8, 1e-5)
    said = {"epsilon": 8.0, "delta": 1e-5, "exact": True, "sentence": SENTENCE}
    assert saved["privacy"] == {**said, "expected_strength": pytest.approx(result, abs=0.1)}
    assert privacy_lines(report) == [
        f"Privacy of class statistics with noise: {SENTENCE}",
        f"the strength of the fleet's statistics is {result:,.0f}: dimensions = 192 is usually more accurate than 32",
    ]
    assert f"Privacy of class statistics with noise: {SENTENCE}" in exchange_lines(report, tmp_path)
    assert report_title(report).endswith(f"\nPrivacy of class statistics with noise: {SENTENCE}")
    assert report.privacy is not None
    noisy = replace(report, privacy={**report.privacy, "expected_strength": 340.0}, mean_accuracy_alone=0.5)
    line, warning = privacy_lines(noisy)
    assert line.endswith("against the server; the controls are not private")
    assert warning.startswith("the strength of the fleet's statistics is 340, below 350: expect 7 to 21 points less")
    assert [device.samples for device in report.devices] == [479] * 3
    assert {(row["direction"], row["kind"]) for row in report.traffic if row["tensor_bytes"]} == {
        ("up", "class_sums"),
        ("down", "class_space"),
    }
    with closing(Store.open(tmp_path / "work" / "store")) as store:
        shown = json.loads(run(store, "simulation", NOT_SERVED).json())
        assert shown["privacy"] == SENTENCE
        assert shown["rounds"][0]["strength"] == pytest.approx(result, rel=0.1)
        assert store.history.figures("simulation", "accuracy", "test") == []
        assert store.history.figures("simulation", "replaced", "validation") == []


@pytest.mark.long
@pytest.mark.parametrize("keys", long_except(["certificates", "roster"], "roster"))
@pytest.mark.parametrize("method", long_except(SUMMING, "classstats_secure"))
@pytest.mark.parametrize("link", ["memory", pytest.param("grpc", marks=[pytest.mark.slow, pytest.mark.long])])
def test_simulated_devices_have_what_vouches_for_keys(tmp_path, link, method, keys):
    key = (
        {"roster_key": "ab" * 32} if keys == "roster" else {}
    )  # of the operator's roster; simulated devices have another
    noise = FLEET.settings if method == "classstats_secure" else {}
    report = simulate(replace(FLEET, method=method, settings={**noise, "keys": keys, **key}, link=link, out=tmp_path))
    assert (report.mean_accuracy_fleet or 0.0) > 0.8
    with closing(Store.open(tmp_path / "work" / "store")) as store:
        (event,) = store.history.events("simulation", "secure-sum")
    assert event.text.startswith("the sum of 3 devices is made in")
    assert "reviewed" in privacy_lines(report)[0], "what it prints says that no cryptographer has looked at it"
    assert (tmp_path / "work" / "pki").exists() == (keys == "certificates")


@pytest.mark.long
def test_the_command_has_epsilon(tmp_path):
    words = "simulate --method classstats_private --devices 2 --model digits_linear --no-controls"
    settings = ["--set", "method.epsilon=8", "--set", "simulation.test_limit=60"]
    done = CliRunner().invoke(app, [*words.split(), *settings, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert f"Privacy of class statistics with noise: {SENTENCE}" in done.output


@pytest.mark.long
def test_a_hostile_device_that_flips_its_labels_is_named(tmp_path):
    report = simulate(replace(FLEET, devices=4, hostile=1, attack="flips", out=tmp_path))
    assert "device-0" in report.named
    assert (report.mean_accuracy_fleet or 0.0) > 0.7


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"train_limit": 60}, r"20 rows on each of 3 devices are too few for the noise at epsilon 8; use at least \d+"),
        ({"method": "classstats"}, r"method classstats does not support epsilon; set method = .classstats_private."),
        ({"settings": {"epsilon": 50.0}}, r"epsilon must be in \[0.1, 20\], got 50.0"),
        ({"hostile": 1, "attack": "scaled"}, "attack 'scaled' has no effect with classstats_private, .*; use flips"),
        (
            {"method": "classstats_summed", "settings": {}, "devices": 3, "hostile": 1, "attack": "random"},
            "attack 'random' has no effect with classstats_summed",
        ),
    ],
)
def test_impossible_setting_is_refused_before_folder_is_changed(tmp_path, changes, says):
    with pytest.raises(ConfigurationError, match=says):
        simulate(replace(FLEET, out=tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()
