"""Simulated devices are registered at the start and made when a round draws them; the record is that of real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.fleets import DEFAULTS, RUNS, SMALL, Prepared, device_files, prepare, record, run_in_memory
from support.long import long_except

from fleetdistill.knowledge import DELIVER
from fleetdistill.link.base import Link
from fleetdistill.methods import METHODS
from fleetdistill.wire.v1 import contract_pb2, service_pb2
from fleetdistill_lab.simulation.backends.worker_processes import WorkerProcesses
from fleetdistill_lab.simulation.links.links import run_over_memory
from fleetdistill_lab.simulation.links.simulated_devices import NOT_DELIVERED, Recipients, SimulatedDevices
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_lab.simulation.timing.behaviour import FleetBehaviour
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import SharedLink
from fleetdistill_server.store.round_store import DeviceStates
from fleetdistill_server.store.store import Store

FLEET = replace(
    SMALL,
    method="fedavg",
    devices=40,
    devices_per_round=3,
    train_limit=1_200,
    alpha=10.0,
    models=("digits_linear",),
    predictors=("space_linear",),
    rounds=2,
)
KINDS = replace(FLEET, method="feddkc", models=("digits_linear", "digits_mlp_small"))
Profiles = dict[str, list[contract_pb2.DeviceProfile]]


def partly(method: str, **changes: Any) -> Simulation:
    """A run of a method in which some devices never take part."""
    one_kind: dict[str, Any] = {"models": ("digits_mlp_small",), "predictors": ("space_linear",)}
    small: dict[str, Any] = {"devices": 8, "devices_per_round": 2, "train_limit": 240, **one_kind}
    return replace(RUNS[method], **{**small, **DEFAULTS.get(method, {}), **changes})


def drawn(store: Store) -> set[str]:
    """The devices that any round drew."""
    return {device for row in store.runs.rounds(RUN) for device in row.cohort}


def first_of_kinds(prepared: Prepared) -> set[str]:
    """The first device of each model, which checks in for its kind."""
    first: dict[tuple[str, str, str], str] = {}
    for spec in prepared[1]:
        first.setdefault((spec.model, spec.predictor, spec.attack), spec.name)
    return set(first.values())


def never_made(prepared: Prepared, store: Store) -> set[str]:
    return {spec.name for spec in prepared[1]} - drawn(store) - first_of_kinds(prepared)


class Noting(SharedLink):
    """Notes the profiles that a device sends."""

    def __init__(self, api: DeviceApi, device: str, sent: Profiles) -> None:
        super().__init__(api)
        self._device, self._sent = device, sent

    def check_in(
        self, identity: service_pb2.Identity, profile: contract_pb2.DeviceProfile | None
    ) -> service_pb2.CheckInResponse:
        if profile is not None:
            copy = contract_pb2.DeviceProfile()
            copy.CopyFrom(profile)
            self._sent.setdefault(self._device, []).append(copy)
        return super().check_in(identity, profile)


def noting(sent: Profiles) -> Callable[[DeviceApi, str], Link]:
    return lambda api, device: Noting(api, device, sent)


# --- which devices are made


@pytest.mark.parametrize("wanted", [FLEET, KINDS], ids=["one model", "two models"])
def test_only_drawn_devices_and_one_of_each_kind_are_made(wanted: Simulation, tmp_path: Path) -> None:
    prepared, sent = prepare(wanted, tmp_path / "work"), Profiles()
    with closing(run_over_memory(*prepared, lambda store: None, noting(sent))) as store:
        assert {row.id for row in store.devices.all(RUN)} == {spec.name for spec in prepared[1]}
        made = drawn(store) | first_of_kinds(prepared)
        assert len(drawn(store)) <= 6
        assert sent.keys() == made
        states = DeviceStates(store.database)
        assert states.names() == made
        idle = never_made(prepared, store)
        assert len(idle) >= 40 - 6 - 2
        assert not any(states.load(name) for name in idle)
    assert not [path for path in (tmp_path / "work").iterdir() if path.name.startswith("device-")]


def test_a_fleet_that_all_takes_part_is_all_made(tmp_path: Path) -> None:
    prepared = prepare(replace(FLEET, devices=5, devices_per_round=0, train_limit=100), tmp_path / "work")
    with closing(run_in_memory(prepared)) as store:
        assert DeviceStates(store.database).names() == {spec.name for spec in prepared[1]}
        assert not [row for row in _asks(store) if row.status == "out"]


FLEETS: Mapping[str, Simulation] = {
    "fedavg": partly("fedavg"),
    "two models": partly("feddkc", models=("digits_linear", "digits_mlp_small")),
    "validation data": partly("fedavg", validation_share=0.25),
    "a predictor each": partly(
        "classstats", predictors=("space_linear", "space_mlp_16"), settings={"predictor": "trained"}
    ),
    "rows that noise hides": partly("classstats_private", train_limit=1_600),
    "false numbers of rows": partly("fedavg", hostile=3, attack="declares"),
    "flipped labels": partly("fedavg", hostile=3, attack="flips"),
    "a proxy set": partly("cdkt"),
    "starting weights": partly("dafkd"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", FLEETS)
def test_a_devices_own_check_in_sends_the_registered_profile(name: str, tmp_path: Path) -> None:
    prepared, sent = prepare(FLEETS[name], tmp_path / "work"), Profiles()
    registered: dict[str, tuple[bytes, bytes]] = {}

    def look(store: Store) -> None:
        for row in store.devices.all(RUN):
            registered.setdefault(row.id, (row.secret_hash, row.profile))

    with closing(run_over_memory(*prepared, look, noting(sent))) as store:
        rows = {row.id: (row.secret_hash, row.profile) for row in store.devices.all(RUN)}
        assert rows == registered
        assert len(rows) == len(prepared[1])
        assert sent.keys() > first_of_kinds(prepared)
        for device, profiles in sent.items():
            kept = contract_pb2.DeviceProfile.FromString(rows[device][1])
            assert all(profile == kept for profile in profiles), device
        assert len({secret for secret, _ in rows.values()}) == len(rows)


@pytest.mark.parametrize(
    "name", long_except(FLEETS, *(FLEETS.keys() - {"a predictor each", "rows that noise hides", "starting weights"}))
)
def test_registered_profiles_are_those_of_real_devices(name: str, tmp_path: Path) -> None:
    """But for the versions of their rows, which depend on keys."""
    found = []
    for durable in (False, True):
        prepared = prepare(FLEETS[name], tmp_path / str(durable))
        with closing(run_in_memory(prepared, durable=durable)) as store:
            found.append({row.id: contract_pb2.DeviceProfile.FromString(row.profile) for row in store.devices.all(RUN)})
    for device, profile in found[0].items():
        assert bool(profile.data_version) == bool(found[1][device].data_version)
        profile.data_version = found[1][device].data_version
        assert profile == found[1][device]


def test_each_registered_device_has_its_own_number_of_rows(tmp_path: Path) -> None:
    prepared = prepare(FLEET, tmp_path / "work")
    with closing(run_in_memory(prepared)) as store:
        rows = {row.id: contract_pb2.DeviceProfile.FromString(row.profile) for row in store.devices.all(RUN)}
    assert {name: profile.samples for name, profile in rows.items()} == {spec.name: spec.rows for spec in prepared[1]}
    assert len({profile.data_version for profile in rows.values()}) == len(rows)


# --- what is left is that of a run of real devices


def _asks(store: Store) -> Iterator[Any]:
    for row in store.runs.rounds(RUN):
        for number in range(1, 20):
            yield from store.asks.of_step(RUN, row.number, number)


def without_deliveries(store: Store, idle: set[str]) -> dict[str, Any]:
    """The record of a run without the deliveries at the end to some devices."""
    result = record(store)
    left_out = [(2, 3, "asks"), (2, 3, "uploads")]
    for step, device, part in left_out:
        result[part] = [row for row in result[part] if not (row[step] == DELIVER and row[device] in idle)]
    last = max((row.number for row in store.runs.rounds(RUN)), default=0)
    result["accuracies"] = [row for row in result["accuracies"] if not (row[0] == last and row[1] in idle)]
    return result


def downloads(store: Store) -> dict[str, list[Any]]:
    """What each device received: round, kind of part, and all counts of bytes."""
    result: dict[str, list[Any]] = {}
    for row in store.history.traffic(RUN):
        if row.direction == "down":
            counts = (row.payloads, row.tensor_bytes, row.envelope_bytes, row.sent_bytes)
            result.setdefault(row.device, []).append((row.round, row.kind, *counts))
    return result


Made = Callable[[], AbstractContextManager[None]]


@pytest.fixture
def all_made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """In this context, all devices check in themselves, as before a simulation had registered devices."""

    def join(self: SimulatedDevices, names: Sequence[str]) -> None:
        for name in names:
            self.step(name)

    @contextmanager
    def patched() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(SimulatedDevices, "join", join)
            yield

    return patched


@contextmanager
def both(wanted: Simulation, work: Path) -> Iterator[tuple[Prepared, Store, Store]]:
    """A run that makes devices when they are drawn, and one of real devices."""
    fast, durable = (prepare(wanted, work / kind) for kind in ("fast", "durable"))
    with closing(run_in_memory(fast)) as one, closing(run_in_memory(durable, durable=True)) as other:
        yield fast, one, other


every_method = pytest.mark.parametrize(
    "method",
    long_except(
        sorted(name for name in METHODS if not RUNS[name].configuration().hides_rows), "fedavg", "feddkc", "feddkd"
    ),
)


@pytest.mark.long
@every_method
@pytest.mark.parametrize("share", [0.0, 0.25], ids=["takes", "chooses"])
def test_the_record_is_that_of_real_devices(method: str, share: float, tmp_path: Path) -> None:
    with both(partly(method, validation_share=share), tmp_path) as (prepared, one, other):
        idle = {spec.name for spec in prepared[1]} - drawn(one)
        assert len(idle) >= 3
        assert without_deliveries(one, idle) == without_deliveries(other, idle)
        deliveries = [ask for ask in _asks(one) if ask.step == DELIVER]
        assert {(ask.device, ask.status, ask.reason) for ask in deliveries if ask.device in idle} == {
            (name, "out", NOT_DELIVERED) for name in idle if deliveries
        }
        assert {ask.status for ask in deliveries if ask.device not in idle} <= {"answered"}
        asked = [[(ask.round, ask.step, ask.device, ask.payload) for ask in _asks(store)] for store in (one, other)]
        assert sorted(asked[0]) == sorted(asked[1])


@pytest.mark.long
@every_method
def test_each_device_downloads_as_much_as_a_real_one(method: str, tmp_path: Path, all_made: Made) -> None:
    prepared, real = (prepare(partly(method), tmp_path / kind) for kind in ("made", "real"))
    with closing(run_in_memory(prepared)) as one, all_made(), closing(run_in_memory(real)) as other:
        assert len(never_made(prepared, one)) >= 3
        assert DeviceStates(other.database).names() == {spec.name for spec in real[1]}
        assert downloads(one) == downloads(other)


@pytest.mark.long
@every_method
def test_each_device_downloads_the_tensors_of_a_durable_run(method: str, tmp_path: Path) -> None:
    """Whose envelopes are larger, since they have another digest."""
    with both(partly(method), tmp_path) as (_, one, other):
        tensors = [
            {device: [row[:4] for row in rows] for device, rows in downloads(store).items()} for store in (one, other)
        ]
        assert tensors[0] == tensors[1]


@pytest.mark.long
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_downloads_of_unmade_devices_are_packed_like_others(compression: str, tmp_path: Path, all_made: Made) -> None:
    def packed(prepared: Prepared) -> Prepared:
        config, specs, work = prepared
        server = config.server.model_copy(update={"compression": compression})
        return config.model_copy(update={"server": server}), specs, work

    made, real = (packed(prepare(partly("fedavg"), tmp_path / kind)) for kind in ("made", "real"))
    with closing(run_in_memory(made)) as one, all_made(), closing(run_in_memory(real)) as other:
        assert downloads(one) == downloads(other)


@pytest.mark.long
@pytest.mark.parametrize("max_open", [1, 3])
def test_closed_devices_get_their_delivery(max_open: int, tmp_path: Path) -> None:
    """A device that has trained and was closed since is there for the result of the run."""
    whole, few = (prepare(partly("fedavg"), tmp_path / kind) for kind in ("whole", "few"))
    with (
        closing(run_in_memory(whole)) as one,
        closing(run_over_memory(*few, lambda store: None, max_open=max_open)) as other,
    ):
        assert record(one) == record(other)
        assert downloads(one) == downloads(other)
        answered = {ask.device for ask in _asks(other) if ask.step == DELIVER and ask.status == "answered"}
        assert answered == drawn(one)


@pytest.mark.long
@pytest.mark.parametrize("max_open", [1, 3])
def test_last_round_takes_the_model_whatever_is_open(max_open: int, tmp_path: Path) -> None:
    """Which devices are in memory depends on the machine and on workers, the record of a run does not."""
    last = Recipients.LAST_ROUND
    whole, few = (prepare(partly("fedavg"), tmp_path / kind) for kind in ("whole", "few"))
    with (
        closing(run_over_memory(*whole, lambda store: None, recipients=last)) as one,
        closing(run_over_memory(*few, lambda store: None, recipients=last, max_open=max_open)) as other,
    ):
        assert record(one) == record(other)
        answered = {ask.device for ask in _asks(one) if ask.step == DELIVER and ask.status == "answered"}
        assert answered == set(one.runs.rounds(RUN)[-1].cohort) < drawn(one)


@pytest.mark.long
def test_workers_make_the_same_devices(tmp_path: Path) -> None:
    alone, helped = (prepare(partly("fedavg"), tmp_path / kind) for kind in ("alone", "helped"))
    backend = partial(WorkerProcesses, 2)
    with (
        closing(run_in_memory(alone)) as one,
        closing(run_over_memory(*helped, lambda store: None, make_backend=backend)) as other,
    ):
        assert record(one) == record(other)
        assert downloads(one) == downloads(other)
        assert DeviceStates(one.database).names() == DeviceStates(other.database).names()


@pytest.mark.long
def test_devices_that_join_later_are_registered_when_they_do(tmp_path: Path) -> None:
    """In simulated time: three devices are there from the start, the others from the 15th second on."""
    always, late = ((0.0, 1e6, 1.0),), ((15.0, 1e6, 1.0),)
    behaviour = FleetBehaviour(traces=(*[always] * 3, *[late] * 5), seconds_per_sample=0.0, seconds_per_ask=10.0)
    wanted = partly("fedavg", rounds=3, behaviour=behaviour, deadline_seconds=100.0)
    found, seen = [], list[int]()
    for durable in (False, True):
        prepared = prepare(wanted, tmp_path / str(durable))

        def look(store: Store) -> None:
            seen.append(len(store.devices.all(RUN)))

        with closing(run_over_memory(*prepared, look, durable=durable, behaviour=behaviour)) as store:
            rounds = [
                (row.number, row.status, row.cohort, row.started_at, row.ended_at) for row in store.runs.rounds(RUN)
            ]
            found.append((rounds, sorted(row.id for row in store.devices.all(RUN))))
    assert found[0] == found[1]
    assert 3 in seen


# --- a run that dies


class Killed(BaseException):
    """Nothing catches it, so nothing is saved after it."""


def at_registration(store: Store) -> bool:
    """One device has checked in, the others are not registered yet."""
    return len(store.devices.all(RUN)) >= 1


def registered(store: Store) -> bool:
    return len(store.devices.all(RUN)) == 8


def in_the_last_round(store: Store) -> bool:
    return bool([row for row in store.asks.uploads(RUN) if row.round == 2])


def at_the_delivery(store: Store) -> bool:
    return bool([row for row in store.asks.uploads(RUN) if row.step == DELIVER])


@pytest.mark.parametrize(
    "moment",
    [
        registered,
        *(
            pytest.param(moment, marks=pytest.mark.long)
            for moment in (at_registration, in_the_last_round, at_the_delivery)
        ),
    ],
)
@pytest.mark.parametrize("max_open", [1, pytest.param(256, marks=pytest.mark.long)])
def test_killed_run_of_unmade_devices_has_the_same_end(
    moment: Callable[[Store], bool], max_open: int, tmp_path: Path
) -> None:
    whole, broken = (prepare(partly("fedavg"), tmp_path / kind) for kind in ("whole", "broken"))

    def die(store: Store) -> None:
        if moment(store):
            raise Killed

    with pytest.raises(Killed):
        run_over_memory(*broken, die, max_open=max_open)
    with (
        closing(run_in_memory(whole)) as one,
        closing(run_over_memory(*broken, lambda store: None, max_open=max_open)) as other,
    ):
        assert record(one) == record(other)
        assert downloads(one) == downloads(other)
        assert DeviceStates(one.database).names() == DeviceStates(other.database).names()
        made = [spec for spec in whole[1] if spec.name in drawn(one)]
    assert device_files((whole[0], made, whole[2])) == device_files((broken[0], made, broken[2]))
