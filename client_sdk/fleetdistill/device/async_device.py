"""`AsyncDevice`, a `Device` for apps with asyncio."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from fleetdistill.control_flow import control_flow_as_errors
from fleetdistill.device.arguments import check_on_event
from fleetdistill.device.device import Device
from fleetdistill.device.events import Event
from fleetdistill.device.preview import Preview
from fleetdistill.errors import DeviceBusyError, FleetDistillError

P = ParamSpec("P")
T = TypeVar("T")

_LOOK_SECONDS = 1.0

_in_callback: ContextVar[bool] = ContextVar("fleetdistill_in_callback", default=False)


def _with_arguments_of(
    init: Callable[Concatenate[Any, P], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Gives a constructor the signature of another one, to which it passes its arguments on."""

    def decorate(own: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        @wraps(init)
        def wrapped(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
            own(self, *args, **kwargs)

        return wrapped

    return decorate


class AsyncDevice:
    """A `Device` in an asyncio app.

        async with AsyncDevice(server=..., model=..., data=..., state_dir=..., on_event=show) as device:
            await device.run()

    The device works in a background thread, so the event loop stays free. Methods may be called from the loop's thread
    at any time.

    Args:
        on_event: Function or coroutine function, called on the event loop for every `Event`. The device continues when
            it has returned. As with `Device`, an exception in it is an event, except for KeyboardInterrupt and
            SystemExit, which `run` raises, and no event about an answer is lost.
        **arguments: All other arguments of `Device`.

    Raises:
        ConfigurationError, StateError: As `Device`.
    """

    @_with_arguments_of(Device.__init__)
    def __init__(self, *, on_event: Callable[[Event], object] | None = None, **arguments: Any) -> None:
        if on_event is not None:
            check_on_event(on_event, may_await=True)
        self._on_event = on_event
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: asyncio.Future[None] | None = None
        self._device = Device(on_event=self._deliver if on_event is not None else None, **arguments)

    @property
    def device_id(self) -> str:
        """Name of this device in the fleet."""
        return self._device.device_id

    @property
    def allow(self) -> tuple[str, ...]:
        """Columns that may leave the device. Assign fewer to withdraw consent, as with `Device.allow`."""
        return self._device.allow

    @allow.setter
    def allow(self, columns: Sequence[str]) -> None:
        self._device.allow = columns

    @property
    def state_dir(self) -> Path:
        """Directory that stores the device's identity, model and unfinished work."""
        return self._device.state_dir

    @property
    def version(self) -> int:
        """Number of the delivered model in use; see `Device.version`."""
        return self._device.version

    async def run(self) -> None:
        """Takes part in the run until it is finished, or until `stop` is called.

        Cancelling `run` stops the device, waits for the end of its work, and raises CancelledError; `run` can be called
        again.

        Raises:
            DeviceBusyError, DeviceClosedError, RefusedError, FleetDistillError: As `Device.run`.
        """
        self._loop = asyncio.get_running_loop()
        try:
            self._device.start()
        except DeviceBusyError as busy:  # which names the method that the app has called
            raise DeviceBusyError("run", "run" if busy.working == "start" else busy.working) from None
        ended = asyncio.wrap_future(self._device.background_result())
        try:
            await asyncio.wait({ended})
        except asyncio.CancelledError:
            self._device.stop()
            await _ignoring_cancellation(ended)
            raise
        ended.result()

    def stop(self) -> None:
        """Makes `run` return after the current mini-batch; see `Device.stop`."""
        self._device.stop()

    def wake(self) -> None:
        """Makes the next turn begin at once; see `Device.wake`."""
        self._device.wake()

    async def model(self) -> Any:
        """Returns the app's model; see `Device.model`."""
        return await self.call(lambda device: device.model)

    async def models(self) -> Mapping[str, Any]:
        """Returns all delivered variants of the model by name; see `Device.models`."""
        return await self.call(lambda device: device.models)

    async def predict(self, inputs: Any) -> Any:
        """Returns the delivered model's logits; see `Device.predict`."""
        return await self.call(lambda device: device.predict(inputs))

    async def replace_data(self, data: Any = None) -> None:
        """Replaces the training data; see `Device.replace_data`."""
        await self.call(lambda device: device.replace_data(data))

    async def preview(self) -> Preview:
        """Returns what an answer would contain; see `Device.preview`."""
        return await self.call(lambda device: device.preview())

    async def roll_back(self) -> int:
        """Returns to the previous version of the model in the next turn; see `Device.roll_back`."""
        return await self.call(lambda device: device.roll_back())

    async def roll_forward(self) -> int:
        """Ends the effect of `roll_back`; see `Device.roll_forward`."""
        return await self.call(lambda device: device.roll_forward())

    async def forget(self, *, local: bool = False) -> bool:
        """Asks the server to delete what the device has sent, then erases the state; see `Device.forget`."""
        return await self.call(lambda device: device.forget(local=local))

    async def call(self, function: Callable[[Device], T]) -> T:
        """Returns `function(device)`, called in a thread; for members of `Device` that this class does not have.

        Args:
            function: Receives the `Device`. It must not call `run`, `step`, `tick` or `start`.
        """
        self._loop = asyncio.get_running_loop()
        return await asyncio.to_thread(_call, function, self._device)

    async def close(self, *, leave: bool = True) -> None:
        """Stops and closes the device; see `Device.close`. In `on_event` it returns before the device is closed."""
        closing = asyncio.ensure_future(asyncio.to_thread(self._device.close, leave=leave))
        if _in_callback.get():  # the device waits for the callback
            self._closing = closing
        else:
            await asyncio.shield(closing)

    async def __aenter__(self) -> Self:
        self._device.__enter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _deliver(self, event: Event) -> None:
        """Calls the app on the event loop, and waits for its end; called in threads of the SDK."""
        called: concurrent.futures.Future[BaseException | None] | None = None
        while called is None or not concurrent.futures.wait([called], _LOOK_SECONDS).done:
            if self._loop is None or self._loop.is_closed():
                self._device.stop()  # nobody is left whom the device could report to
                raise FleetDistillError(f"the app closed its event loop before on_event received {event.kind!r}")
            called = called or asyncio.run_coroutine_threadsafe(self._call_app(event), self._loop)
        if (error := called.result()) is not None:
            raise error

    async def _call_app(self, event: Event) -> BaseException | None:
        """Calls the app; returns its exception, which would end the event loop or be lost as a cancellation."""
        assert self._on_event is not None
        _in_callback.set(True)
        try:
            result = self._on_event(event)
            if inspect.isawaitable(result):
                await result
        except BaseException as error:
            return _raised_by_app(error)
        return None


def _raised_by_app(error: BaseException) -> BaseException:
    """Returns what the app raised: Python raises a RuntimeError where a StopIteration leaves a coroutine."""
    cause = error.__cause__
    hidden = isinstance(error, RuntimeError) and isinstance(cause, (StopIteration, StopAsyncIteration))
    return cause if cause is not None and hidden and str(error).startswith("coroutine raised") else error


def _call(function: Callable[[Device], T], device: Device) -> T:
    with control_flow_as_errors(getattr(function, "__name__", "call")):
        return function(device)


async def _ignoring_cancellation(ended: asyncio.Future[None]) -> None:
    """Waits for the end of the background thread, whose exception was emitted and logged."""
    while not ended.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({ended})
    ended.exception()  # marks it as seen
