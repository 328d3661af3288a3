"""docs/reference/baselines.md has each baseline with its settings."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from support.fleets import BASELINES

from fleetdistill.methods import config_class
from fleetdistill.methods.fedavg.config import FedAvgConfig

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "baselines.md").read_text()
ROWS = {
    name: row
    for row in PAGE.splitlines()
    if row.startswith("| `")
    for name in re.findall(r"`(\w+)`", row.split("|")[1])
}


def test_the_page_has_a_row_for_each_baseline() -> None:
    assert sorted(ROWS) == sorted(BASELINES)


@pytest.mark.parametrize("name", BASELINES)
def test_row_has_the_settings_that_differ_from_fedavg(name: str) -> None:
    usual = {item.name: item.default for item in dataclasses.fields(FedAvgConfig)}
    own = {item.name: item.default for item in dataclasses.fields(config_class(name))}
    settings = ROWS[name].split("|")[3]
    shared = {"momentum", "nesterov"}  # SCAFFOLD's and FedGEN's are said below the table
    for setting, default in own.items():
        if setting not in shared and (setting not in usual or usual[setting] != default):
            said = re.search(rf"`{setting}`(?: ([^,|]+))?", settings)
            assert said is not None, f"{name} has the setting {setting}"
            if said[1] is not None:
                assert said[1].strip() == (f"{default:g}" if isinstance(default, float) else str(default))
    assert set(re.findall(r"`(\w+)`", settings)) <= own.keys()
