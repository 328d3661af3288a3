"""What devices hold of a method's knowledge, and which of them do not answer.

For methods that ask only those devices that need something:

    async for answer in self.deliveries.ask(cohort, "learn", self.lesson, to=asked, unless_held=digest): ...

A device holds what it has acknowledged. After a round that fell short it may hold what the method's state, which went
back to before the round, knows nothing of: then no device counts as holding anything. A device that does not answer is
asked again after a pause of 1, 2, 4, ... rounds, for all others wait for it until the deadline.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Any

from fleetdistill.knowledge import Parts
from fleetdistill_server.methods.cohort import Cohort, DeviceAnswer, PayloadFor

Version = Any
"""Names what a device holds, such as the digest of a payload: a number, or a list of numbers for several parts."""


class Deliveries:
    """Part of a method's state: what each device holds, and when to ask again those that do not answer.

    Args:
        nothing: What a device holds that has acknowledged nothing.

    Attributes:
        short_rounds: Rounds that fell short since the last that counted.
    """

    def __init__(self, nothing: Version = None) -> None:
        self.short_rounds = 0
        self._nothing = nothing
        self._acknowledged: dict[str, Version] = {}
        self._missed: dict[str, list[int]] = {}  # who did not answer: round to ask it again in, next pause
        self._round = 0
        self._present: set[str] = set()  # at the last look between rounds; not part of the state

    def begin(self, round_number: int) -> None:
        """Starts a round; must be called before anything is asked in it."""
        self.short_rounds = round_number - self._round - 1
        if self.short_rounds > 0:
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
        """Asks a step of those devices that need it and are not in a pause; nothing is asked if there are none.

        Args:
            cohort: The round's.
            step: Name of the device half's handler.
            payload: As in `Cohort.ask`.
            to: Of these devices.
            unless_held: Names what the step brings: a device that holds it is not asked, and one that answers holds it.
                None for a step that brings nothing to keep.
            quorum: Part of the asked devices that must answer; by default the run's.
        """
        due = [one for one in to if self.is_askable(one) and (unless_held is None or self.lacks(one, unless_held))]
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

    async def ask_all(
        self,
        cohort: Cohort,
        step: str,
        payload: Callable[[Version], Parts],
        *,
        to: Sequence[str],
        acknowledges: Callable[[Version], Version],
    ) -> AsyncIterator[DeviceAnswer]:
        """Asks a step of all these devices, each with what it does not hold yet.

        Args:
            cohort: The round's.
            step: Name of the device half's handler.
            payload: From what a device holds to what it is sent.
            to: These devices. One that does not answer holds nothing from then on.
            acknowledges: From what a device held to what it holds once it has answered.
        """
        before = {device: self._acknowledged.pop(device, self._nothing) for device in to}
        async for answer in cohort.ask(step, lambda device: payload(before[device]), to=to):
            self._acknowledged[answer.device] = acknowledges(before[answer.device])
            yield answer

    def lacks(self, device: str, digest: Version) -> bool:
        """Whether a device does not hold what the digest names."""
        return bool(self._acknowledged.get(device, self._nothing) != digest)

    def without_acknowledgement(self, devices: Sequence[str]) -> list[str]:
        """Those of the devices that have acknowledged nothing."""
        return [device for device in devices if device not in self._acknowledged]

    @property
    def any_acknowledged(self) -> bool:
        """Whether some device holds something."""
        return bool(self._acknowledged)

    # --- devices that do not answer

    def is_unresponsive(self, device: str) -> bool:
        """Whether a device has not answered, and not since then."""
        return device in self._missed

    def is_askable(self, device: str) -> bool:
        """Whether a device is in no pause."""
        return device not in self._missed or self._round >= self._missed[device][0]

    def mark_unresponsive(self, devices: Sequence[str]) -> None:
        """These devices were asked and did not answer: each is in a pause, twice as long as its last."""
        for device in devices:
            if self.is_askable(device):
                _, pause = self._missed.get(device, [0, 1])
                self._missed[device] = [self._round + 1 + pause, 2 * pause]

    def mark_responsive(self, device: str) -> None:
        """A device that answers is in no pause."""
        self._missed.pop(device, None)

    def update_present(self, present: Collection[str]) -> None:
        """Between rounds: a device that has come back counts as one that answers."""
        for device in set(present) - self._present:
            self.mark_responsive(device)
        self._present = set(present)

    # --- state

    def forget(self, device: str) -> None:
        """Drops what is kept of one device."""
        self._acknowledged.pop(device, None)
        self._missed.pop(device, None)

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` restores: the entries `held`, `silent` and `round` of a method's state."""
        return {"held": dict(self._acknowledged), "silent": dict(self._missed), "round": self._round}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores these entries of a method's state."""
        self._acknowledged, self._missed, self._round = dict(state["held"]), dict(state["silent"]), state["round"]
