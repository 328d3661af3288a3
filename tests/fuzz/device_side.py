"""Devices that a lying server speaks to: an error of `fleetdistill.errors`, or a bug.

A session is a device with an empty state directory, some steps, and now and then a restart. Nothing but a
`FleetDistillError` may come out of it, and the state directory must open again afterwards.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from unittest import mock

from fuzz.liar import Liar, LyingLink
from fuzz.lying_server import lying_server
from fuzz.played import Played
from fuzz.spoilt_enrolment import enrol_with_lies

from fleetdistill import Device, FleetDistillError, Step
from fleetdistill.clock import SystemClock
from fleetdistill.link.base import Link

SECONDS_PER_ASK = 0.05
"""So that training without end costs the fuzzer little."""
_STEPS = 12


class DeviceTarget:
    """Devices, one after the other, in this process.

    Attributes:
        outcomes: How often what came out of a session.
        slowest: Seconds of the longest step.
    """

    def __init__(self, runs: list[Played], folder: Path, liar: Liar, server: str | Link) -> None:
        self.liar, self._server = liar, server
        self._runs, self._folder = runs, folder
        self.outcomes: Counter[str] = Counter()
        self.slowest = 0.0

    def turn(self, random: Random) -> int:
        """One session; returns how many lies were told in it."""
        before = self.liar.told
        self.liar.begin(random, random.choice(self._runs))
        if random.random() < 0.05:
            self.outcomes[enrol_with_lies(self.liar, self._folder / "enrolment")] += 1
        state_dir = Path(tempfile.mkdtemp(dir=self._folder))
        try:
            with mock.patch("fleetdistill.link.downloads.PAUSE_SECONDS", 0.0):
                self._session(random, state_dir)
                if random.random() < 0.3:
                    self._session(random, state_dir)
                self._open(state_dir).close()
        finally:
            shutil.rmtree(state_dir)
        return self.liar.told - before

    def _session(self, random: Random, state_dir: Path) -> None:
        device = self._open(state_dir)
        for _ in range(random.choice([2, 6, _STEPS])):
            step = self._step(device)
            if step is Step.FINISHED:
                break
            if step is None and random.random() < 0.5:
                break
            if random.random() < 0.1:
                with contextlib.suppress(FleetDistillError):
                    device._parts.link.heartbeat(device._parts.identity)
        with contextlib.suppress(FleetDistillError):
            if random.random() < 0.1:
                device.forget()
        with contextlib.suppress(FleetDistillError):
            device.close()

    def _open(self, state_dir: Path) -> Device:
        return self.liar.run.device(self._server, state_dir, lambda event: None, SECONDS_PER_ASK, _NoWaits())

    def _step(self, device: Device) -> Step | None:
        began = time.monotonic()
        try:
            result = device.step(60.0)
            self.outcomes[result.value] += 1
            return result
        except FleetDistillError as error:
            self.outcomes[type(error).__name__] += 1
            _check_is_a_sentence(error)
            return None
        finally:
            self.slowest = max(self.slowest, time.monotonic() - began)


class _NoWaits(SystemClock):
    """A clock on which every wait is over at once."""

    def __init__(self) -> None:
        self._waited = 0.0

    def now(self) -> float:
        return super().now() + self._waited

    def wait(self, event: threading.Event, seconds: float) -> None:
        self._waited += seconds


def _check_is_a_sentence(error: FleetDistillError) -> None:
    """What an app shows: some words, not megabytes of them."""
    assert 0 <= len(str(error)) < 20_000, f"{type(error).__name__} of {len(str(error))} characters"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the log of every refusal; the level is that of the whole process, so it is put back."""
    logger = logging.getLogger("fleetdistill")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def device_target(runs: list[Played], *, remote: bool = False) -> Iterator[DeviceTarget]:
    """Devices in a folder of their own, in memory or over gRPC on the loopback."""
    liar = Liar()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        stack.enter_context(_quiet())
        server = stack.enter_context(lying_server(liar)).address if remote else LyingLink(liar)
        yield DeviceTarget(runs, Path(folder), liar, server)
