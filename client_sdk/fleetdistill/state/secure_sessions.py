"""The secure sum in which a device takes part: frozen before anything leaves, and erased at its end.

Everything that the device sends in a sum is a function of these files and of the asks, so a crash at any time, or a
repeated ask, gives the same bytes; a mask never covers two inputs, because root and input live and die in one file.

    secure.json         run, round, root of all secrets, encoded input with its noise, and parameters of the open sum
    secure_steps.json   for each answered step the digests of ask and answer, and the lists that later steps need
    secure_ended.json   one entry for each sum that has ended: its id, run, outcome and digests; old ones only of sums
                        that may contain the device
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fleetdistill.errors import StateError
from fleetdistill.state import failpoints
from fleetdistill.state.files import Files
from fleetdistill.state.format import damaged_error, json_object, sealed_json

__all__ = ["SecureSession", "SecureSessions", "Steps"]

SESSION, STEPS, ENDED = "secure.json", "secure_steps.json", "secure_ended.json"
NOT_COUNTED = "not counted"
"""Outcome of a sum that the server says was not finished."""
_KEPT = 100
"""Number of ended sums that are kept, beside all that may contain the device."""


@dataclass(frozen=True, kw_only=True)
class SecureSession:
    """The device's part of one sum.

    Attributes:
        sid: Id of the sum, 32 bytes.
        run: Run of the sum.
        round: Round of the sum.
        root: Root of the device's secrets, 32 bytes of the operating system.
        numbers: Encoded input with its noise, the numbers as bytes.
        parameters: The sum's parameters, 44 bytes.
        rows: Fingerprint of the rows, as in the privacy ledger.
        has_noise: Whether its release is in the privacy ledger once the device has sent its masked numbers.
        is_signed: Whether the devices signed their keys, so that the server's word is not believed.
        began: Unix time in seconds.
    """

    sid: bytes
    run: str
    round: int
    root: bytes
    numbers: bytes
    parameters: bytes
    rows: str
    has_noise: bool
    is_signed: bool
    began: float


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The answered steps of a sum.

    Attributes:
        sid: Id of the sum.
        digests: SHA-256 of ask and answer, hexadecimal, by step in the order of the answers.
        endorsement: What vouches for this device's signing key; empty with unsigned keys.
        devices: Number of devices of the sum; 0 before step `secure_shares`.
        entries: Ids and keys of this device and its neighbours by index.
        roster: Digest of the entries of all devices.
        boxes: Boxes for this device by index of the sender.
        members: Bitmaps of the devices by step.
        gave_shares: Whether the device has given its shares, so that the server may have unmasked the sum.
    """

    sid: bytes
    digests: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    endorsement: bytes = b""
    devices: int = 0
    entries: Mapping[int, tuple[str, bytes]] = field(default_factory=dict)
    roster: bytes = b""
    boxes: Mapping[int, bytes] = field(default_factory=dict)
    members: Mapping[str, bytes] = field(default_factory=dict)
    gave_shares: bool = False

    @property
    def has_input(self) -> bool:
        """Whether the device has sent its masked numbers, so that the sum may contain it."""
        return bool(self.members)

    def may_be_finished(self, *, is_signed: bool) -> bool:
        """Returns whether a sum may contain the device although it was not told so.

        The server's word that a sum was not finished is believed only with unsigned keys, and only until the device has
        given its shares: from then on, the shares of others that come late may finish it.
        """
        return self.gave_shares or (is_signed and self.has_input)

    def after(self, step: str, ask: str, answer: str, **lists: Any) -> Steps:
        """Returns the steps with one more, whose digests are `ask` and `answer`, and with the lists of its ask."""
        return replace(self, digests={**self.digests, step: (ask, answer)}, **lists)


class SecureSessions:
    """Stores the open sum of a state directory.

    Args:
        files: The state directory.
    """

    def __init__(self, files: Files) -> None:
        self._files = files

    def open(self) -> SecureSession | None:
        """Returns the open sum, or None. Completes an end that a crash has interrupted.

        Raises:
            StateError: A file is damaged.
        """
        session = self._stored()
        outcome = None if session is None else self.outcome_of(session.sid)
        if outcome is not None and outcome != NOT_COUNTED:
            self._wipe()
        return session if outcome is None else None

    def unfinished(self) -> SecureSession | None:
        """Returns the stored sum if it is open or ended as not counted, or None."""
        self.open()
        return self._stored()

    def _stored(self) -> SecureSession | None:
        saved = self._load(SESSION)
        if saved is None:
            return None
        session: SecureSession = self._of(SESSION, lambda: _session_of(saved))
        return session

    def begin(self, session: SecureSession) -> None:
        """Stores a new sum durably, in place of an unfinished one, which ends as not counted."""
        if (earlier := self.open()) is not None:
            self._note_end(earlier, NOT_COUNTED)
        self._wipe()
        content = asdict(session)
        for name in ("sid", "root", "parameters"):
            content[name] = content[name].hex()
        content["numbers"] = base64.b64encode(session.numbers).decode()
        failpoints.hit("device.secure.before-freeze")
        self._files.save(SESSION, sealed_json(content), mode=0o600)
        failpoints.hit("device.secure.after-freeze")

    def steps(self, session: SecureSession) -> Steps:
        """Returns the answered steps of a sum.

        Raises:
            StateError: The file is damaged.
        """
        saved = self._load(STEPS)
        if saved is None or saved.get("sid") != session.sid.hex():
            return Steps(sid=session.sid)
        steps: Steps = self._of(STEPS, lambda: _steps_of(saved))
        return steps

    def record(self, steps: Steps) -> None:
        """Stores the answered steps durably; called before the last of the answers may leave."""
        content = {
            "sid": steps.sid.hex(),
            "digests": {step: list(pair) for step, pair in steps.digests.items()},
            "endorsement": steps.endorsement.hex(),
            "devices": steps.devices,
            "entries": {str(index): [device, keys.hex()] for index, (device, keys) in steps.entries.items()},
            "roster": steps.roster.hex(),
            "boxes": {str(index): box.hex() for index, box in steps.boxes.items()},
            "members": {step: members.hex() for step, members in steps.members.items()},
            "gave_shares": steps.gave_shares,
        }
        self._files.save(STEPS, sealed_json(content), mode=0o600)
        failpoints.hit("device.secure.after-step")

    def end(self, session: SecureSession, outcome: str) -> None:
        """Ends a sum: keeps its id, digests and outcome, and destroys its root and its input."""
        self._note_end(session, outcome)
        failpoints.hit("device.secure.after-end")
        self._wipe()

    def _note_end(self, session: SecureSession, outcome: str) -> None:
        steps = self.steps(session)
        digests = {step: list(pair) for step, pair in steps.digests.items()}
        if not digests:  # nothing was sent in this sum
            return
        entry = {
            "sid": session.sid.hex(),
            "run": session.run,
            "round": session.round,
            "outcome": outcome,
            "is_in_sum": steps.may_be_finished(is_signed=session.is_signed or outcome != NOT_COUNTED),
            "is_charged": steps.has_input and session.has_noise,
            "digests": digests,
        }
        old, last = self._ended()[: 1 - _KEPT], self._ended()[1 - _KEPT :]
        kept = [*(item for item in old if item["is_in_sum"]), *last, entry]
        self._files.save(ENDED, sealed_json({"sums": kept}), mode=0o600)

    def is_in_sum(self, run: str) -> bool:
        """Returns whether an ended sum of a run contains this device, or may contain it."""
        return any(entry["run"] == run and entry["is_in_sum"] for entry in self._ended())

    def names_release(self) -> str | None:
        """Returns the file with a sum that must be in the privacy ledger, or None if none has one."""
        session = self._stored()
        if session is not None and session.has_noise and self.steps(session).has_input:
            return STEPS
        return ENDED if any(entry["is_charged"] for entry in self._ended()) else None

    def outcome_of(self, sid: bytes) -> str | None:
        """Returns how a sum has ended for this device; None if it has not."""
        return next((entry["outcome"] for entry in self._ended() if entry.get("sid") == sid.hex()), None)

    def _ended(self) -> list[dict[str, Any]]:
        saved = self._load(ENDED)
        return [] if saved is None else list(saved.get("sums", []))

    def _wipe(self) -> None:
        for name in (STEPS, SESSION):
            self._files.wipe(name)

    def _load(self, name: str) -> dict[str, Any] | None:
        data = self._files.load(name)
        return None if data is None else json_object(self._files.directory / name, data)

    def _of(self, name: str, read: Any) -> Any:
        try:
            return read()
        except StateError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise damaged_error(self._files.directory / name, error) from error


def _session_of(saved: Mapping[str, Any]) -> SecureSession:
    return SecureSession(
        sid=bytes.fromhex(saved["sid"]),
        run=str(saved["run"]),
        round=int(saved["round"]),
        root=bytes.fromhex(saved["root"]),
        numbers=base64.b64decode(saved["numbers"], validate=True),
        parameters=bytes.fromhex(saved["parameters"]),
        rows=str(saved["rows"]),
        has_noise=bool(saved["has_noise"]),
        is_signed=bool(saved["is_signed"]),
        began=float(saved["began"]),
    )


def _steps_of(saved: Mapping[str, Any]) -> Steps:
    return Steps(
        sid=bytes.fromhex(saved["sid"]),
        digests={step: (pair[0], pair[1]) for step, pair in saved["digests"].items()},
        endorsement=bytes.fromhex(saved["endorsement"]),
        devices=int(saved["devices"]),
        entries={int(index): (str(device), bytes.fromhex(keys)) for index, (device, keys) in saved["entries"].items()},
        roster=bytes.fromhex(saved["roster"]),
        boxes={int(index): bytes.fromhex(box) for index, box in saved["boxes"].items()},
        members={step: bytes.fromhex(members) for step, members in saved["members"].items()},
        gave_shares=bool(saved["gave_shares"]),
    )
