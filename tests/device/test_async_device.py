"""A device in an asyncio app: the loop stays free, and cancellation ends the work."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from device.waiting import WaitingLink
from support.hostile_server import DATA, LyingLink, ask, device_at, model, terms
from support.open_device import grouped
from support.processes import PATIENCE_SECONDS
from torch import Tensor, nn

from fleetdistill import COLUMNS, AsyncDevice, Device, Event
from fleetdistill.errors import DeviceBusyError, DeviceClosedError, FleetDistillError, StateError
from fleetdistill.training.model import split_sequential
from fleetdistill.wire.v1 import service_pb2


def async_device(link: Any, state_dir: Path, **changes: Any) -> AsyncDevice:
    settings: dict[str, Any] = {"model": model, "data": DATA, "allow": COLUMNS, "export": "never"}
    return AsyncDevice(**grouped(server=link, state_dir=state_dir, **{**settings, **changes}))


def test_the_arguments_are_those_of_a_device() -> None:
    assert inspect.signature(AsyncDevice) == inspect.signature(Device)


async def until(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, PATIENCE_SECONDS)


def test_devices_run_side_by_side_and_call_app_on_its_loop(tmp_path: Path) -> None:
    links = [LyingLink(ask(), ask(round=2)) for _ in range(2)]
    kinds: list[str] = []
    threads: set[threading.Thread] = set()

    async def note(event: Event) -> None:
        threads.add(threading.current_thread())
        await asyncio.sleep(0)
        kinds.append(event.kind)

    async def run(number: int) -> None:
        async with async_device(links[number], tmp_path / str(number), on_event=note) as device:
            assert device.state_dir == tmp_path / str(number)
            await device.run()

    async def app() -> None:
        await asyncio.gather(run(0), run(1))

    asyncio.run(app())
    assert [len(link.uploads) for link in links] == [2, 2]
    assert kinds.count("delivered") == 4
    assert threads == {threading.current_thread()}


def test_members_answer_during_a_delivery(tmp_path: Path) -> None:
    """The callback is awaited in the middle of the device's work: what reads answers, what works is refused."""
    seen: list[int] = []

    async def note(event: Event) -> None:
        if event.kind != "delivered":
            return
        inputs = DATA[0][:3]
        with torch.no_grad():
            expected = (await device.model())(torch.from_numpy(inputs)).numpy()
        np.testing.assert_allclose(await device.predict(inputs), expected, atol=1e-6)
        assert (await device.models()).keys() == {"general"}
        with pytest.raises(StateError, match="nothing to roll forward to"):
            await device.roll_forward()
        for refused in (device.preview, device.forget):
            with pytest.raises(DeviceBusyError):
                await refused()
        seen.append(device.version)

    async def app() -> None:
        async with device:
            await device.run()

    device = async_device(LyingLink(ask(), ask(round=2)), tmp_path, on_event=note)
    asyncio.run(app())
    assert seen == [1, 2]


@pytest.mark.parametrize("waiting", [True, False], ids=["while it waits", "while it trains"])
def test_cancellation_ends_the_work_and_the_device_can_run_again(tmp_path: Path, waiting: bool) -> None:
    async def app() -> None:
        training = asyncio.Event()

        def note(event: Event) -> None:
            if event.kind == "ask":
                training.set()

        link: LyingLink = WaitingLink()
        if not waiting:
            link = LyingLink(ask(), terms=terms(settings={"local_epochs": 10**12}))
        async with async_device(link, tmp_path, on_event=note) as device:
            running = asyncio.create_task(device.run())
            await (until(link.polling) if isinstance(link, WaitingLink) else training.wait())
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            link.asks.append(service_pb2.NextAskResponse(finished="over"))
            await device.run()

    asyncio.run(asyncio.wait_for(app(), PATIENCE_SECONDS))
    device_at(LyingLink(), tmp_path)[0].close()  # the state directory is free


CONTROL_FLOW = (StopIteration, StopAsyncIteration, GeneratorExit, asyncio.CancelledError)
"""What Python raises for its own control flow; none of them may reach an await, which would not return."""
EVERYTHING = (*CONTROL_FLOW, KeyboardInterrupt, SystemExit, TimeoutError, ValueError)
every_exception = pytest.mark.parametrize("error", EVERYTHING, ids=lambda one: one.__name__)


def in_the_end(app: Any) -> None:
    """Runs an app; one that hangs fails instead."""
    asyncio.run(asyncio.wait_for(app(), PATIENCE_SECONDS))


@every_exception
@pytest.mark.parametrize("sync", [True, False], ids=["function", "coroutine"])
def test_whatever_the_callback_raises_run_returns(tmp_path: Path, error: type[BaseException], sync: bool) -> None:
    """KeyboardInterrupt and SystemExit end the app; everything else is an event."""
    kinds, errors = list[str](), list[str]()

    def fail(event: Event) -> None:
        kinds.append(event.kind)
        errors.extend([event.values["error"]] if event.kind == "callback-failed" else [])
        if event.kind == "delivered":
            raise error()

    async def fail_later(event: Event) -> None:
        await asyncio.sleep(0)
        fail(event)

    async def app() -> None:
        async with async_device(LyingLink(ask()), tmp_path, on_event=fail if sync else fail_later) as device:
            await device.run()

    if error in (KeyboardInterrupt, SystemExit):
        with pytest.raises(error):
            in_the_end(app)
        assert kinds[-2:] == ["delivered", "failed"]
    else:
        in_the_end(app)
        assert kinds[-3:] == ["delivered", "callback-failed", "finished"]
        assert errors == [error.__name__], "as the app raised it"
    device_at(LyingLink(), tmp_path)[0].close()  # the state directory is free


class Raising(nn.Module):
    """A layer that raises what a test wants once the app has its model."""

    error: type[BaseException] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if (error := type(self).error) is not None:
            raise error()
        return x


def raising_model() -> nn.Module:
    torch.manual_seed(0)
    return split_sequential(nn.Sequential(nn.Linear(4, 5), Raising(), nn.Linear(5, 3)), 2)


@pytest.fixture
def raised(monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(Raising, "error", error)


@every_exception
def test_whatever_a_model_raises_predict_returns(
    tmp_path: Path, error: type[BaseException], raised: Callable[[], None]
) -> None:
    expected = FleetDistillError if error in CONTROL_FLOW or error is ValueError else error

    async def app() -> None:
        async with async_device(LyingLink(), tmp_path, model=raising_model) as device:
            assert (await device.predict(DATA[0])).shape == (12, 3)
            raised()
            await device.predict(DATA[0])

    with pytest.raises(expected):
        in_the_end(app)


@every_exception
def test_whatever_a_model_raises_while_it_trains_run_returns(
    tmp_path: Path, error: type[BaseException], raised: Callable[[], None]
) -> None:
    kinds: list[str] = []

    def note(event: Event) -> None:
        kinds.append(event.kind)
        if event.kind == "ask":
            raised()

    async def app() -> None:
        async with async_device(LyingLink(ask()), tmp_path, model=raising_model, on_event=note) as device:
            await device.run()

    if error in CONTROL_FLOW or error is ValueError:
        in_the_end(app)
        assert kinds[-2:] == ["dropped", "finished"], "the ask is declined"
    else:
        with pytest.raises(error):
            in_the_end(app)


@every_exception
@pytest.mark.parametrize("argument", ["model", "data"])
@pytest.mark.parametrize("member", ["run", "predict", "model", "preview", "call"])
def test_every_await_returns_whatever_an_app_function_raises(
    tmp_path: Path, error: type[BaseException], argument: str, member: str
) -> None:
    def fail(*given: Any) -> None:
        raise error()

    def note(event: Event) -> None:
        if event.kind == "no-samples":
            opened[0].stop()

    async def app() -> None:
        async with async_device(LyingLink(ask()), tmp_path, on_event=note, **{argument: fail}) as device:
            opened.append(device)
            arguments: dict[str, tuple[Any, ...]] = {"predict": (DATA[0],), "call": (fail,)}
            await getattr(device, member)(*arguments.get(member, ()))

    opened: list[AsyncDevice] = []
    reads_again = (member, argument) == ("run", "data") and issubclass(error, OSError)
    if (member, argument) == ("predict", "data") or reads_again:
        in_the_end(app)  # predictions need no data, and data that cannot be read now are read again later
        return
    own = error in CONTROL_FLOW or (member != "call" and issubclass(error, Exception))
    with pytest.raises(FleetDistillError if own else error):
        in_the_end(app)


def test_a_device_whose_event_loop_is_closed_ends_its_run(tmp_path: Path) -> None:
    link = WaitingLink()
    device = async_device(link, tmp_path, on_event=lambda event: None)
    loop = asyncio.new_event_loop()
    running = loop.create_task(device.run())
    loop.run_until_complete(until(link.polling))
    loop.close()  # and not `asyncio.run`, which would cancel the task
    link.interrupt()  # the failed call is an event, which nobody can receive
    (thread,) = [item for item in threading.enumerate() if item.name == f"fleetdistill {device.device_id}"]
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()
    asyncio.run(device.close())
    assert not running.done()


def test_other_members_work_during_run_without_blocking_loop(tmp_path: Path) -> None:
    async def app() -> None:
        link = WaitingLink(ask())
        async with async_device(link, tmp_path, on_event=lambda event: None) as device:
            running = asyncio.create_task(device.run())
            await until(link.polling)
            logits = await device.predict(torch.from_numpy(DATA[0]))
            assert torch.equal(logits, (await device.model())(torch.from_numpy(DATA[0])))
            assert set(await device.models()) == {"general"}
            assert await device.call(lambda device: device.device_id) == device.device_id
            await device.replace_data(DATA)
            await device.replace_data()
            with pytest.raises(DeviceBusyError, match=r"Device\.run was called while Device\.run works"):
                await device.run()
            device.stop()
            await running
        with pytest.raises(DeviceClosedError):
            await device.run()
        with pytest.raises(DeviceClosedError):
            await device.__aenter__()

    asyncio.run(app())


def test_a_callback_may_close_the_device(tmp_path: Path) -> None:
    async def app() -> None:
        async def close(event: Event) -> None:
            await device.close()

        device = async_device(LyingLink(ask()), tmp_path, on_event=close)
        await device.run()
        await device.close()
        with pytest.raises(DeviceClosedError):
            await device.run()

    asyncio.run(asyncio.wait_for(app(), PATIENCE_SECONDS))


def test_what_leaves_and_what_is_erased_in_an_asyncio_app(tmp_path: Path) -> None:
    link = LyingLink(ask(), ask(round=2))

    async def app() -> None:
        async with async_device(link, tmp_path) as device:
            shown = await device.preview()
            assert shown.parts
            await device.run()
            assert await device.roll_back() == 1
            await device.forget()

    asyncio.run(app())
    assert not (tmp_path / "device.json").exists()
