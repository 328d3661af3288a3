"""What a server half reports of a round: the figures that its method declares, and secure sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["SumFigures"]

Unit = Literal["", "accuracy"]
SECURE_SUMS = "secure_sums"
"""Name of the figure with a round's secure sums, by number from 1; also of short rounds, in which sums failed."""
_NAMED = 5
"""Devices of a step that a text names."""


@dataclass(frozen=True)
class Figure:
    """A figure of a round: how it is labelled, and how one value is made of what the server half reports.

    Attributes:
        label: What people read, such as `Teacher accuracy`.
        unit: `accuracy` for a rate in [0, 1], which is shown in percent; empty for plain numbers and texts.
        digits: Decimal places that tables show of a number, at least 0.
        of: What the server half reports: one `value`, `mean` for a number by device whose mean is shown, `devices` for
            a text by device whose devices are counted, or `counts` for a count by text.
    """

    label: str
    unit: Unit = ""
    digits: int = 0
    of: Literal["value", "mean", "devices", "counts"] = "value"

    def value(self, reported: Any) -> float | str | None:
        """Returns the figure as a number, or as a text if it counts texts.

        Args:
            reported: What the server half reported in a round; None or empty if it did not.
        """
        if reported is None or reported == {}:
            return None
        if self.of == "mean":
            return float(sum(reported.values()) / len(reported))
        if self.of == "devices":
            return ", ".join(f"{count} x {text}" for text, count in Counter(reported.values()).items())
        if self.of == "counts":
            return ", ".join(f"{count} {text}" for text, count in reported.items())
        return reported  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class SumFigures:
    """A secure sum of a round, made or failed.

    Attributes:
        asked: Number of devices asked for keys.
        keys, boxes, inputs, signatures, shares: Numbers of devices that sent them; None for a step that was not
            reached, and for signatures if the sum has none.
        min_devices: q, the fewest devices in the sum, at least 3.
        threshold: t, how many devices must give shares; None if the sum failed before they were known.
        noise_shares: m, the noise shares that the guarantee counts on; None in a sum without noise.
        dropped: Ids of the devices that did not answer, by step.
        seconds: Time from the first ask to the sum or its failure.
        failure: Why there is no sum; empty for a sum that was made.
        sid: Id of the sum, 64 hexadecimal digits; empty in sums of an earlier version, as the next.
        roster: Digest of the ids and keys of all its devices, 64 hexadecimal digits; empty if the sum failed before.
    """

    asked: int
    keys: int | None
    boxes: int | None
    inputs: int | None
    signatures: int | None
    shares: int | None
    min_devices: int
    threshold: int | None
    noise_shares: int | None
    dropped: Mapping[str, Sequence[str]]
    seconds: float
    failure: str
    sid: str = ""
    roster: str = ""

    @property
    def dropped_text(self) -> str:
        """Which devices dropped out at which step, of many the first ones; empty if none did."""
        return "; ".join(f"{_first(devices)} at {step}" for step, devices in self.dropped.items())


def sums_of(figures: Mapping[str, Any]) -> dict[int, SumFigures]:
    """Returns the secure sums in the figures of a round, by number from 1; empty if it has none."""
    return {int(number): SumFigures(**one) for number, one in figures.get(SECURE_SUMS, {}).items()}


def _first(devices: Sequence[str]) -> str:
    more = f" and {len(devices) - _NAMED} more" if len(devices) > _NAMED else ""
    return ", ".join(devices[:_NAMED]) + more
