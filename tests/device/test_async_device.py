"""A device in an asyncio app: the loop stays free, and cancellation ends the work."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from device.test_loops import WaitingLink
from link.test_hostile_server import DATA, device_at, model
from support.hostile_server import LyingLink, ask, terms
from support.processes import PATIENCE_SECONDS

from fleetdistill import COLUMNS, AsyncDevice, Event
from fleetdistill.errors import DeviceBusyError, DeviceClosedError
from fleetdistill.wire.v1 import service_pb2


def async_device(link: Any, state_dir: Path, **changes: Any) -> AsyncDevice:
    settings: dict[str, Any] = {"model": model, "data": DATA, "allow": COLUMNS, "export_onnx": "never"}
    return AsyncDevice(server=link, state_dir=state_dir, **{**settings, **changes})


async def until(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, PATIENCE_SECONDS)


def test_devices_run_beside_each_other_and_call_the_app_on_its_loop(tmp_path: Path) -> None:
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


def test_an_exception_of_the_callback_ends_run(tmp_path: Path) -> None:
    async def fail(event: Event) -> None:
        raise TimeoutError(event.kind)

    async def app() -> None:
        async with async_device(LyingLink(ask()), tmp_path, on_event=fail) as device:
            with pytest.raises(TimeoutError, match="checked-in"):
                await device.run()

    asyncio.run(app())


def test_other_members_do_not_block_the_loop_and_work_while_it_runs(tmp_path: Path) -> None:
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
            with pytest.raises(DeviceBusyError):
                await device.run()
            device.stop()
            await running
        with pytest.raises(DeviceClosedError):
            await device.run()

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
