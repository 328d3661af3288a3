"""Who is left out of the next rounds because it missed deadline after deadline.

A device that is present and never answers would cost every round its whole deadline. From the second round in a row
in which it missed one, it is left out of 1, 2, 4, ... up to 64 rounds, and then asked again. An answer in time ends
that. All of it is data of the store, so a restarted engine leaves out the same devices, and a round that is played
again keeps its cohort.
"""

from __future__ import annotations

from collections.abc import Mapping

_FROM = 2
_DOUBLINGS = 6


def rounds_left_out(late_in_a_row: int) -> int:
    """For how many rounds a device is left out after so many in a row in which it missed a deadline."""
    return 2 ** min(late_in_a_row - _FROM, _DOUBLINGS) if late_in_a_row >= _FROM else 0


def available(present: Mapping[str, bytes], left_out: Mapping[str, int], least: int) -> dict[str, bytes]:
    """Who may be asked: who is present and not left out, and where that are too few, those who would be back first.

    Args:
        present: Devices with their profiles.
        left_out: Devices that are left out, with the last round that they are.
        least: How many there must be.
    """
    back_first = sorted(present.keys() & left_out.keys(), key=lambda device: (left_out[device], device))
    lacking = least - (len(present) - len(back_first))
    out = set(back_first[max(lacking, 0) :])
    return {device: profile for device, profile in present.items() if device not in out}
