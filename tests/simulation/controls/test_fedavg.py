"""The FedAvg control of a simulation: the same data, devices and participation, one model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from support.fleets import SMALL

from fleetdistill_lab.simulation.fleet import simulate


def test_control_asks_same_share_of_devices_as_the_method(tmp_path: Path) -> None:
    """Two devices, half of them a round, four rounds: each method asks two devices' worth of exchanges in all."""
    settings = {"participation_ratio": 0.5}
    wanted = replace(SMALL, method="dafkd", rounds=4, with_alone=False, with_fedavg=True, out=tmp_path)
    report = simulate(replace(wanted, settings=settings))
    assert report.fedavg_settings is not None
    assert report.fedavg_settings["participation_ratio"] == 0.5
    exchanges = {row.name: row.exchanges for row in report.comparison}
    assert exchanges["FedAvg global"] == exchanges["FedAvg devices"] == 2
