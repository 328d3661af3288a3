"""What a method declares of a figure that its server half reports for a round, so that every surface shows it alike."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

Unit = Literal["", "accuracy"]


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
