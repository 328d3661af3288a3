"""Finds devices that `[method] robust` left out of three consecutive rounds that they took part in.

The suspects are only shown to the operator; no device is revoked automatically.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from fleetdistill_server.event_kinds import LARGE_DEVICE, LEFT_OUT, MOST_OF_THE_WEIGHT
from fleetdistill_server.store.states import UploadStatus
from fleetdistill_server.store.store import Store

__all__ = ["named"]

_ROUNDS = 3


def named(store: Store, run: str) -> dict[str, list[str]]:
    """Returns the devices reported as outliers or as having too much weight, each with the kinds of the events."""
    result = defaultdict[str, list[str]](list)
    for kind in (*LEFT_OUT, LARGE_DEVICE, MOST_OF_THE_WEIGHT):
        for device in sorted({event.device for event in store.history.events(run, kind)}):
            result[device].append(kind)
    return dict(result)


def suspects_by_round(store: Store, run: str) -> Mapping[int, Sequence[str]]:
    """Returns the suspects of each completed round.

    A suspect was left out of the round and of the two preceding rounds that it took part in.
    """
    left_out = defaultdict[str, set[int]](set)
    for kind in LEFT_OUT:
        for event in store.history.events(run, kind):
            left_out[event.device].add(event.round)
    took_part = defaultdict[str, set[int]](set)
    if left_out:
        for upload in store.asks.uploads(run):
            if upload.status is UploadStatus.USED:
                took_part[upload.device].add(upload.round)
    result = defaultdict[int, list[str]](list)
    for device in sorted(left_out):
        for number in _suspect_in(sorted(took_part[device]), left_out[device]):
            result[number].append(device)
    return result


def _suspect_in(took_part: Sequence[int], left_out: set[int]) -> Iterator[int]:
    running = 0
    for number in took_part:
        running = running + 1 if number in left_out else 0
        if running >= _ROUNDS:
            yield number
