"""Runs many devices in one process, with a few threads.

A device that waits for work costs a call that is open at the server and a coroutine. Its model and its data are in
memory only while the open devices of the process are few and small; otherwise its state is on the disk, as after a
restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fleetdistill import Device, Step
from fleetdistill.errors import FleetDistillError, LinkError, RunError
from fleetdistill.link.base import CALL_SECONDS
from fleetdistill.link.grpc_link import Connection, GrpcLink, errors_of
from fleetdistill.link.terms import pause_seconds
from fleetdistill.wire.v1 import service_pb2
from fleetdistill_lab.simulation.spec.compute import Shared
from fleetdistill_lab.simulation.spec.device import DeviceSpec, make_compute, make_device
from fleetdistill_server.service.processes import open_files

DEVICES_PER_CONNECTION = 64
"""Devices that share a connection; fewer than the server allows open calls on one ([limits])."""
MAX_WAITING_BYTES = 256 << 20
"""Largest size of the devices that wait for work and are open, in bytes: `DEVICE_BYTES` and the state of each one."""
DEVICE_BYTES = 200_000
"""Memory of an open device besides its model, in bytes."""
MAX_UNCOLLECTED = 64
"""Closed devices after which garbage is collected: they are reference cycles, whose data stay in memory and open."""
THREADS = 4
"""Devices of a process that work at the same time. While one computes, others wait for the disk and the server."""


def run_devices(specs: Sequence[DeviceSpec], server: str, max_waiting_bytes: int = MAX_WAITING_BYTES) -> int:
    """Runs devices until the run is finished; returns the process's exit status and prints an error.

    SIGTERM ends the devices without leaving the run, so that the open round waits for their restart.
    """
    try:
        asyncio.run(Multiplexer(specs, server, max_waiting_bytes).run())
    except FleetDistillError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


class Multiplexer:
    """Runs the devices of one process.

    Args:
        specs: The devices.
        server: `"host:port"` of the server.
        max_waiting_bytes: Largest size of the devices that wait for work and are open.
    """

    def __init__(self, specs: Sequence[DeviceSpec], server: str, max_waiting_bytes: int) -> None:
        connections = [Connection(server) for _ in range(0, len(specs), DEVICES_PER_CONNECTION)]
        self._members = [
            (spec, ParkingLink(server, connections[number % len(connections)])) for number, spec in enumerate(specs)
        ]
        self._waiting = WaitingDevices(max_waiting_bytes, max_waiting())
        self._threads = ThreadPoolExecutor(THREADS, "devices")
        self._shared = Shared()

    async def run(self) -> None:
        """Returns when every device has noticed the end of the run.

        Raises:
            RunError: A device failed; the text begins with its name.
        """
        await asyncio.gather(*(self._take_part(spec, link) for spec, link in self._members))

    async def _take_part(self, spec: DeviceSpec, link: ParkingLink) -> None:
        loop = asyncio.get_running_loop()
        while (pause := await loop.run_in_executor(self._threads, self._turn, spec, link)) is not None:
            await (link.wait_for_work() if link.is_idle else asyncio.sleep(pause))

    def _turn(self, spec: DeviceSpec, link: ParkingLink) -> float | None:
        """Opens a device unless it is open, and runs it until it waits; one that is queued for a thread may be closed.

        Returns:
            Seconds until its next turn, unless it waits for work; None once the run is over.

        Raises:
            RunError: The device failed.
        """
        link.is_idle = False
        try:
            device = self._waiting.take(spec.name) or make_device(
                spec, link, compute=lambda run: make_compute(spec, run, self._shared)
            )
            while (result := device.tick()) in (Step.ANSWERED, Step.DECLINED):
                pass
            if result is Step.FINISHED:
                device.close()
                return None
            pause = device.pause_seconds
            self._waiting.put(spec.name, device)
        except FleetDistillError as error:
            raise RunError(f"{spec.name}: {error}") from error
        return pause


class WaitingDevices:
    """The open devices of a process that wait. Those that have waited longest are closed when there are too many.

    Args:
        max_bytes: Largest size of the open devices, in bytes.
        most: Largest number of open devices.
    """

    def __init__(self, max_bytes: int, most: int) -> None:
        self._max_bytes, self._most = max_bytes, most
        self._bytes = self._closed = 0
        self._open: OrderedDict[str, tuple[Device, int]] = OrderedDict()
        self._lock = threading.Lock()  # held while a device closes, so that it is not opened again before

    def put(self, name: str, device: Device) -> None:
        """Adds a device, and closes others or it."""
        size = DEVICE_BYTES + sum(path.stat().st_size for path in device.state_dir.glob("*.safetensors"))
        with self._lock:
            self._open[name] = device, size
            self._bytes += size
            while self._bytes > self._max_bytes or len(self._open) > self._most:
                _, (oldest, size) = self._open.popitem(last=False)
                self._bytes -= size
                oldest.close(leave=False)
                del oldest
                self._note_closed()

    def _note_closed(self) -> None:
        self._closed += 1
        if self._closed >= min(MAX_UNCOLLECTED, self._most):
            self._closed = 0
            gc.collect()

    def take(self, name: str) -> Device | None:
        """Removes and returns a device, or None if it is not open."""
        with self._lock:
            device, size = self._open.pop(name, (None, 0))
            self._bytes -= size
        return device


def max_waiting() -> int:
    """Returns how many devices of a process may be open while they wait: each has two or three open files."""
    return max(1, open_files() // 8)


_POLL_SECONDS = 60.0
_RETRY_SECONDS = 2.0


class ParkingLink(GrpcLink):
    """A `GrpcLink` whose device does not wait for work in `next_ask`; the process waits with `wait_for_work` instead.

    The link outlives its device, which may be closed while it waits: `close` does nothing.

    Args:
        server: `"host:port"` of the server.
        shared: Connection that the link uses.

    Attributes:
        is_idle: Whether the device has asked for work in vain since this was last set to False.
    """

    def __init__(self, server: str, shared: Connection) -> None:
        super().__init__(server, shared=shared)
        self.is_idle = False
        self._identity = service_pb2.Identity()
        self._reply: service_pb2.NextAskResponse | FleetDistillError | None = None

    def next_ask(self, identity: service_pb2.Identity, wait_seconds: float) -> service_pb2.NextAskResponse:
        """Returns the reply that ended the last `wait_for_work`, or else that there is no work, without a call."""
        self._identity = identity
        reply, self._reply = self._reply, None
        if isinstance(reply, FleetDistillError):
            raise reply
        self.is_idle = reply is None
        return reply or service_pb2.NextAskResponse(come_back=service_pb2.ComeBack())

    async def wait_for_work(self) -> None:
        """Waits until the server has a message for the device; while it is unavailable, tries again."""
        while self._reply is None:
            try:
                reply = await self._long_poll()
            except LinkError:  # a restart of the server takes a few seconds
                await asyncio.sleep(random.uniform(_RETRY_SECONDS / 2, _RETRY_SECONDS))
            except FleetDistillError as error:
                self._reply = error
            else:
                if reply.HasField("come_back") and not reply.come_back.reason:
                    await asyncio.sleep(pause_seconds(reply.come_back, self.remote))
                else:
                    self._reply = reply

    async def _long_poll(self) -> service_pb2.NextAskResponse:
        request = service_pb2.NextAskRequest(identity=self._identity, wait_seconds=_POLL_SECONDS)
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def end(_: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed after an error of another device
                loop.call_soon_threadsafe(ended.set)

        with errors_of(self._server):
            call = self._stub.NextAsk.future(request, timeout=_POLL_SECONDS + CALL_SECONDS)
            call.add_done_callback(end)
            try:
                await ended.wait()
            finally:
                call.cancel()
            response: service_pb2.NextAskResponse = call.result()
        return response

    def close(self) -> None:
        """Does nothing: the process closes the shared connection."""
