"""docs/reference/baselines.md has each baseline with its settings."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from support.fleets import BASELINES

from fleetdistill.methods import config_class
from fleetdistill.methods.fedavg.config import FedAvgConfig
from fleetdistill.methods.feddkc.config import FedDKCConfig
from fleetdistill.methods.local import LocalTraining
from fleetdistill_lab.baselines.fedgkt import FedGKTConfig

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "baselines.md").read_text()
ROWS = {
    name: row
    for row in PAGE.splitlines()
    if row.startswith("| `")
    for name in re.findall(r"`(\w+)`", row.split("|")[1])
}


def test_the_page_has_a_row_for_each_baseline() -> None:
    assert sorted(ROWS) == sorted(BASELINES)


def usual_settings(config: type[Any]) -> dict[str, Any]:
    """Defaults of the method that a baseline is built on, or of the baseline whose settings its row refers to."""
    base = next(one for one in (FedGKTConfig, FedDKCConfig, FedAvgConfig, LocalTraining) if one in config.__mro__[1:])
    return {item.name: item.default for item in dataclasses.fields(base)}


@pytest.mark.parametrize("name", BASELINES)
def test_row_has_the_settings_that_differ_from_its_base(name: str) -> None:
    usual = usual_settings(config_class(name))
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
