"""A device beside an app: other threads read its model, and Ctrl-C ends it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hostile_server import CLASSES, LyingLink, ask, device_at
from support.processes import PATIENCE_SECONDS, free_port, wait_until

from fleetdistill import Device, Event

ROOT = Path(__file__).parents[2]
ROUNDS, READERS = 60, 4


@pytest.mark.long
def test_any_thread_may_read_the_model_while_the_device_runs(tmp_path: Path) -> None:
    link = LyingLink(*(ask(round=number) for number in range(1, ROUNDS + 1)))
    device, events = device_at(link, tmp_path)
    over = threading.Event()

    def read() -> int:
        count = 0
        while not over.is_set() or not count:
            assert device.model(torch.zeros(2, 4)).shape == (2, CLASSES)
            assert set(device.models) == {"general"}
            count += 1
        return count

    with device, ThreadPoolExecutor(READERS) as readers:
        reading = [readers.submit(read) for _ in range(READERS)]
        try:
            device.run()
        finally:
            over.set()
        assert all(item.result(PATIENCE_SECONDS) for item in reading)
    assert len(link.uploads) == len(events.texts("delivered")) == ROUNDS
    assert len(events.texts("checked-in")) == 1, "whoever is first checks in, and nobody does so twice"


def test_readers_change_nothing_of_the_run(tmp_path: Path) -> None:
    """The same answers, to the bit, as without them."""
    digests = []
    for name, readers in (("a", 0), ("b", READERS)):
        link = LyingLink(*(ask(round=number) for number in range(1, 9)))
        device, _ = device_at(link, tmp_path / name)
        over = threading.Event()

        def read(device: Device = device, over: threading.Event = over) -> None:
            while not over.is_set():
                assert device.model is not None

        threads = [threading.Thread(target=read) for _ in range(readers)]
        with device:
            for thread in threads:
                thread.start()
            device.run()
            over.set()
            for thread in threads:
                thread.join()
        digests.append([header.payload.sha256 for header in link.uploads])
    assert digests[0] == digests[1]
    assert len(digests[0]) == 8


def test_a_callback_may_wait_for_a_thread_that_reads_the_model(tmp_path: Path) -> None:
    told: list[str] = []

    def show(event: Event) -> None:
        if event.kind == "progress":
            return
        reader = threading.Thread(target=lambda: told.append(event.kind) if device.model is not None else None)
        reader.start()
        reader.join(PATIENCE_SECONDS)
        assert not reader.is_alive()

    device, _ = device_at(LyingLink(ask()), tmp_path, on_event=show)
    with device:
        device.run()
    assert told == ["checked-in", "ask", "answered", "delivered", "finished"]


# --- Ctrl-C


def readme_example() -> str:
    blocks: list[str] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (result,) = [block for block in blocks if "device.run()" in block]
    return result


@pytest.mark.long
def test_ctrl_c_ends_readme_example_without_traceback(tmp_path: Path) -> None:
    script = tmp_path / "app.py"
    log = "import logging, sys\nlogging.basicConfig(level=logging.INFO, stream=sys.stdout)\n"
    script.write_text(log + readme_example().replace("127.0.0.1:50051", f"127.0.0.1:{free_port()}"))
    with (tmp_path / "out").open("wb") as out, (tmp_path / "errors").open("wb") as errors:
        app = subprocess.Popen([sys.executable, "-u", script], cwd=tmp_path, stdout=out, stderr=errors)
        try:
            missed = b"the device keeps trying"
            wait_until(lambda: missed in (tmp_path / "out").read_bytes(), "the app to miss its server")
            app.send_signal(signal.SIGINT)
            assert app.wait(PATIENCE_SECONDS) == 0
        finally:
            app.kill()
            app.wait()
    assert "Traceback" not in (tmp_path / "errors").read_text()
    assert "interrupted by Ctrl-C" in (tmp_path / "out").read_text()


class PressingLink(LyingLink):
    """Ctrl-C is pressed within one of its calls."""

    def __init__(self, *calls: str) -> None:
        super().__init__(ask())
        self.calls = list(calls)

    def check_in(self, identity: Any, profile: Any) -> Any:
        self._press("check_in")
        return super().check_in(identity, profile)

    def next_ask(self, identity: Any, wait_seconds: float) -> Any:
        self._press("next_ask")
        return super().next_ask(identity, wait_seconds)

    def leave(self, identity: Any, *, forget: bool = False) -> bool:
        self._press("leave")
        return forget

    def _press(self, call: str) -> None:
        while call in self.calls:
            self.calls.remove(call)
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_ends_run_like_stop_and_device_is_usable_again(tmp_path: Path) -> None:
    link = PressingLink("check_in")
    device, events = device_at(link, tmp_path)
    with device:
        device.run()
        assert [event.kind for event in events] == ["interrupted"]
        device.run()
    assert len(link.uploads) == 1
    assert events[-1].kind == "finished"


def test_a_second_ctrl_c_ends_run_without_waiting(tmp_path: Path) -> None:
    link = PressingLink("next_ask", "next_ask")
    device, events = device_at(link, tmp_path)
    with device:
        device.run()
    assert not link.uploads
    assert events[-1].kind == "interrupted"


def test_ctrl_c_raises_keyboard_interrupt_if_the_app_wants_it(tmp_path: Path) -> None:
    device, events = device_at(PressingLink("next_ask", "leave"), tmp_path)
    with pytest.raises(KeyboardInterrupt) as error, device:
        device.run(handle_ctrl_c=False)
    assert error.value.__context__ is None, "the second Ctrl-C, while the device leaves, adds no traceback"
    assert "interrupted" not in [event.kind for event in events]


def test_a_second_ctrl_c_while_the_device_leaves_is_silent(tmp_path: Path) -> None:
    link = PressingLink("next_ask", "leave")
    link.asks.clear()
    device, _ = device_at(link, tmp_path)
    with device:
        device.run()
    assert not link.calls
    device_at(LyingLink(), tmp_path)[0].close()  # the state directory is free


def test_first_ctrl_c_while_device_leaves_is_raised_at_close(tmp_path: Path) -> None:
    device, _ = device_at(PressingLink("leave"), tmp_path)
    with pytest.raises(KeyboardInterrupt) as error, device:
        device.run()
    assert len(traceback.format_exception(error.value)) < 10
    device_at(LyingLink(), tmp_path)[0].close()  # the state directory is free


def test_constructor_raises_ctrl_c_at_end_and_frees_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def press(*_: Any) -> bool:
        signal.raise_signal(signal.SIGINT)
        return True

    monkeypatch.setattr("fleetdistill.link.credentials.is_enrolled", press)
    with pytest.raises(KeyboardInterrupt) as error:
        device_at("127.0.0.1:1", tmp_path)
    assert len(traceback.format_exception(error.value)) < 10
    device_at(LyingLink(), tmp_path)[0].close()  # the state directory is free


@pytest.mark.parametrize("where", ["next_ask", "upload", "on_event"])
def test_ctrl_c_at_any_call_ends_run_and_the_next_one_goes_on(tmp_path: Path, where: str) -> None:
    link = LyingLink(ask())
    honest, pressed = getattr(link, where, None), threading.Event()

    def press(*given: Any) -> Any:
        if not pressed.is_set():
            pressed.set()
            raise KeyboardInterrupt
        return honest(*given) if honest else None

    changes = {"on_event": press} if where == "on_event" else {}
    if not changes:
        setattr(link, where, press)
    device, _ = device_at(link, tmp_path, **changes)
    with device:
        device.run()
        assert pressed.is_set()
        assert not link.uploads
    again, events = device_at(link, tmp_path)
    with again:
        again.run()
    assert len(link.uploads) == 1
    assert events[-1].kind == "finished"
