"""A server in this process, for tests of an app with a `Device` in it.

    server = MemoryServer({"run": {"method": "fedavg", "rounds": 2}, "contract": {"classes": 3, "input_shape": [4]}})
    with server, Device(server=server.link(), ...) as device:
        device.run()

It is the product's own engine, intake and store, in memory: no network, no thread and no process. The engine goes on
whenever a device asks for work, or for the state of its upload. `fleetdistill.testing` has faults for the link, and a
clock without waiting.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

from fleetdistill import Device, Step
from fleetdistill.clock import Clock
from fleetdistill.errors import ConfigurationError
from fleetdistill.wire.v1 import service_pb2
from fleetdistill_server.config.run_config import run_config
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.simulation.links.memory_link import MemoryLink
from fleetdistill_server.store.clock import Clock as StoreClock
from fleetdistill_server.store.store import Store

_USUAL: Mapping[str, Mapping[str, Any]] = {
    "run": {"name": "test", "rounds": 1, "min_devices": 1},
    "server": {"torch_device": "cpu"},
}
_MOST_SHORT_ROUNDS = 10
"""In a row; then the run has failed, because no other device will come."""


class MemoryServer:
    """One run, served to devices of this thread.

    Args:
        settings: Sections of run.toml. Left out, [run] has name "test", one round and `min_devices` 1.
        clock: What deadlines go by, such as a `fleetdistill.testing.ManualClock`; by default the machine's time.

    Attributes:
        store: What the run has stored.

    Raises:
        ConfigurationError: A setting is unknown or out of range; the message names it.
    """

    def __init__(self, settings: Mapping[str, Mapping[str, Any]], clock: Clock | None = None) -> None:
        sections = {**_USUAL, **settings}
        self._config = run_config({name: {**_USUAL.get(name, {}), **given} for name, given in sections.items()})
        self.store = Store.in_memory()
        if clock is not None:
            self.store.asks.clock = StoreClock(clock.now, clock.now)
        self.api = DeviceApi(self.store, lease_seconds=self._config.server.lease_seconds)
        self._turns = Engine(self.store, self._config, _Turns(), _MOST_SHORT_ROUNDS).run()
        self._over = False
        self.turn()

    @property
    def status(self) -> str:
        """The run's: `running`, `finished` or `stopped`."""
        row = self.store.runs.get(self._config.run.name)
        assert row is not None  # the engine has entered it
        return str(row["status"])

    def link(self) -> MemoryLink:
        """A link for one device: `Device(server=...)`."""
        return _ServedLink(self)

    def turn(self) -> None:
        """Lets the engine go on until it waits for devices. Calls of devices do this by themselves.

        Raises:
            RunError: Ten rounds in a row fell short.
        """
        if self._over:
            return
        try:
            self._turns.send(None)
        except StopIteration:
            self._over = True

    def play(self, *devices: Device, steps: int = 1000) -> None:
        """Lets devices take steps in turn until the run is over for all of them.

        Args:
            *devices: Each with a link of its own.
            steps: Most steps of each.

        Raises:
            ConfigurationError: They have not finished after so many steps.
        """
        left = list(devices)
        for _ in range(steps):
            left = [device for device in left if device.step(0.0) is not Step.FINISHED]
            if not left:
                return
        names = ", ".join(device.device_id for device in left)
        raise ConfigurationError(
            f"{names} did not finish in {steps} steps; the run wants min_devices = {self._config.run.min_devices} and "
            f"{self._config.run.rounds} rounds: play with so many devices, or give more steps"
        )

    def close(self) -> None:
        """Ends the engine and drops the store."""
        self._turns.close()
        self.store.close()

    def __enter__(self) -> MemoryServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _ServedLink(MemoryLink):
    """A memory link whose calls let the engine go on first, as it does beside a real front."""

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
    """The engine's `Waker`: it waits until somebody lets it go on."""

    async def wait(self, seconds: float = 0.0) -> None:
        """Until the next turn."""
        await _Pause()

    def wake_other(self) -> None:
        """Devices in this process need no wake-up."""


class _Pause:
    def __await__(self) -> Generator[None, None, None]:
        yield
