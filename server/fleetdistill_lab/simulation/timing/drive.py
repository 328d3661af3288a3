"""Runs devices in the order of simulated time while the engine waits for them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from enum import IntEnum

from fleetdistill import Step
from fleetdistill.errors import RunError
from fleetdistill.knowledge import DELIVER
from fleetdistill_lab.simulation.links.simulated_devices import DriveFleet, SimulatedDevices
from fleetdistill_lab.simulation.timing.behaviour import FleetTraces, Span
from fleetdistill_lab.simulation.timing.clock import START, SimulatedClock
from fleetdistill_lab.simulation.timing.work_log import Work, WorkLog
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.store.records import Ask

MAX_WAIT_SECONDS = 30 * 86_400.0
"""Simulated seconds without an open ask after which a simulation fails, because too few devices are available."""


class Kind(IntEnum):
    """Kinds of events. At equal times, events happen in this order."""

    RETURNS = 0
    """A device becomes available."""
    ANSWERS = 1
    """A device has finished its work on an ask."""
    GOES = 2
    """A device becomes unavailable."""
    LEASE = 3
    """The lease of a device that lost contact ends."""
    DEADLINE = 4
    """The deadline of an ask has passed."""


class Agenda:
    """Events ordered by time, kind and device, so that their order does not depend on the order of additions."""

    def __init__(self) -> None:
        self._events: list[tuple[float, Kind, str]] = []

    def add(self, at: float, kind: Kind, device: str = "") -> None:
        """Adds an event at a simulated time in seconds."""
        heapq.heappush(self._events, (at, kind, device))

    def next_time(self) -> float | None:
        """Returns the time of the next event, or None if there is none."""
        return self._events[0][0] if self._events else None

    def due(self, now: float) -> Iterator[tuple[Kind, str]]:
        """Removes and yields the events up to `now`, also those that are added meanwhile."""
        while self._events and self._events[0][0] <= now:
            _, kind, device = heapq.heappop(self._events)
            yield kind, device


class SimulatedTime(DriveFleet):
    """Implements the engine's `Waker`: a wait advances the simulated time to the next event of the server or a device.

    A device that becomes available checks in, or is present again. It works on one ask at a time: it computes the
    answer when the work starts, and sends it when the work ends. A device that becomes unavailable leaves the run,
    unless it loses contact or works on an ask; then its lease ends later, as for a device that stops calling.

    Args:
        api: Server side of the device API; its store uses `clock`.
        run: Name of the run.
        devices: The devices.
        after_step: Called after each event that concerns the engine.
        traces: When the devices are available, and how fast they are.
        samples: Returns a device's number of training samples.
        clock: The simulated time, which this object advances.
        log: Log of the devices' work.
    """

    def __init__(
        self,
        api: DeviceApi,
        run: str,
        devices: SimulatedDevices,
        after_step: Callable[[], None],
        traces: FleetTraces,
        samples: Callable[[str], int],
        clock: SimulatedClock,
        log: WorkLog,
    ) -> None:
        super().__init__(api.store, run, devices, after_step)
        self._api, self._traces = api, traces
        self._samples = samples
        self._clock = clock
        self._log = log
        self._agenda = Agenda()
        self._spans: dict[str, Iterator[Span]] = {}
        self._available: dict[str, Span] = {}
        self._next: dict[str, Span] = {}  # each device's next interval, while it is not available
        self._working: dict[str, Work] = {}
        self._deadlines: set[float] = set()
        self._open: set[str] = set()  # devices with an open ask
        self._asked_at = START
        self._known: set[str] = set()  # devices that have checked in
        self._finished = False

    def start(self, at: float) -> None:
        """Begins at a simulated time; after a resume, with devices that are away or at work.

        Args:
            at: The time, in seconds of the clock, which is at its start.
        """
        self._known = {device.id for device in self._store.devices.all(self._run)}
        present = set(self._store.devices.present(self._run))
        lost = []
        for name in self._devices.names:
            self._spans[name] = self._traces.spans(name)
            end = self._schedule(name, at - START)
            if name in present and end is not None:
                lost.append((START + end, name))
            work = self._log.last(name)
            if work is not None and START + work.end > at:
                self._put_to_work(work)
        for since, name in sorted(lost):
            self._clock.advance_to(since)
            self._lose_contact(name)
        self._clock.advance_to(at)
        self._asked_at = at

    def _schedule(self, name: str, after: float) -> float | None:
        """Schedules a device's first interval that ends after a time.

        Returns:
            The end of the interval before, if the device is not available at that time; else None.
        """
        end = None
        for span in self._spans[name]:
            if span.end > after:
                self._next[name] = span
                self._agenda.add(START + span.start, Kind.RETURNS, name)
                return None if span.start <= after else end
            end = span.end
        return end

    def _put_to_work(self, work: Work) -> None:
        self._working[work.device] = work
        if not work.interrupted:
            self._agenda.add(START + work.end, Kind.ANSWERS, work.device)

    def end(self) -> None:
        """Saves the run after its end; devices then send the answers that they still hold back."""
        self._finished = True
        super().end()

    def seconds_left(self, name: str, number: int, step_number: int) -> float:
        """Returns the simulated seconds until a device may send an answer; infinite if it has not begun the work."""
        work = self._log.last(name)
        if self._finished or (work is not None and (number, step_number) < (work.round, work.step_number)):
            return 0.0  # an answer to an earlier ask, which the server refuses
        if work is None or (number, step_number) != (work.round, work.step_number):
            return math.inf
        return START + work.end - self._clock.now()

    # --- the engine's waker

    async def wait(self, seconds: float = math.inf) -> None:
        """Advances the time to the next event that concerns the engine, at most by `seconds`.

        Raises:
            RunError: No device will be available, or too few devices were available for 30 simulated days.
        """
        self._save_after_round()
        if not self._begin_asks():
            self._check_progress()
            until = self._clock.now() + seconds
            while not self._advance_time(until):
                pass
        self._after_step()

    def _begin_asks(self) -> bool:
        """Starts the work of available devices on open asks; returns whether one of the asks has ended already."""
        open_asks = self._store.asks.all_open(self._run)
        self._open = {ask.device for ask in open_asks}
        if self._open:
            self._asked_at = self._clock.now()
        for deadline in {ask.deadline_at for ask in open_asks} - self._deadlines:
            self._deadlines.add(deadline)
            self._agenda.add(math.nextafter(deadline, math.inf), Kind.DEADLINE)
        idle = self._available.keys() - self._working.keys()
        asks = [ask for ask in open_asks if ask.device in idle]
        names = self._devices.ahead([ask.device for ask in asks])
        ended = [self._begin(ask) for ask, _ in zip(asks, names, strict=True)]
        return any(ended)

    def _advance_time(self, until: float) -> bool:
        """Advances to the next event; returns whether it concerns the engine or the time is `until`."""
        at = self._agenda.next_time()
        if at is None and until == math.inf:
            raise RunError(f"{self._where()}: no device will become available; {self._needed()}")
        if at is None or at > until:
            self._clock.advance_to(until)
            return True
        self._clock.advance_to(max(at, self._clock.now()))
        concerns = [self._happen(kind, name) for kind, name in self._agenda.due(self._clock.now())]
        return any(concerns)

    def _check_progress(self) -> None:
        if not self._open and self._clock.now() - self._asked_at > MAX_WAIT_SECONDS:
            raise RunError(f"{self._where()}: no round began for 30 simulated days; {self._needed()}")

    def _where(self) -> str:
        return f"the simulation cannot continue after {self._clock.elapsed:.0f} simulated seconds"

    def _needed(self) -> str:
        return "lower min_devices, or let more devices be available"

    def _happen(self, kind: Kind, name: str) -> bool:
        """Handles an event; returns whether it concerns the engine."""
        match kind:
            case Kind.RETURNS:
                return self._returns(name)
            case Kind.ANSWERS:
                return self._answers(name)
            case Kind.GOES:
                return self._goes(name)
            case Kind.LEASE:
                self._api.sessions.end_leases_of([(self._run, name)])
                return True
            case Kind.DEADLINE:
                return True

    # --- the devices

    def _returns(self, name: str) -> bool:
        span = self._available[name] = self._next.pop(name)
        if span.end < math.inf:
            self._agenda.add(START + span.end, Kind.GOES, name)
        if name in self._known:
            self._api.sessions.mark_present(self._run, name)
        else:
            self._known.add(name)
            self._devices.join([name])
        return not self._open or name in self._open

    def _begin(self, ask: Ask) -> bool:
        """Starts work on an ask; returns whether the ask has ended already, answered or declined."""
        name = ask.device
        if name in self._working:
            return False
        now = self._clock.elapsed
        span = self._available[name]
        ready = now + self._seconds(ask, span)
        work = Work(name, ask.round, ask.step_number, now, min(ready, span.end), ready > span.end)
        self._log.add(work)
        if not work.interrupted and self._devices.step(name) is not Step.WAITED:
            return True
        self._put_to_work(work)
        return False

    def _seconds(self, ask: Ask, span: Span) -> float:
        """Returns how long a device needs for an ask, in seconds; a delivery needs no training."""
        behaviour = self._traces.behaviour
        name = ask.device
        training = 0.0 if ask.step == DELIVER else behaviour.seconds_per_sample * self._samples(name)
        return (behaviour.seconds_per_ask + training) * self._traces.slowness[name] / span.speed

    def _answers(self, name: str) -> bool:
        self._working.pop(name, None)
        self._devices.step(name)
        return True

    def _goes(self, name: str) -> bool:
        """A device leaves the run, or its server notices only at the end of the lease that it is gone."""
        span = self._available.pop(name)
        self._schedule(name, span.end)
        if self._working.pop(name, None) is not None or span.lost:
            self._lose_contact(name)
            return False
        self._api.sessions.end(self._run, name, "device left")
        return not self._open

    def _lose_contact(self, name: str) -> None:
        """Records the last heartbeat of a device, so that its lease ends in time."""
        self._api.sessions.renew(self._run, name)
        end = self._clock.now() + self._api.sessions.lease_seconds
        self._agenda.add(math.nextafter(end, math.inf), Kind.LEASE, name)
