"""Tracks what each device has acknowledged, and which devices do not answer.

For methods that ask only the devices that need something:

    async for answer in self.deliveries.ask(cohort, "learn", self.message, to=asked, unless_held=digest): ...

A device holds the version that it acknowledged last. A round that falls short of its quorum rolls the method's state
back, but its devices may hold what it sent; after such a round all acknowledgements are discarded. A device that does
not answer is asked again after 1, 2, 4, ... rounds, because the other devices wait for it until the deadline.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any

from fleetdistill_server.methods.cohort import Cohort, DeviceAnswer, PayloadFor

__all__ = ["Deliveries"]

Version = Any
"""Identifies the content that a device holds, such as a digest; never None."""


class Deliveries:
    """The part of a method's state that tracks acknowledgements and unresponsive devices."""

    def __init__(self) -> None:
        self._acknowledged: dict[str, Version] = {}
        self._missed: dict[str, list[int]] = {}  # unresponsive devices: round of the next ask, next pause in rounds
        self._round = 0
        self._present: set[str] = set()  # at the last `update_present`; not part of the state

    def begin(self, round_number: int) -> None:
        """Starts a round; must be called before the round's first ask."""
        if round_number > self._round + 1:
            self._acknowledged.clear()
        self._round = round_number

    async def ask(
        self,
        cohort: Cohort,
        step: str,
        payload: PayloadFor,
        *,
        to: Sequence[str],
        unless_held: Version | None = None,
        quorum: float | None = None,
    ) -> AsyncIterator[DeviceAnswer]:
        """Asks a step of the devices that need it and are not paused, and yields their answers.

        Args:
            cohort: The round's cohort.
            step: Name of the device half's handler.
            payload: As in `Cohort.ask`.
            to: Devices to consider.
            unless_held: Version that the step delivers. Devices that hold it are not asked, and devices that answer
                hold it afterwards. None for a step that delivers nothing.
            quorum: Share of the asked devices that must answer; by default the run's.
        """
        due = [item for item in to if self.is_askable(item) and (unless_held is None or self.lacks(item, unless_held))]
        if not due:
            return
        answered = []
        async for answer in cohort.ask(step, payload, to=due, quorum=quorum):
            answered.append(answer.device)
            if unless_held is not None:
                self._acknowledged[answer.device] = unless_held
            yield answer
        for device in answered:
            self.mark_responsive(device)
        self.mark_unresponsive([device for device in due if device not in answered])

    def lacks(self, device: str, digest: Version) -> bool:
        """Returns whether a device holds a version other than this one, or no version."""
        return bool(self._acknowledged.get(device) != digest)

    @property
    def any_acknowledged(self) -> bool:
        """Whether at least one device has acknowledged a version."""
        return bool(self._acknowledged)

    # --- devices that do not answer

    def is_unresponsive(self, device: str) -> bool:
        """Returns whether a device did not answer its last ask."""
        return device in self._missed

    def is_askable(self, device: str) -> bool:
        """Returns whether a device is not paused."""
        return device not in self._missed or self._round >= self._missed[device][0]

    def mark_unresponsive(self, devices: Sequence[str]) -> None:
        """Pauses devices that did not answer, each for twice as many rounds as before."""
        for device in devices:
            if self.is_askable(device):
                _, pause = self._missed.get(device, [0, 1])
                self._missed[device] = [self._round + 1 + pause, 2 * pause]

    def mark_responsive(self, device: str) -> None:
        """Ends a device's pause."""
        self._missed.pop(device, None)

    def update_present(self, present: Collection[str]) -> None:
        """Ends the pause of devices that reconnected; called between rounds with the present devices."""
        for device in set(present) - self._present:
            self.mark_responsive(device)
        self._present = set(present)

    # --- state

    def forget(self, device: str) -> None:
        """Removes one device's entries."""
        self._acknowledged.pop(device, None)
        self._missed.pop(device, None)

    def state_dict(self) -> dict[str, Any]:
        """Returns the entries `held`, `silent` and `round` for a method's state."""
        return {"held": dict(self._acknowledged), "silent": dict(self._missed), "round": self._round}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the entries of `state_dict` from a method's state."""
        self._acknowledged, self._missed, self._round = dict(state["held"]), dict(state["silent"]), state["round"]
