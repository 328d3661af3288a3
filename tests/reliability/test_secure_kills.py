"""kill -9 of front, engine and device at every failpoint of a secure sum: the sum is right, and is charged.

One run has no noise and a refined head, the other noise and keys that certificates vouch for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import pytest
from reliability.summing_run import CLASSES, DIMENSIONS, PRIVATE_SUMS, SUMS, rows_of
from support.fleets import assert_no_upload_lost
from support.long import long_except
from support.processes import wait_until
from support.small_run import FRAGILE, Place, SmallRun, small_run, store_of

from fleetdistill.methods.classstats_private.sums import to_wire
from fleetdistill.methods.classstats_secure.encoding import decode, limited_numbers, rows_on_grid
from fleetdistill.methods.classstats_secure.exchange import INPUT, STEPS
from fleetdistill.secure.primitives import from_bytes, lift, reduce
from fleetdistill.state.failpoints import FAILPOINTS
from fleetdistill.state.files import Files
from fleetdistill.state.privacy_ledger import PrivacyLedger
from fleetdistill.state.state_file import unpack_state
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_server.config.run_config import load_run_config
from fleetdistill_server.store.states import AskStatus

LATER = ["device.privacy.after-record", "device.secure.after-step", "device.secure.after-end"]
LATER += ["device.outbox.", "device.upload."]
WHO = {
    "front": ["blob.", "front."],
    "engine": [f"engine.{name}." for name in ("contract", "start", "asks", "answer", "checkpoint", "close")],
    FRAGILE: [f"device.{name}." for name in ("identity", "check-in", "secure", "outbox", "upload")],
}
"""Which points a process hits in such a run, in the order in which it comes by."""
WITH_NOISE = {**WHO, FRAGILE: [*WHO[FRAGILE][:2], "device.secure.before", "device.secure.after-freeze", *LATER]}
"""With noise, the device comes by the ledger, too: in the third step."""


def points_of(prefixes: Sequence[str]) -> list[str]:
    return [point for prefix in prefixes for point in FAILPOINTS if point.startswith(prefix)]


def assert_right(run: SmallRun) -> None:
    """The run has one sum, number for number that of the devices' rows, and a head that all of them have refined."""
    with store_of(run.place) as store:
        assert_no_upload_lost(store)
        row = store.runs.existing(RUN)
        assert row.status == "finished"
        assert [item.status for item in store.runs.rounds(RUN)] == ["closed"]
        (refined,) = {event.text for event in store.history.events(RUN, "head-refined")}  # again by each engine
        assert "by 2 sums of the gradients of 3 devices" in refined
        state: Any = unpack_state(store.blobs.get_state(row.checkpoint))
    ((_, (part, _)),) = state["parts"].items()
    config = load_run_config(run.place.config).method_config()
    parameters = config.parameters_for(3, CLASSES, DIMENSIONS)
    settings = {name: getattr(config, name) for name in ("min_samples", "rank", "rows_per_direction")}
    plain = [
        limited_numbers(rows_on_grid(rows, 8, 5)[0], labels, CLASSES, 8, **settings)
        for rows, labels in map(rows_of, SUMS.devices)
    ]
    expected = decode(np.sum(plain, axis=0), parameters)
    assert np.array_equal(part["counts"].numpy(), expected.counts)
    assert np.array_equal(part["sums"].numpy(), expected.sums)
    assert np.array_equal(part["second_moment"].numpy(), expected.second_moment[np.triu_indices(DIMENSIONS)])


@pytest.mark.slow
@pytest.mark.parametrize("process", long_except(["nobody", *WHO]))
def test_kills_at_every_point_of_a_sum(process: str, tmp_path: Path) -> None:
    """Each life ends at the next point of the table."""
    points = points_of(WHO.get(process, ()))
    with small_run(tmp_path / "run", {process: [f"{point}=kill" for point in points]}, scenario=SUMS) as run:
        run.finish()
        assert process == "nobody" or points[: run.kills(process)] == points
        assert_right(run)


def assert_charged(run: SmallRun) -> None:
    """The run has one sum, of what the devices had frozen, and each device has charged each sum that it sent to.

    No masked input is without its entry in the ledger, no two sums share one, and a sum has one input of a device.
    """
    with store_of(run.place) as store:
        assert_no_upload_lost(store)
        row = store.runs.existing(RUN)
        assert row.status == "finished"
        uploads = [item for item in store.asks.uploads(RUN) if item.step == INPUT]
        state: Any = unpack_state(store.blobs.get_state(row.checkpoint))
    ((name, (part, _)),) = state["parts"].items()
    config = load_run_config(run.place.config).method_config()
    frozen: dict[tuple[str, str], bytes] = {}
    for file in run.place.work.glob("*.frozen"):
        device, sid, *_ = file.name.split(".")
        assert frozen.setdefault((device, sid), file.read_bytes()) == file.read_bytes()
    charged = {device: PrivacyLedger(Files(run.place.work / device)).releases for device in PRIVATE_SUMS.devices}
    for device, releases in charged.items():
        assert len({release.sum for release in releases}) == len(releases)
        assert {(device, release.sum) for release in releases} <= frozen.keys()
        assert {item.round for item in uploads if item.device == device} <= {release.round for release in releases}
        assert {release.mu for release in releases} == {config.guarantee.mu}
        assert any(f"sum {release.sum[:16]}" == name for release in releases)
    assert len({item.ask for item in uploads}) == len({(item.device, item.sha256) for item in uploads})
    parameters = config.parameters_for(3, CLASSES, DIMENSIONS)
    inputs = [
        from_bytes(numbers, parameters.width) for (_, sid), numbers in frozen.items() if f"sum {sid[:16]}" == name
    ]
    assert len(inputs) == len(state["members"]) == len(PRIVATE_SUMS.devices)
    total = lift(reduce(np.sum(inputs, axis=0, dtype=np.uint64), parameters.width), parameters.width)
    expected = to_wire(decode(total, parameters), part["mu"], discrete=True)
    for field in ("counts", "sums", "second_moment"):
        assert np.array_equal(part[field].numpy(), getattr(expected, field))


@pytest.mark.slow
@pytest.mark.parametrize("process", long_except(["nobody", *WHO], "nobody"))
def test_kills_at_every_point_of_a_private_sum(process: str, tmp_path: Path) -> None:
    points = points_of(WITH_NOISE.get(process, ()))
    deaths = {process: [f"{point}=kill" for point in points]}
    with small_run(tmp_path / "run", deaths, scenario=PRIVATE_SUMS) as run:
        run.finish()
        assert process == "nobody" or points[: run.kills(process)] == points
        assert_charged(run)


class EachStep(Sequence[str]):
    """Failpoints of the lives of a process that dies at each of some in each step.

    Each begins when answers to the current step are missing. All of them come by all points, so that a life which is
    to end at one of them ends in the step in which it has begun.

    Args:
        place: Of the run.
        points: Failpoints that the process comes by in each step.
        devices: Whose answers the process takes part in.
        died: Points, and the steps in which the process has died there; is added to.
    """

    def __init__(self, place: Place, points: Sequence[str], devices: Sequence[str], died: set[tuple[str, str]]) -> None:
        self._place, self._points, self._devices, self._died = place, points, devices, died
        self._aim: tuple[str, str] | None = None

    def __len__(self) -> int:
        return 1000

    @overload
    def __getitem__(self, life: int) -> str: ...
    @overload
    def __getitem__(self, life: slice) -> Sequence[str]: ...
    def __getitem__(self, life: int | slice) -> str | Sequence[str]:
        if self._aim is not None:
            self._died.add(self._aim)
        (step,) = STEPS[:1] if life == 0 else wait_until(self._unanswered_step, "a step to begin, or the end")
        left = [point for point in self._points if (point, step) not in self._died]
        point = left[0] if left else self._points[-1]  # after which an answer is there
        self._aim = (point, step) if step else None
        return f"{point}=kill"

    def _unanswered_step(self) -> list[str]:
        """The name of the last step if answers to it are missing, an empty one once the run is over, else nothing."""
        with store_of(self._place) as store:
            asks = store.asks.of_run(RUN)
            last = max((ask.step_number for ask in asks), default=0)
            missing = [ask for ask in asks if ask.step_number == last and ask.status == AskStatus.OPEN]
            if any(ask.device in self._devices for ask in missing):
                return [missing[0].step]
            return [""] if store.runs.existing(RUN).status == "finished" else []


EACH = {
    "front": (points_of(WHO["front"]), PRIVATE_SUMS.devices),
    FRAGILE: (points_of(["device.secure.after-step", "device.outbox.", "device.upload."]), [FRAGILE]),
}
"""Points that a process comes by in each step, and whose answers it takes part in."""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("process", EACH)
def test_kills_at_every_point_of_every_step(process: str, tmp_path: Path) -> None:
    """One commit may hold the answers of all devices: the points after it that a run so misses are the next run's."""
    points, devices = EACH[process]
    died: set[tuple[str, str]] = set()
    for number in range(4):
        with small_run(tmp_path / f"run-{number}", scenario=PRIVATE_SUMS) as run:
            run.points = {process: EachStep(run.place, points, devices, died)}
            run.finish(180)
            assert_charged(run)
        if died >= {(point, step) for point in points for step in STEPS}:
            return
    assert died >= {(point, step) for point in points for step in STEPS}


@pytest.mark.slow
@pytest.mark.long
def test_kills_of_the_engine_in_every_step(tmp_path: Path) -> None:
    """Each life comes by the points of the steps before again, so the number of the hit names the step."""
    points = [
        f"engine.{point}=kill@{number}"
        for step in range(len(STEPS))
        for point, number in (
            ("asks.before-commit", step + 1),
            ("asks.after-commit", step + 1),
            ("answer.after-read", len(PRIVATE_SUMS.devices) * step + 1),
        )
    ]
    with small_run(tmp_path / "run", {"engine": points}, scenario=PRIVATE_SUMS) as run:
        run.finish(120)
        assert run.kills("engine") == len(points)
        assert_charged(run)
