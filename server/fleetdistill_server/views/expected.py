"""Expected accuracy of devices' predictors on unseen data, estimated by leave-one-out without held-out data.

Only class statistics provides these figures, and only devices whose apps allow `metrics` report them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fleetdistill.methods.classstats.exchange import (
    LEAVE_ONE_OUT,
    OWN_KEPT,
    OWN_LEAVE_ONE_OUT,
    PERSONAL_LEAVE_ONE_OUT,
    SPLIT,
)
from fleetdistill_server.store.records import ReportedFigure
from fleetdistill_server.store.store import Store

__all__ = ["Expected", "expected", "of_the_fleet"]


@dataclass(frozen=True)
class Expected:
    """Leave-one-out results of one device, from the newest round that it reported.

    Attributes:
        rows: Number of the device's samples, at least 1.
        general: Number of samples that the general variant predicts correctly when they are left out.
        personal: Number of samples that the device's personal variant predicts correctly when they are left out.
        own_statistics_kept: Whether the personal variant uses only the device's own statistics, which predict better.
    """

    rows: int
    general: float
    personal: float
    own_statistics_kept: bool

    @property
    def rates(self) -> dict[str, float]:
        """Returns the share of correct predictions by variant."""
        return {"general": self.general / self.rows, "personal": self.personal / self.rows}


def expected(store: Store, run: str, only: str | None = None) -> dict[str, Expected]:
    """Returns the expected accuracy by device, without devices that are forgotten or to be forgotten.

    Figures of an undone round are left out: a device whose newest ones they are has none until it reports again.

    Only of one device if `only` is given.
    The result is empty for methods without these figures.
    """
    forgotten = {device.id for device in store.devices.all(run) if device.forget_asked_at is not None}
    undone = store.runs.undone_rounds(run)
    reported = {
        (figure.device, figure.name, figure.round): figure
        for name in (LEAVE_ONE_OUT, OWN_KEPT)
        for figure in store.history.newest_figures(run, name, SPLIT, only)
        if figure.device not in forgotten and figure.round not in undone
    }
    newest = {device: number for device, name, number in reported if name == LEAVE_ONE_OUT}
    result = {device: _of_device(reported, device, number) for device, number in sorted(newest.items())}
    return {device: one for device, one in result.items() if one is not None}


def _of_device(reported: Mapping[tuple[str, str, int], ReportedFigure], device: str, number: int) -> Expected | None:
    """Returns a device's results, or None if it reported inconsistent figures."""
    names = (LEAVE_ONE_OUT, PERSONAL_LEAVE_ONE_OUT, OWN_LEAVE_ONE_OUT, OWN_KEPT)
    general, personal, own, kept = (reported.get((device, name, number)) for name in names)
    own_kept = own is not None and kept is not None and kept.sum > 0
    used = own if own_kept else personal
    if general is None or used is None or general.count < 1 or used.count != general.count:
        return None
    return Expected(general.count, general.sum, used.sum, own_kept)


def of_the_fleet(devices: Iterable[Expected]) -> dict[str, float] | None:
    """Returns the share of correct predictions over all devices' samples, by variant; None without devices."""
    reported = list(devices)
    rows = sum(item.rows for item in reported)
    if not rows:
        return None
    return {
        "general": sum(item.general for item in reported) / rows,
        "personal": sum(item.personal for item in reported) / rows,
    }
