"""Rules, their page and the command line of the kit."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from support.processes import free_port
from torch import nn

from fleetdistill.errors import ConfigurationError
from fleetdistill.training import fingerprint as fingerprint_of
from fleetdistill_lab.conformance import DEVICE_RULES, PAGE, RUN_TOML, SERVER_RULES, Report, Rule
from fleetdistill_lab.conformance.__main__ import main
from fleetdistill_lab.conformance.script import SCENES, fingerprint
from fleetdistill_server.config.run_config import run_config

TEXT = (Path(__file__).parents[2] / PAGE).read_text(encoding="utf-8")


@pytest.mark.parametrize("rules", [SERVER_RULES, DEVICE_RULES], ids=["server", "device"])
def test_every_rule_names_a_section_of_the_page(rules: tuple[Rule, ...]) -> None:
    sections = set(re.findall(r"^#+ (.*)$", TEXT, re.MULTILINE))
    assert {rule.section for rule in rules} <= sections
    assert len({rule.name for rule in rules}) == len(rules)


def test_the_page_has_the_numbers_of_the_kit() -> None:
    assert f"plays {tomllib.loads(RUN_TOML)['run']['min_devices']} devices" in TEXT
    assert f"has {len(SCENES)} asks" in TEXT


def test_a_rule_passes_only_if_it_was_checked_and_never_violated() -> None:
    report = Report([Rule(name, "Asks", f"rule {name}") for name in "abc"])
    assert report.expect("a", True)
    assert not report.expect("b", False, "it did something else")
    report.expect("b", True)
    report.expect("b", False, "later")
    found = {result.rule.name: (result.passed, result.found) for result in report.results()}
    assert found == {"a": (True, ""), "b": (False, "it did something else"), "c": (False, "")}
    assert not report.passed
    lines = [line for line in str(report).splitlines() if ": rule" in line]
    assert [line.split(":")[0].split() for line in lines] == [["passed", "a"], ["FAILED", "b"], ["NOT", "CHECKED", "c"]]
    with pytest.raises(ConfigurationError, match="no rule 'd'"):
        report.expect("d", True)


def test_the_run_to_serve_is_valid_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--run-toml"]) == 0
    assert run_config(tomllib.loads(capsys.readouterr().out)).run.method == "fedavg"


def test_unreachable_server_is_an_error_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"127.0.0.1:{free_port()}"]) == 2
    assert "cannot be reached" in capsys.readouterr().err


def test_a_device_that_never_calls_fails_the_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--listen", "--seconds", "0"]) == 1
    said = capsys.readouterr().out
    assert re.match(r"listening on 127\.0\.0\.1:\d+\n", said)
    assert f"0 of {len(DEVICE_RULES)} rules" in said


def test_the_fingerprint_is_that_of_the_sdk() -> None:
    assert fingerprint() == fingerprint_of(nn.Linear(4, 3))
