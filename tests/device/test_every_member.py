"""Every public member of `Device`, `AsyncDevice` and `Predictor`, at every moment, with every method and variant.

A method enters by its line in the table of methods (`support.fleets.RUNS`), a member by being public: one without a
line in `DEVICE`, `ASYNC` or `PREDICTOR` fails. At each moment each member returns what it should, or raises the error
that it should.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from support.fleets import RUN, RUNS, prepare
from support.hostile_server import LyingLink
from support.long import long_except
from support.open_device import grouped, open_device

from fleetdistill import COLUMNS, AsyncDevice, Device, Event, Predictor, Step
from fleetdistill.compute import light_worker
from fleetdistill.device.preview import Preview
from fleetdistill.errors import (
    ConfigurationError,
    DeviceBusyError,
    DeviceClosedError,
    LinkError,
    ModelError,
    StateError,
)
from fleetdistill.methods import config_class, known_methods
from fleetdistill.methods.classstats.config import SpaceConfig
from fleetdistill_lab.simulation.spec.arrays import load_arrays
from fleetdistill_lab.simulation.spec.device import DeviceSpec, build_device_model
from fleetdistill_server.testing import MemoryServer

MOMENTS = ("new without server", "new", "during delivery", "after delivery", "restarted without server", "restarted")
LIGHT = [name for name, run in RUNS.items() if isinstance(run.configuration(), SpaceConfig)]
"""The runs in which a device without PyTorch can take part."""
FLEETS = [*((name, "torch") for name in RUNS), *((name, "light") for name in LIGHT)]


class Away(LyingLink):
    """A server that cannot be reached."""

    def _refuse(self, *given: Any, **named: Any) -> Any:
        raise LinkError("the server is away")

    check_in = next_ask = heartbeat = leave = decline = upload_status = upload = download = _refuse


@dataclass
class Moment:
    """A device at one moment, and what is true of it then.

    Attributes:
        name: One of `MOMENTS`.
        device: The device.
        inputs: A batch of its inputs.
        logits: What its model says of them; None if it has no model.
        rounds: Rounds of the deliveries so far.
        online: Whether the server can be reached.
        working: Whether the device is in the middle of its work, as in `on_event`.
        copy: Opens a device on a copy of the state directory, without the server, for members that end its use.
        spare: The `Device` of an `AsyncDevice` on such a copy, `online` or not, for members that change it: each goes
            on where the one before it has stopped. None if the device works.
        method: Method of the run.
        newcomer: Returns arguments of a further device that is new at the server, for members that forget it there.
        file_logits: What onnxruntime says of the file of the version in use, when it was first there.
    """

    name: str
    device: Device
    inputs: np.ndarray
    logits: np.ndarray | None
    rounds: Sequence[int]
    online: bool
    working: bool
    copy: Callable[[], contextlib.AbstractContextManager[Device]]
    spare: Device | None
    method: str
    newcomer: Callable[[], Mapping[str, Any]]
    file_logits: Callable[[], np.ndarray]

    @property
    def version(self) -> int:
        """Number of the version in use."""
        return len(self.rounds)

    @property
    def files(self) -> Sequence[int]:
        """Rounds of which a file was written: it follows the event `delivered`."""
        return self.rounds[:-1] if self.working else self.rounds

    @cached_property
    def predictor(self) -> Predictor:
        """What reads the files at this moment: one for all members, because it takes longer to load than they do."""
        return Predictor(self.device.state_dir)

    @property
    def finished(self) -> bool:
        return self.online and self.name in ("after delivery", "restarted")

    @property
    def has_models(self) -> bool:
        """Whether the device has a state, or can check in for the run's contract."""
        return self.online or (self.device.state_dir / "state.safetensors").exists()

    def equal(self, found: Any, tolerance: float = 1e-5) -> None:
        assert self.logits is not None
        scale = max(1.0, float(np.abs(self.logits).max()))
        np.testing.assert_allclose(np.asarray(found), self.logits, rtol=0, atol=tolerance * scale)


def applied(model: Any, inputs: np.ndarray) -> np.ndarray:
    """The logits of a model of either kind of device."""
    import torch

    if not isinstance(model, torch.nn.Module):
        return np.asarray(model(inputs))
    with torch.no_grad():
        return model(torch.from_numpy(inputs)).numpy()


# --- Device


def predict(at: Moment) -> None:
    if at.logits is None:
        with pytest.raises(ModelError, match="no model yet"):
            at.device.predict(at.inputs)
        return
    at.equal(at.device.predict(at.inputs))
    np.testing.assert_array_equal(at.device.predict(at.inputs[:1]), at.device.predict(at.inputs[:1]))


def model(at: Moment) -> None:
    if not at.has_models:
        with pytest.raises(LinkError, match="the server is away"):
            _ = at.device.model
    elif at.logits is None:
        with pytest.raises(ModelError, match="no model yet"):
            _ = at.device.model
    else:
        at.equal(applied(at.device.model, at.inputs))


def models(at: Moment) -> None:
    if not at.has_models:
        with pytest.raises(LinkError, match="the server is away"):
            _ = at.device.models
        return
    result = at.device.models
    assert bool(result) == (at.logits is not None)
    for name, one in result.items():
        assert applied(one, at.inputs).shape == (len(at.inputs), 10), name
        with pytest.raises(ModelError, match=f"did you mean '{name}'"):
            _ = result[f"{name}s"]
    if result:
        in_use = [name for name, one in result.items() if one is at.device.model]
        assert len(in_use) == 1
    with pytest.raises(ModelError, match="'none'"):
        _ = result["none"]


def version(at: Moment) -> None:
    assert at.device.version == at.version


WORK = ("step", "tick", "run", "start")


def work(at: Moment) -> None:
    """One thread at a time works. The play shows what the calls do with an ask."""
    if at.spare is None:
        for call in WORK:
            with pytest.raises(DeviceBusyError):
                getattr(at.device, call)()
        return
    does = after_the_end if at.finished else before_work if at.online else offline
    for call in WORK:
        does(at.spare, call)
        predict(replace(at, device=at.spare))


def before_work(device: Device, call: str) -> None:
    """The other devices are not there yet, so there is no work."""
    if call in ("step", "tick"):
        assert getattr(device, call)(*((0,) if call == "step" else ())) is Step.WAITED
        return
    device.stop()  # as in `offline`
    getattr(device, call)()
    device.stop()
    assert device.join(60)


def after_the_end(device: Device, call: str) -> None:
    if call in ("step", "tick"):
        assert getattr(device, call)() is Step.FINISHED
        return
    getattr(device, call)()
    assert device.join(60)
    if call == "start":
        assert device.background_result().result() is None


def offline(device: Device, call: str) -> None:
    if call == "step":
        with pytest.raises(LinkError, match="the server is away"):
            device.step(0)
    elif call == "tick":
        assert device.tick() is Step.WAITED
        assert device.pause_seconds > 0
    else:
        device.stop()  # applies to the next `run`, and to a `start` only afterwards
        getattr(device, call)()
        device.stop()
        assert device.join(60)


def join(at: Moment) -> None:
    assert at.device.join(0), "it was not started"


def background_result(at: Moment) -> None:
    with pytest.raises(ConfigurationError, match="the device has no background thread"):
        at.device.background_result()


def pause_seconds(at: Moment) -> None:
    assert at.device.pause_seconds == 0


def roll_back_and_forward(at: Moment) -> None:
    with pytest.raises(StateError, match="nothing to roll forward to"):
        at.device.roll_forward()
    if at.version < 2:
        with pytest.raises(StateError, match="no earlier version" if at.version else "no model was delivered yet"):
            at.device.roll_back()
    elif at.spare is not None:
        assert at.spare.roll_back() == at.version - 1
        assert at.spare.version == at.version, "in the next turn"
        assert at.spare.roll_forward() == at.version, "no turn has carried it out"


def forget(at: Moment) -> None:
    if at.working:
        with pytest.raises(DeviceBusyError):
            at.device.forget()
    elif not at.online:
        with at.copy() as device:
            forget_offline(device.ledger.totals.messages, device.forget)
            assert (device.state_dir / "device.json").exists() == bool(device.ledger.totals.messages)
    elif not at.finished:  # after the end, `play` has the devices that were looked at forgotten
        with Device(**at.newcomer()) as device:
            assert isinstance(device.models, Mapping)  # checks in; a turn would begin the run
            assert device.ledger.totals.messages == {"check-in": 1}
            assert device.forget() is True
            assert not (device.state_dir / "device.json").exists()


def forget_offline(sent: object, call: Callable[[], bool]) -> None:
    if sent:
        with pytest.raises(LinkError, match="the server is away"):
            call()
    else:
        assert call() is True  # a device that has sent nothing needs no server


def preview(at: Moment) -> None:
    """Also when the run is over: the server still says what an answer would contain."""
    if at.spare is None:
        with pytest.raises(DeviceBusyError):
            at.device.preview()
    elif not at.online:
        with pytest.raises(LinkError, match="the server is away"):
            at.spare.preview()
    else:
        answers = [entry for entry in at.spare.ledger.entries if entry.kind == "answer"]
        check_preview(at, at.spare.preview())
        assert [entry for entry in at.spare.ledger.entries if entry.kind == "answer"] == answers


def check_preview(at: Moment, shown: Preview) -> None:
    assert (shown.run, shown.method) == (RUN, at.method)
    assert shown.columns
    assert set(shown.columns) <= set(COLUMNS)
    assert shown.bytes > sum(tensor.bytes for part in shown.parts for tensor in part.tensors)


def ledger(at: Moment) -> None:
    entries = at.device.ledger.entries
    assert bool(entries) == (at.name not in ("new without server", "new")) or at.name == "new"
    assert all(entry.run == RUN for entry in entries)


def replace_data(at: Moment) -> None:
    device = at.spare or at.device
    device.replace_data()
    predict(replace(at, device=device))


def allow_and_stop(at: Moment) -> None:
    assert set(at.device.allow) == set(COLUMNS)
    if at.working:
        return
    with at.copy() as device:
        device.allow = ("metrics",)
        assert device.allow == ("metrics",)
        device.stop()
        assert device.step(0) is Step.PAUSED


def close(at: Moment) -> None:
    if at.working:
        return
    with at.copy() as device:
        device.close()
        device.close()
        for call in (*WORK, "roll_back", "roll_forward", "replace_data", "preview", "forget"):
            with pytest.raises(DeviceClosedError):
                getattr(device, call)()
        with pytest.raises(DeviceClosedError):
            device.predict(at.inputs)
        assert device.version == at.version


def wake(at: Moment) -> None:
    at.device.wake()
    assert at.device.pause_seconds == 0


def device_id(at: Moment) -> None:
    assert at.device.device_id == "device-0"


def state_dir(at: Moment) -> None:
    assert (at.device.state_dir / "lock").exists()


DEVICE: Mapping[str, Callable[[Moment], None]] = {  # members that share a check are checked at once
    "predict": predict,
    "model": model,
    "models": models,
    "version": version,
    **dict.fromkeys(WORK, work),
    "join": join,
    "background_result": background_result,
    "pause_seconds": pause_seconds,
    "wake": wake,
    **dict.fromkeys(("roll_back", "roll_forward"), roll_back_and_forward),
    "forget": forget,
    "preview": preview,
    "ledger": ledger,
    "device_id": device_id,
    "state_dir": state_dir,
    "close": close,
    "replace_data": replace_data,
    **dict.fromkeys(("allow", "stop"), allow_and_stop),
}


# --- Predictor


def file_predicts(at: Moment) -> None:
    result = at.predictor
    if not at.files:
        with pytest.raises(ModelError, match="has no usable model"):
            result.predict(at.inputs)
    elif not at.working:
        at.equal(result.predict(at.inputs), 1e-4)
        np.testing.assert_array_equal(result.predict(at.inputs), at.file_logits())


def of_file(member: str, expected: Callable[[Moment], Any]) -> Callable[[Moment], None]:
    def check(at: Moment) -> None:
        result = at.predictor
        if at.files:
            assert getattr(result, member) == expected(at)
        else:
            with pytest.raises(ModelError, match="has no usable model"):
                getattr(result, member)

    return check


def variant(at: Moment) -> None:
    if at.files:
        result = at.predictor.variant
        further = [(at.device.state_dir / f"{name}.onnx").exists() for name in ("own", "personal")]
        assert result == ("general" if any(further) else "")


def file_model(at: Moment) -> None:
    if at.files:
        result = at.predictor
        assert result.model.run == RUN
        np.testing.assert_array_equal(result.model.predict(at.inputs), result.predict(at.inputs))


def ready(at: Moment) -> None:
    assert at.predictor.ready is bool(at.files)


def refresh(at: Moment) -> None:
    assert not at.predictor.refresh(), "it is the newest file already"


def error(at: Moment) -> None:
    assert at.predictor.error == ""


PREDICTOR: Mapping[str, Callable[[Moment], None]] = {
    "predict": file_predicts,
    "version": of_file("version", lambda at: len(at.files)),
    "round": of_file("round", lambda at: at.files[-1]),
    "variant": variant,
    "model": file_model,
    "ready": ready,
    "refresh": refresh,
    "error": error,
}


# --- AsyncDevice: each member is that of a `Device` in the same state


async def started_and_stopped(device: AsyncDevice) -> None:
    running = asyncio.ensure_future(device.run())
    await asyncio.sleep(0)
    device.stop()
    await running


@dataclass
class Async:
    """What members of `AsyncDevice` return, compared with those of `Device` at the same moment.

    It is the spare one, or during a delivery one that works, whose `on_event` looks at it.
    """

    at: Moment
    device: AsyncDevice

    async def of(self, member: str) -> None:
        match member:
            case "predict" if self.at.logits is None:
                with pytest.raises(ModelError):
                    await self.device.predict(self.at.inputs)
            case "predict":
                self.at.equal(await self.device.predict(self.at.inputs))
            case "run" | "preview" | "forget" if self.at.working:
                with pytest.raises(DeviceBusyError):
                    await getattr(self.device, member)()
            case "stop" | "close" if self.at.working:
                pass  # they end the work, and with it the moment
            case "forget" if self.at.finished:
                pass  # after the end, `play` has the devices that were looked at forgotten
            case "forget" if self.at.online:
                async with AsyncDevice(**self.at.newcomer()) as device:
                    await device.models()
                    assert await device.call(lambda device: device.ledger.totals.messages) == {"check-in": 1}
                    assert await device.forget() is True
                    assert not (device.state_dir / "device.json").exists()
            case "forget" if await self.device.call(lambda device: device.ledger.totals.messages):
                with pytest.raises(LinkError, match="the server is away"):
                    await self.device.forget()
            case "forget":
                assert await self.device.forget() is True  # a device that has sent nothing needs no server
            case "model" if self.at.has_models and self.at.logits is not None:
                self.at.equal(applied(await self.device.model(), self.at.inputs))
            case "model" if self.at.has_models:
                with pytest.raises(ModelError, match="no model yet"):
                    await self.device.model()
            case "models" if self.at.has_models:
                assert (await self.device.models()).keys() == self.at.device.models.keys()
            case "preview" if self.at.online:
                check_preview(self.at, await self.device.preview())
            case "model" | "models" | "preview":
                with pytest.raises(LinkError, match="the server is away"):
                    await getattr(self.device, member)()
            case "roll_back" if self.at.version < 2:
                with pytest.raises(StateError):
                    await self.device.roll_back()
            case "roll_back" if self.at.working:
                pass  # it would take place in the next turn
            case "roll_back":
                assert await self.device.roll_back() == self.at.version - 1
                assert await self.device.roll_forward() == self.at.version
            case "roll_forward":
                with pytest.raises(StateError, match="nothing to roll forward to"):
                    await self.device.roll_forward()
            case "call":
                assert await self.device.call(lambda device: device.version) == self.at.version
            case "version":
                assert self.device.version == self.at.version
            case "allow":
                assert set(self.device.allow) == set(COLUMNS)
                if self.at.working:
                    return
                self.device.allow = ("metrics",)
                assert await self.device.call(lambda device: device.allow) == ("metrics",)
            case "wake":
                self.device.wake()
                assert await self.device.call(lambda device: device.pause_seconds) == 0
            case "device_id":
                assert self.device.device_id == self.at.device.device_id
            case "state_dir":
                assert (self.device.state_dir / "lock").exists()
            case "run" if self.at.finished:
                assert await self.device.run() is None  # type: ignore[func-returns-value]
            case "run" | "stop":
                await started_and_stopped(self.device)
            case "replace_data" | "close":
                assert await getattr(self.device, member)() is None


ASYNC: tuple[str, ...] = (
    "device_id",
    "state_dir",
    "version",
    "predict",
    "model",
    "models",
    "call",
    "preview",
    "run",
    "stop",
    "wake",
)
ASYNC += ("replace_data", "roll_forward", "roll_back", "allow", "forget", "close")


# --- the table


def public(kind: type, *instances: object) -> set[str]:
    return {name for item in (kind, *instances) for name in dir(item) if not name.startswith("_")}


def test_every_public_member_is_in_the_table(tmp_path: Path) -> None:
    assert public(Device) == DEVICE.keys()
    assert public(AsyncDevice) == set(ASYNC)
    assert public(Predictor, Predictor(tmp_path)) == PREDICTOR.keys()


def test_every_method_is_in_the_table() -> None:
    """And with the methods of class statistics the devices without PyTorch."""
    assert {RUNS[name].method for name, compute in FLEETS if compute == "torch"} == set(known_methods())
    assert LIGHT
    assert {RUNS[name].method for name in LIGHT} == {
        "classstats",
        "classstats_private",
        "classstats_secure",
        "classstats_summed",
    }
    assert config_class("classstats")


class Fleet:
    """The devices of one run, of which the first is looked at, and during its deliveries the second, too."""

    def __init__(self, name: str, compute: str, work: Path) -> None:
        config, self.specs, _ = prepare(RUNS[name], work / "made")
        sections = config.model_dump(by_alias=True, exclude_unset=True)
        self.settings = {key: value for key, value in sections.items() if value is not None}
        self.compute, self.work, self.copies = compute, work, 0
        self.spec = self.specs[0]
        self.inputs = load_arrays(self.spec.data_file)[0][:4]
        self.failures: list[str] = []
        self.references: dict[int, np.ndarray] = {}

    def arguments(self, spec: DeviceSpec) -> dict[str, Any]:
        data = load_arrays(spec.data_file)
        usual = {"run": RUN, "device_id": spec.name, "allow": COLUMNS}
        if self.compute == "light" and spec is self.spec:
            return {**usual, "worker": light_worker(data)}
        network = partial(build_device_model, spec, data[0].shape[1:])
        return {**usual, "model": network, "data": data, "predictor": spec.predictor}

    def open(self, spec: DeviceSpec, link: Any, folder: Path | None = None, **changes: Any) -> Device:
        return open_device(
            server=link, state_dir=folder or self.work / spec.name, **{**self.arguments(spec), **changes}
        )

    def copied(self, state: Path) -> Device:
        return self.open(self.spec, Away(), self.copy_of(state), export="never")

    def copy_of(self, state: Path) -> Path:
        self.copies += 1
        target = self.work / f"copy-{self.copies}"
        shutil.copytree(state, target, ignore=shutil.ignore_patterns("lock"))
        return target

    @cached_property
    def own_logits(self) -> np.ndarray | None:
        if self.compute == "light":
            return None
        network = build_device_model(self.spec, self.inputs.shape[1:]).eval()
        return applied(network, self.inputs)

    def file_logits(self, state: Path, version: int) -> np.ndarray:
        if version not in self.references:
            session = onnxruntime.InferenceSession(str(state / "model.onnx"))
            self.references[version] = session.run(["logits"], {"input": self.inputs})[0]
        return self.references[version]

    def look(self, at: Moment) -> None:
        for kind, table in (("Device", DEVICE), ("Predictor", PREDICTOR)):
            for check in dict.fromkeys(table.values()):
                members = "/".join(member for member in table if table[member] is check)
                with self.noting(f"{kind}.{members}", at.name):
                    check(at)

    async def look_async(self, looked: Async) -> None:
        for member in ASYNC:  # the last one closes it
            with self.noting(f"AsyncDevice.{member}", looked.at.name):
                await asyncio.wait_for(looked.of(member), 60)

    def moment(
        self, name: str, device: Device, logits: np.ndarray | None, rounds: Sequence[int], *, online: bool
    ) -> Moment:
        state = device.state_dir
        return Moment(
            name,
            device,
            inputs=self.inputs,
            logits=logits,
            rounds=tuple(rounds),
            online=online,
            working=name == "during delivery",
            copy=partial(self.copied, state),
            spare=None,
            method=self.settings["run"]["method"],
            newcomer=self.newcomer,
            file_logits=partial(self.file_logits, state, len(rounds)),
        )

    def newcomer(self) -> dict[str, Any]:
        self.copies += 1
        name = f"newcomer-{self.copies}"
        arguments = {**self.arguments(self.spec), "device_id": name}
        return grouped(server=self.server.link(), state_dir=self.work / name, export="never", **arguments)

    async def look_at_both(self, *given: Any, online: bool) -> None:
        at = self.moment(*given, online=online)
        state, link = self.copy_of(at.device.state_dir), self.server.link() if online else Away()
        arguments = grouped(server=link, state_dir=state, export="never", **self.arguments(self.spec))
        async with AsyncDevice(**arguments) as device:
            at = replace(at, spare=await device.call(lambda device: device))
            self.look(at)
            await self.look_async(Async(at, device))

    @contextlib.contextmanager
    def noting(self, member: str, moment: str) -> Iterator[None]:
        try:
            yield
        except Exception as failure:
            self.failures.append(f"{member} {moment}: {type(failure).__name__}: {str(failure).strip()[:300]}")

    async def play(self) -> None:
        with self.open(self.spec, Away()) as device:
            await self.look_at_both("new without server", device, self.own_logits, (), online=False)
        delivered: list[np.ndarray] = []
        rounds: list[int] = []

        def on_event(event: Event) -> None:
            if event.kind != "delivered":
                return
            delivered.append(applied(first.model, self.inputs))
            rounds.append(event.round)
            self.look(self.moment("during delivery", first, delivered[-1], rounds, online=True))

        with MemoryServer(self.settings) as server, contextlib.ExitStack() as closing:
            self.server = server
            first = closing.enter_context(self.open(self.spec, server.link(), on_event=on_event))
            second = await self.second()
            others = [self.open(spec, server.link(), export="never") for spec in self.specs[2:]]
            for other in others:
                closing.enter_context(other)
            await self.look_at_both("new", first, self.own_logits, (), online=True)
            await asyncio.to_thread(server.play, first, await second.call(lambda device: device), *others)
            assert delivered
            assert server.status == "finished"
            await self.look_at_both("after delivery", first, delivered[-1], rounds, online=True)
            assert await second.forget() is True
            assert not (second.state_dir / "device.json").exists()
            first.close()
            with self.open(self.spec, Away()) as restarted:
                await self.look_at_both("restarted without server", restarted, delivered[-1], rounds, online=False)
            with self.open(self.spec, server.link()) as restarted:
                await self.look_at_both("restarted", restarted, delivered[-1], rounds, online=True)
                assert restarted.step(0) is Step.FINISHED
                assert restarted.forget() is True
                assert not (restarted.state_dir / "device.json").exists()

    async def second(self) -> AsyncDevice:
        """A device in an asyncio app, which looks at it when a model is delivered."""
        rounds: list[int] = []

        async def on_event(event: Event) -> None:
            if event.kind == "delivered":
                rounds.append(event.round)
                device = await second.call(lambda device: device)
                logits = applied(await second.model(), self.inputs)
                at = self.moment("during delivery", device, logits, rounds, online=True)
                await self.look_async(Async(at, second))

        arguments = {**self.arguments(self.specs[1]), "on_event": on_event}
        link, state = self.server.link(), self.work / self.specs[1].name
        second = AsyncDevice(**grouped(server=link, state_dir=state, export="never", **arguments))
        return second


BY_NAME = {f"{name}, {compute}": (name, compute) for name, compute in FLEETS}
USUAL = ("classstats in one exchange, torch", "classstats in one exchange, light", "fedavg, torch")


@pytest.mark.parametrize("fleet_name", long_except(BY_NAME, *USUAL))
def test_every_member_at_every_moment(fleet_name: str, tmp_path: Path) -> None:
    fleet = Fleet(*BY_NAME[fleet_name], tmp_path)
    asyncio.run(fleet.play())
    assert not fleet.failures, "\n".join(fleet.failures)
