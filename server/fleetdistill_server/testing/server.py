"""In-process server for tests of an app that embeds a `Device`.

    server = MemoryServer({"run": {"method": "fedavg", "rounds": 2}, "contract": {"classes": 3, "input_shape": [4]}})
    with server, Device(server=server.link(), ...) as device:
        device.run()

The server consists of the real engine, intake and store in memory, without network, threads or other processes. The
engine runs whenever a device requests an ask or its upload's status. `fleetdistill.testing` has scripted faults for
the link, and a manual clock.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextvars import copy_context
from typing import Any

from fleetdistill import Device, Step
from fleetdistill.clock import Clock
from fleetdistill.errors import ConfigurationError, LinkError
from fleetdistill.wire.v1 import service_pb2
from fleetdistill_server.config.run_config import run_config
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.store.clock import Clock as StoreClock
from fleetdistill_server.store.store import Store

_USUAL: Mapping[str, Mapping[str, Any]] = {
    "run": {"name": "test", "rounds": 1, "min_devices": 1},
    "server": {"torch_device": "cpu"},
}
_MAX_SHORT_ROUNDS = 10
"""Number of consecutive short rounds after which the run fails, since no further devices will join."""


class MemoryServer:
    """Serves one run to devices in the same thread.

    Args:
        settings: Sections of run.toml. Missing settings of [run] default to the name "test", 1 round and
            `min_devices = 1`.
        clock: Clock for deadlines, such as a `fleetdistill.testing.ManualClock`; the system's clock by default.

    Attributes:
        store: The in-memory store of the run.
        api: The device API that links use.

    Raises:
        ConfigurationError: A setting is unknown or out of range; the message names it.
    """

    def __init__(self, settings: Mapping[str, Mapping[str, Any]], clock: Clock | None = None) -> None:
        sections = {**_USUAL, **settings}
        self._config = run_config({name: {**_USUAL.get(name, {}), **section} for name, section in sections.items()})
        self.store = Store.in_memory()
        if clock is not None:
            self.store.asks.clock = StoreClock(clock.now, clock.now)
        self.api = DeviceApi(self.store, lease_seconds=self._config.server.lease_seconds)
        self._turns = Engine(self.store, self._config, _Turns(), _MAX_SHORT_ROUNDS).run()
        # Like an asyncio task, the engine has its own context, whichever thread runs it.
        self._context = copy_context()
        self._over = False
        self._failure: Exception | None = None
        self.turn()

    @property
    def status(self) -> str:
        """Status of the run: `running`, `finished` or `stopped`."""
        return self.store.runs.existing(self._config.run.name).status

    def link(self) -> MemoryLink:
        """Returns a link for one device, to pass as `Device(server=...)`."""
        return _ServedLink(self)

    def turn(self) -> None:
        """Runs the engine until it waits for devices; devices' calls do this automatically.

        Raises:
            RunError: Ten consecutive rounds fell short; so does each later call.
        """
        if self._failure is not None:
            raise self._failure
        if self._over:
            return
        try:
            self._context.run(self._turns.send, None)
        except StopIteration:
            self._over = True
        except Exception as error:
            self._failure = error
            raise

    def play(self, *devices: Device, steps: int = 1000) -> None:
        """Runs the devices' steps in turn until the run is over for all of them. A lost call is made again.

        Args:
            *devices: The devices, each with its own link.
            steps: Largest number of steps per device.

        Raises:
            ConfigurationError: A device has not finished after `steps` steps, or the run has no end.
        """
        if not self._config.run.rounds:
            raise ConfigurationError("the run has no end (rounds = 0): call device.step() yourself, or set rounds")
        left, lost = list(devices), ""

        def finishes(device: Device) -> bool:
            nonlocal lost
            try:
                return device.step(0.0) is Step.FINISHED
            except LinkError as error:  # for example of a `FaultyLink`
                lost = f". Last lost call: {error}"
                return False

        for _ in range(steps):
            left = [device for device in left if not finishes(device)]
            if not left:
                return
        names = ", ".join(device.device_id for device in left)
        raise ConfigurationError(
            f"{names} did not finish in {steps} steps; the run has min_devices = {self._config.run.min_devices} and "
            f"{self._config.run.rounds} rounds: pass that many devices, or more steps{lost}"
        )

    def close(self) -> None:
        """Stops the engine and closes the store."""
        self._context.run(self._turns.close)
        self.store.close()

    def __enter__(self) -> MemoryServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _ServedLink(MemoryLink):
    """An in-memory link that runs the engine before calls whose result depends on it."""

    def __init__(self, server: MemoryServer) -> None:
        super().__init__(server.api)
        self._server = server

    def upload_status(
        self, identity: service_pb2.Identity, name: service_pb2.UploadName
    ) -> service_pb2.UploadStatusResponse:
        self._server.turn()
        return super().upload_status(identity, name)

    def next_ask(self, identity: service_pb2.Identity, wait_seconds: float) -> service_pb2.NextAskResponse:
        self._server.turn()
        return super().next_ask(identity, wait_seconds)


class _Turns:
    """Implements the engine's `Waker`: suspends the engine until the next call of `MemoryServer.turn`."""

    async def wait(self, seconds: float = 0.0) -> None:
        """Waits until the next turn; ignores `seconds`."""
        await _Pause()

    def wake_other(self) -> None:
        """Does nothing, because devices in this process need no wake-up."""


class _Pause:
    def __await__(self) -> Generator[None, None, None]:
        yield
