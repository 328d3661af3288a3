"""Back-off for devices that repeatedly miss deadlines.

A device that is present but never answers would delay every round until its deadline. From the second consecutive round
in which it misses a deadline, the device is left out of the next 1, 2, 4, ... up to 64 rounds and is then asked again.
An answer before the deadline resets the count. The counts are stored, so a restarted engine leaves out the same
devices, and a replayed round keeps its cohort. A round that asked several devices and that none answered does not
count: the server or the network was away, which says nothing about a device.
"""

from __future__ import annotations

from collections.abc import Mapping

from fleetdistill_server.store.database import Database
from fleetdistill_server.store.history import History
from fleetdistill_server.store.states import DEADLINE_PASSED

_FROM = 2
_DOUBLINGS = 6


def rounds_left_out(late_in_a_row: int) -> int:
    """Returns how many rounds to leave a device out after this many consecutive rounds with a missed deadline."""
    return 2 ** min(late_in_a_row - _FROM, _DOUBLINGS) if late_in_a_row >= _FROM else 0


def available(present: Mapping[str, bytes], left_out: Mapping[str, int], least: int) -> Mapping[str, bytes]:
    """Returns the devices that may be asked, with their profiles.

    These are the present devices that are not left out. If there are fewer than `least`, the devices whose back-off
    ends first are added.

    Args:
        present: Profiles of the present devices, by device id.
        left_out: Last round of the back-off, by id of the devices that are left out.
        least: Smallest number of devices to return, if that many are present.
    """
    if not left_out:
        return present
    back_first = sorted(present.keys() & left_out.keys(), key=lambda device: (left_out[device], device))
    lacking = least - (len(present) - len(back_first))
    out = set(back_first[max(lacking, 0) :])
    return {device: profile for device, profile in present.items() if device not in out}


def update_back_off(db: Database, history: History, run: str, number: int) -> None:
    """Applies the back-off to devices that missed a deadline in several consecutive rounds."""
    rows = db.rows(
        "SELECT a.device, max(CASE WHEN a.reason = ? THEN 1 ELSE 0 END) AS late, "
        "max(CASE WHEN a.status = 'answered' THEN 1 ELSE 0 END) AS answered, d.late_rounds "
        "FROM asks a JOIN devices d ON d.run = a.run AND d.device = a.device "
        "WHERE a.run = ? AND a.round = ? GROUP BY a.device, d.late_rounds",
        *(DEADLINE_PASSED, run, number),
    )
    if len(rows) > 1 and not any(row["answered"] for row in rows):
        return
    for row in rows:
        in_a_row = row["late_rounds"] + 1 if row["late"] else 0 if row["answered"] else row["late_rounds"]
        rounds = rounds_left_out(in_a_row) if row["late"] else 0
        if in_a_row == row["late_rounds"] and not rounds:
            continue  # as for most devices in most rounds
        db.write(
            "UPDATE devices SET late_rounds = ?, left_out_until = ? WHERE run = ? AND device = ?",
            *(in_a_row, number + rounds, run, row["device"]),
        )
        if rounds:
            text = f"{row['device']} missed a deadline in {in_a_row} consecutive rounds; it is left out until round "
            text += f"{number + rounds} has ended"
            history.add_event(run, "left-out", text, number=number, device=row["device"])
