"""kill -9 of front, engine and device at every failpoint of a secure sum with a refined head: the sum is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fleets import assert_no_upload_lost
from support.small_run import FRAGILE, Scenario, SmallRun, small_run, store_of

from fleetdistill.compute import Compute, Computed
from fleetdistill.knowledge import Array, Kind
from fleetdistill.methods import config_of_contract
from fleetdistill.methods.base import Ask
from fleetdistill.methods.classstats.exchange import REFINE
from fleetdistill.methods.classstats_secure.encoding import decode, limited_numbers, rows_on_grid
from fleetdistill.methods.classstats_secure.exchange import STEPS, SummedStatistics
from fleetdistill.replacement import Replacement
from fleetdistill.state.failpoints import FAILPOINTS
from fleetdistill.state.state_file import unpack_state
from fleetdistill.wire.v1 import contract_pb2, service_pb2
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_server.config.run_config import load_run_config

DIMENSIONS, CLASSES, ROWS = 8, 4, 120
CONFIG = f"""
[run]
name = "{RUN}"
method = "classstats_summed"
rounds = 1
min_devices = 3
[contract]
classes = {CLASSES}
input_shape = [1, 8, 8]
knowledge_type = "float32"
[method]
dimensions = {DIMENSIONS}
refine = "gradients"
refine_steps = 2
[server]
torch_device = "cpu"
compression = "none"
"""
WHO = {
    "front": ["blob.", "front."],
    "engine": [f"engine.{name}." for name in ("contract", "start", "asks", "answer", "checkpoint", "close")],
    FRAGILE: [f"device.{name}." for name in ("identity", "check-in", "secure", "outbox", "upload")],
}
"""Which points a process hits in such a run, in the order in which it comes by."""


def rows_of(name: str) -> tuple[Array, Array]:
    """Features and labels of a device, whose classes lie apart."""
    random, labels = np.random.default_rng(ord(name[-1])), np.arange(ROWS) % CLASSES
    return random.normal(size=(ROWS, DIMENSIONS)) + 3 * np.eye(CLASSES, DIMENSIONS)[labels], labels


class SummingWorker(Compute):
    """Computes for a device without torch: statistics of rows that nobody has to extract."""

    def __init__(self, name: str, contract: contract_pb2.Contract) -> None:
        super().__init__(contract)
        self._name = name

    @cached_property
    def _statistics(self) -> SummedStatistics:
        rows, labels = rows_of(self._name)
        return SummedStatistics(config_of_contract(self.contract), lambda: rows, labels, CLASSES)

    def profile(self, allow: Sequence[str]) -> contract_pb2.DeviceProfile:
        return contract_pb2.DeviceProfile(
            samples=ROWS,
            classes=CLASSES,
            input_shape=self.contract.input_shape,
            knowledge_types=[self.contract.knowledge_type],
            allowed_columns=sorted(allow),
        )

    def wanted_payloads(self) -> Sequence[bytes]:
        return []

    def take_payload(self, sha256: bytes, parts: Mapping[str, Kind]) -> None:
        raise AssertionError("this worker wants no payload")

    def load_initial(self, parts: Mapping[str, Kind]) -> None:
        raise AssertionError("the method has no initial weights")

    def state(self) -> bytes:
        return b"{}"

    delivered_state = state

    def restore(self, saved: bytes, delivered: bytes | None) -> None:
        self.has_state = True

    def answer(self, ask: service_pb2.Ask, parts: Mapping[str, Kind], allow: Sequence[str]) -> Computed:
        asked = Ask(round=ask.round, step=ask.step, seed=ask.seed, parts=parts)
        if ask.step in STEPS:
            return Computed(self._statistics.send(ask.step), b"{}")
        if ask.step == REFINE:
            return Computed(self._statistics.refine(asked), b"{}")
        return Computed(self._statistics.learn(asked), b"{}", Replacement(replaced=True), b"{}")

    def deliver(self, replacement: Replacement) -> None:
        assert replacement.replaced

    def delivered_model(self) -> Any:
        raise AssertionError("this worker has no model")

    def export(self, path: Path, number: int) -> Any:
        raise AssertionError("this worker has no model")


SUMS = Scenario(config=CONFIG, devices=("d0", "d1", "d2"), worker=SummingWorker)


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
@pytest.mark.parametrize("process", ["nobody", *WHO])
def test_kills_at_every_point_of_a_sum(process: str, tmp_path: Path) -> None:
    """Each life ends at the next point of the table."""
    points = points_of(WHO.get(process, ()))
    with small_run(tmp_path / "run", {process: [f"{point}=kill" for point in points]}, scenario=SUMS) as run:
        run.finish()
        assert process == "nobody" or points[: run.kills(process)] == points
        assert_right(run)
