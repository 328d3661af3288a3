"""Back-off for devices that repeatedly miss deadlines.

A device that is present but never answers would delay every round until its deadline. From the second consecutive round
in which it misses a deadline, the device is left out of the next 1, 2, 4, ... up to 64 rounds and is then asked again.
An answer before the deadline resets the count. The counts are stored, so a restarted engine leaves out the same
devices, and a replayed round keeps its cohort.
"""

from __future__ import annotations

from collections.abc import Mapping

_FROM = 2
_DOUBLINGS = 6


def rounds_left_out(late_in_a_row: int) -> int:
    """Returns how many rounds to leave a device out after this many consecutive rounds with a missed deadline."""
    return 2 ** min(late_in_a_row - _FROM, _DOUBLINGS) if late_in_a_row >= _FROM else 0


def available(present: Mapping[str, bytes], left_out: Mapping[str, int], least: int) -> dict[str, bytes]:
    """Returns the devices that may be asked, with their profiles.

    These are the present devices that are not left out. If there are fewer than `least`, the devices whose back-off
    ends first are added.

    Args:
        present: Profiles of the present devices, by device id.
        left_out: Last round of the back-off, by id of the devices that are left out.
        least: Smallest number of devices to return, if that many are present.
    """
    back_first = sorted(present.keys() & left_out.keys(), key=lambda device: (left_out[device], device))
    lacking = least - (len(present) - len(back_first))
    out = set(back_first[max(lacking, 0) :])
    return {device: profile for device, profile in present.items() if device not in out}
