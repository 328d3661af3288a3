"""A device's gradients in secure sums: masked for exactly the devices of its sum, in order, and so often only."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from support.secure_fleet import CLASSES, DIMENSIONS, SecureFleet

from fleetdistill.errors import QuorumNotReached, SumRefusedError
from fleetdistill.knowledge import LinearHead, Plan
from fleetdistill.methods.base import Answer, Ask
from fleetdistill.methods.classstats_secure.encoding import gradient_numbers, gradient_of_sum
from fleetdistill.methods.classstats_secure.exchange import INPUT, UNMASK
from fleetdistill.secure.primitives import lift, reduce
from fleetdistill.state import failpoints

SUMMED = "classstats_summed"
KEYS = pytest.mark.parametrize("keys", ["unsigned", "certificates", "roster"])


def head(seed: int = 0) -> LinearHead:
    random = np.random.default_rng(seed)
    return LinearHead(
        labels=list(range(CLASSES)),
        counts=np.full(CLASSES, 20, np.int32),
        mean=np.zeros(DIMENSIONS, np.float16),
        weights=random.normal(size=(CLASSES, DIMENSIONS + 1)).astype(np.float16),
    )


def fleet_of(directory, devices: int = 5, **settings) -> SecureFleet:
    return SecureFleet(directory, devices, method=SUMMED, **{"refine": "gradients", **settings})


def signed(fleet: SecureFleet, masked) -> np.ndarray:
    width = fleet.parameters().width
    return lift(reduce(np.sum(masked, axis=0, dtype=np.uint64), width), width)


def plain(fleet: SecureFleet, names, at: LinearHead) -> np.ndarray:
    return np.sum([gradient_numbers(fleet.gradient(name, at), fleet.parameters()) for name in names], axis=0)


@KEYS
def test_the_sum_is_number_for_number_that_of_its_devices(tmp_path, keys):
    fleet = fleet_of(tmp_path, keys=keys, min_in_sum=4)
    members = fleet.sum(lost=[(INPUT, "device-2")]).devices
    for seed in (1, 2):
        found = signed(fleet, [fleet.refine(name, head(seed)) for name in members])
        assert found.tolist() == plain(fleet, members, head(seed)).tolist()
    summed = gradient_of_sum(found, fleet.parameters())
    assert summed.rows == 12 * len(members)
    exact = sum(fleet.gradient(name, head(2)).gradient * fleet.gradient(name, head(2)).scale for name in members)
    assert np.abs(summed.gradient - exact).max() < len(members) * 2.0**-17


def test_the_devices_of_a_ring_sum_their_gradients(tmp_path):
    fleet = fleet_of(tmp_path, 16, graph="ring", max_in_sum=16)
    members = fleet.sum(lost=[(INPUT, "device-3")]).devices
    found = signed(fleet, [fleet.refine(name, head()) for name in members])
    assert found.tolist() == plain(fleet, members, head()).tolist()


@KEYS
def test_of_fewer_than_all_nothing_is_known(tmp_path, keys):
    """The rest is as far from the sum of those who answered as random numbers are, and so is one device's part."""
    fleet = fleet_of(tmp_path, keys=keys)
    names = fleet.sum().devices
    masked = {name: fleet.refine(name, head()) for name in names}
    bits = 8 * fleet.parameters().width
    for answered in (names[:1], names[1:], names[:-1]):
        rest = np.abs(signed(fleet, [masked[name] for name in answered]) - plain(fleet, answered, head()))
        assert np.median(rest) > 2 ** (bits - 6)
    assert not fleet.opened(fleet.sid), "the server has no device's mask seed, whatever it reconstructs"


def test_each_head_has_masks_of_its_own(tmp_path):
    """Else the difference of two sums would be that of one device's gradients."""
    fleet = fleet_of(tmp_path)
    fleet.sum()
    one, two = fleet.refine("device-0", head(1)), fleet.refine("device-0", head(2))
    apart = plain(fleet, ["device-0"], head(1)) - plain(fleet, ["device-0"], head(2))
    assert np.median(np.abs(signed(fleet, [one - two]) - apart)) > 2 ** (8 * fleet.parameters().width - 6)


def test_devices_that_were_shown_different_heads_give_no_sum(tmp_path):
    fleet = fleet_of(tmp_path)
    names = fleet.sum().devices
    masked = [fleet.refine(name, head(number == 2)) for number, name in enumerate(names)]
    rest = np.abs(signed(fleet, masked) - plain(fleet, names, head()))
    assert np.median(rest) > 2 ** (8 * fleet.parameters().width - 6)


@pytest.mark.parametrize("keys", ["unsigned", "roster"])
def test_a_server_cannot_leave_all_rows_but_one_devices_out(tmp_path, keys):
    """It tells all others that their classes are not counted: masks of different lists do not cancel."""
    fleet = fleet_of(tmp_path, keys=keys)
    names = fleet.sum().devices
    masked = [fleet.refine(name, head(), left_out=range(CLASSES if number else 0)) for number, name in enumerate(names)]
    rest = np.abs(signed(fleet, masked) - plain(fleet, names[:1], head()))
    assert np.median(rest) > 2 ** (8 * fleet.parameters().width - 6)
    alike = fleet_of(tmp_path / "alike", keys=keys)
    names = alike.sum().devices
    found = signed(alike, [alike.refine(name, head(), left_out=[1]) for name in names])
    parts = [gradient_numbers(alike.gradient(name, head(), [1]), alike.parameters()) for name in names]
    assert found.tolist() == np.sum(parts, axis=0).tolist()


# --- refusals


def test_a_device_answers_as_many_heads_as_the_run_says(tmp_path):
    fleet = fleet_of(tmp_path, refine_steps=3)
    fleet.sum()
    first = fleet.refine("device-0", head(0))
    for seed in (1, 2):
        fleet.refine("device-0", head(seed))
    with pytest.raises(SumRefusedError, match="has summed gradients 3 times, as often as the run says"):
        fleet.refine("device-0", head(3))
    assert fleet.refine("device-0", head(0)).tolist() == first.tolist(), "the same head again"


@pytest.mark.parametrize("step", [INPUT, UNMASK])
def test_no_gradient_before_the_sum_is_finished(tmp_path, step):
    fleet = fleet_of(tmp_path)
    with pytest.raises(QuorumNotReached):
        fleet.sum(lost=[(step, name) for name in fleet.names])
    with pytest.raises(SumRefusedError, match="has not finished the sum of its class statistics"):
        fleet.refine("device-0", head())


def test_a_device_that_is_in_no_sum_sends_no_gradient(tmp_path):
    fleet = fleet_of(tmp_path, min_in_sum=4)
    fleet.sum(lost=[("secure_keys", "device-2")])
    with pytest.raises(SumRefusedError, match="no open sum of this round"):
        fleet.refine("device-2", head())
    with pytest.raises(SumRefusedError, match="no open sum of this round"):
        fleet.refine("device-1", head(), number=2)


def test_no_gradient_after_the_class_space(tmp_path):
    fleet = fleet_of(tmp_path)
    fleet.sum()
    fleet.refine("device-0", head())
    ask = Ask(round=1, step="learn", seed=0, parts={"plan": Plan(values={"counted": True})})
    fleet.device("device-0").answer(Answer(parts={}, samples=12), ask, fleet.contract, fleet.config)
    with pytest.raises(SumRefusedError, match="no open sum of this round"):
        fleet.refine("device-0", head(1))


@pytest.mark.parametrize("method", ["classstats_secure", SUMMED])
def test_no_gradient_in_a_run_without_a_refined_head(tmp_path, method):
    """With noise there is none: a gradient in clear sums would be without it."""
    settings = {"epsilon": 5.0} if method != SUMMED else {"refine": "off"}
    fleet = SecureFleet(tmp_path, 5, method=method, **settings)
    fleet.sum()
    with pytest.raises(SumRefusedError, match="has no secure sums of gradients"):
        fleet.refine("device-0", head())


def test_other_rows_under_the_same_mask_are_refused(tmp_path, monkeypatch):
    fleet = fleet_of(tmp_path)
    fleet.sum()
    fleet.refine("device-0", head())
    names = fleet.names
    monkeypatch.setattr(fleet, "rows", lambda name, rows=fleet.rows: rows(names[-1]))
    with pytest.raises(SumRefusedError, match="cannot repeat its answer"):
        fleet.refine("device-0", head())


def test_more_rows_than_a_sum_takes_are_refused(tmp_path, monkeypatch):
    fleet = fleet_of(tmp_path)
    fleet.sum()
    one = fleet.gradient("device-0", head())
    many = type(one)(gradient=one.gradient, scale=one.scale, loss=one.loss, rows=2**24 // 1000 + 1)
    monkeypatch.setattr(fleet, "gradient", lambda name, at, left_out: many)
    with pytest.raises(SumRefusedError, match="takes at most 16777 rows of one device"):
        fleet.refine("device-0", head())


# --- crashes


class Crash(BaseException):
    """The device's process ends."""


def test_a_crash_after_the_record_sends_the_same_bytes(tmp_path, monkeypatch):
    fleet = fleet_of(tmp_path)
    names = fleet.sum().devices

    def die(name: str) -> None:
        if name == "device.secure.after-step":
            raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "hit", die)
        with pytest.raises(Crash):
            fleet.refine("device-0", head())
    found = signed(fleet, [fleet.refine(name, head()) for name in names])
    assert found.tolist() == plain(fleet, names, head()).tolist()


def test_a_restored_directory_masks_the_same(tmp_path):
    fleet = fleet_of(tmp_path / "d")
    fleet.sum()
    shutil.copytree(tmp_path / "d" / "device-0", tmp_path / "backup")
    first = fleet.refine("device-0", head())
    shutil.rmtree(tmp_path / "d" / "device-0")
    shutil.copytree(tmp_path / "backup", tmp_path / "d" / "device-0")
    assert fleet.refine("device-0", head()).tolist() == first.tolist()
