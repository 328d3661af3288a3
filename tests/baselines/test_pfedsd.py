"""pFedSD: which model teaches, and which a device keeps."""

from __future__ import annotations

import torch
from baselines.bed import make_device, make_fleet, make_rows, tiny_model
from baselines.personal_bed import assert_equal, state_of

from fleetdistill.methods.base import Ask
from fleetdistill_server.testing import play


def test_pfedsd_has_no_teacher_the_first_time() -> None:
    """The first round is FedAvg's; then the device's last model teaches, and it is the one that the device keeps."""
    ended = []
    for name in ("fedavg", "pfedsd"):
        server, members = make_fleet(name, local_epochs=3, weighting="uniform")
        play(server, members)
        ended.append(state_of(server.model))
    assert_equal(*ended)
    device = members["d0"]
    own = state_of(device.local.model)
    assert device.state_dict() == {"has_trained": True}
    play(server, members)
    assert_equal(own, state_of(device.teacher))
    assert not device.teacher.training
    assert not torch.equal(own["stages.head.weight"], device.local.model.state_dict()["stages.head.weight"])


def test_pfedsd_keeps_the_devices_own_models() -> None:
    server, members = make_fleet("pfedsd", local_epochs=2)
    (cohort,) = play(server, members)
    device = members["d0"]
    assert device.fleet_model(Ask(round=2, step="train", seed=0, parts=server.message())) is None
    assert not torch.equal(device.local.model.state_dict()["stages.head.bias"], server.model.stages.head.bias)
    assert [one.step for one in cohort.asked] == ["train", "train"]


def test_lost_state_is_a_first_participation() -> None:
    server, members = make_fleet("pfedsd")
    play(server, members)
    torch.manual_seed(9)
    members["d0"] = make_device("pfedsd", tiny_model(), make_rows(0))
    play(server, members)
    assert members["d0"].teacher is None
    assert members["d1"].teacher is not None
    members["d1"].load_state_dict({"has_trained": False})
    play(server, members)
    assert members["d1"].teacher is None
