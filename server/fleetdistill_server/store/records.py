"""The store's rows as typed records. Each class makes its records from rows in `from_row`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fleetdistill_server.figures import Figure
from fleetdistill_server.store.database import Row
from fleetdistill_server.store.states import AskStatus, RoundStatus, RunStatus, UploadStatus

__all__ = ["Ask", "Round", "Run", "Token", "Traffic", "Upload"]


def read_declared(column: str | None) -> dict[str, Figure]:
    """Returns the figures that a method declares, by name, from the column `figures` of the table `runs`."""
    return {name: Figure(**figure) for name, figure in json.loads(column or "{}").items()}


@dataclass(frozen=True, slots=True)
class Run:
    """A row of the table `runs`, without the complete configuration, which `RunControl.setup` returns.

    Times are in seconds since 1970.

    Attributes:
        name: Name of the run.
        config: The run's settings by section; the run does not start with other settings.
        contract: Serialized `Contract`; empty until the engine has prepared the run.
        figures: Figures that the method declares, by name; empty until the engine has prepared the run.
        status: What the run does.
        reason: Why it has this status; empty without a reason.
        completed_rounds: Number of completed rounds.
        next_round: Number of the round that is opened next.
        checkpoint: SHA-256 of the checkpoint after the last closed round; empty before the first checkpoint.
        engine: Fencing token of the engine that owns the run; None without an engine.
        created_at: Time of the registration.
        paused_at: Time of the pause, until an engine continues the run; None if it is not paused.
        keep_rounds: Number of the newest closed rounds whose payloads are kept.
        kept_from: First round that `runs prune` kept.
        waits_since: Since when the run waits; None if it does not wait.
        waits_for: Number of devices that must be present before the run continues; 0 if it waits for any change of its
            devices, None if it does not wait for devices.
        waits_until: Time before which `min_round_seconds` allows no round; None if the run does not wait for it.
    """

    name: str
    config: dict[str, Any]
    contract: bytes
    figures: Mapping[str, Figure]
    status: RunStatus
    reason: str
    completed_rounds: int
    next_round: int
    checkpoint: bytes
    engine: str | None
    created_at: float
    paused_at: float | None
    keep_rounds: int
    kept_from: int
    waits_since: float | None
    waits_for: int | None
    waits_until: float | None

    @classmethod
    def from_row(cls, row: Row) -> Run:
        """Returns the record of a row that has all columns."""
        return cls(
            name=row["name"],
            config=json.loads(row["config"]),
            contract=row["contract"] or b"",
            figures=read_declared(row["figures"]),
            status=RunStatus(row["status"]),
            reason=row["reason"] or "",
            completed_rounds=row["completed_rounds"],
            next_round=row["next_round"],
            checkpoint=row["checkpoint"] or b"",
            engine=row["engine"],
            created_at=row["created_at"],
            paused_at=row["paused_at"],
            keep_rounds=row["keep_rounds"],
            kept_from=row["kept_from"],
            waits_since=row["waits_since"],
            waits_for=row["waits_for"],
            waits_until=row["waits_until"],
        )

    @property
    def method(self) -> str:
        """Name of the run's method."""
        return str(self.config.get("run", {}).get("method", ""))

    @property
    def max_rounds(self) -> int | None:
        """Number of completed rounds after which the run is finished; None to run until it is stopped."""
        return self.config.get("run", {}).get("rounds") or None


@dataclass(frozen=True, slots=True)
class Device:
    """A row of the table `devices`: a device that has checked in to a run.

    Times are in seconds since 1970.

    Attributes:
        run: Name of the run.
        id: Id of the device.
        secret_hash: SHA-256 of the device's secret.
        profile: Serialized `DeviceProfile` of the last check-in.
        is_present: Whether the device is checked in.
        first_seen: When it first checked in.
        last_seen: When it last called.
        forget_asked_at: When its deletion was requested; None without a request.
        forgotten_at: When the run had forgotten it; None before.
        late_rounds: Number of consecutive rounds in which it missed a deadline.
        left_out_until: Last round that it is left out of; 0 for none.
    """

    run: str
    id: str
    secret_hash: bytes
    profile: bytes
    is_present: bool
    first_seen: float
    last_seen: float
    forget_asked_at: float | None
    forgotten_at: float | None
    late_rounds: int
    left_out_until: int

    @classmethod
    def from_row(cls, row: Row) -> Device:
        """Returns the record of a row that has all columns."""
        return cls(
            run=row["run"],
            id=row["device"],
            secret_hash=row["secret_hash"],
            profile=row["profile"] or b"",
            is_present=bool(row["present"]),
            first_seen=row["first_seen"] or 0.0,
            last_seen=row["last_seen"] or 0.0,
            forget_asked_at=row["forget_asked_at"],
            forgotten_at=row["forgotten_at"],
            late_rounds=row["late_rounds"],
            left_out_until=row["left_out_until"],
        )


@dataclass(frozen=True, slots=True)
class Round:
    """A row of the table `rounds`.

    Times are in seconds since 1970.

    Attributes:
        run: Name of the run.
        number: Number of the round, counted from 1 over all rounds of the run, including short ones.
        status: Whether the round is open, or how it ended.
        reason: Why it was short or undone; empty otherwise.
        cohort: Ids of the devices.
        figures: Figures that the method reported; empty until the round has ended.
        started_at: When it was opened.
        ended_at: When it ended; None while it is open.
        data_versions: Data versions (hex) of the devices that have one, by id; empty after the end.
    """

    run: str
    number: int
    status: RoundStatus
    reason: str
    cohort: Sequence[str]
    figures: Mapping[str, Any]
    started_at: float
    ended_at: float | None
    data_versions: Mapping[str, str]

    @classmethod
    def from_row(cls, row: Row) -> Round:
        """Returns the record of a row that has all columns."""
        return cls(
            run=row["run"],
            number=row["round"],
            status=RoundStatus(row["status"]),
            reason=row["reason"] or "",
            cohort=json.loads(row["cohort"]),
            figures=json.loads(row["figures"] or "{}"),
            started_at=row["started_at"],
            ended_at=row["ended_at"],
            data_versions=json.loads(row["data_versions"] or "{}"),
        )

    @property
    def seconds(self) -> float | None:
        """Duration in seconds; None while the round is open."""
        return None if self.ended_at is None else self.ended_at - self.started_at


class AnswerCounts(NamedTuple):
    """How many answers to a round are in a result, how many were reported as in none, and how many were accepted."""

    used: int
    reported: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A state that a run can be rolled back to.

    Attributes:
        round: Number of the round after which it is the state; 0 before the first one.
        completed_rounds: Number of completed rounds.
        sha256: SHA-256 of the state.
        at: When it was stored, in seconds since 1970.
    """

    round: int
    completed_rounds: int
    sha256: bytes
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A row of the table `asks`: what a step of a round asks of one device.

    Times are in seconds since 1970; those of what happened to the ask are None until it happens, or if not known.

    Attributes:
        run: Name of the run.
        round: Number of the round.
        step_number: Number of the step in the round, counted from 1.
        device: Id of the device.
        step: Name of the step.
        expects: Parts of a valid answer: kind by part name.
        deadline_at: When the ask is closed.
        payload: SHA-256 of the payload; empty for an ask without a payload.
        payload_bytes: Size of the payload's data in bytes.
        seed: Seed of the device's work.
        id: Id in the store; 0 for an ask that the store does not have yet.
        status: Whether the ask waits for an answer, has one, or is out of the round.
        reason: Why the ask is out; empty for other asks.
        asked_at: When the ask was stored.
        sent_at: When the ask was sent to the device.
        download_at: When the download of the payload began.
        downloaded_at: When the download of the payload ended.
        upload_at: When the upload of the answer began.
    """

    run: str
    round: int
    step_number: int
    device: str
    step: str
    expects: Mapping[str, str]
    deadline_at: float
    payload: bytes = b""
    payload_bytes: int = 0
    seed: int = 0
    id: int = 0
    status: AskStatus = AskStatus.OPEN
    reason: str = ""
    asked_at: float | None = None
    sent_at: float | None = None
    download_at: float | None = None
    downloaded_at: float | None = None
    upload_at: float | None = None

    @classmethod
    def from_row(cls, row: Row) -> Ask:
        """Returns the record of a row that has all columns."""
        return cls(
            run=row["run"],
            round=row["round"],
            step_number=row["step_number"],
            device=row["device"],
            step=row["step"],
            expects=json.loads(row["expects"]),
            payload=row["payload"] or b"",
            payload_bytes=row["payload_bytes"] or 0,
            seed=row["seed"] or 0,
            deadline_at=row["deadline_at"],
            id=row["id"],
            status=AskStatus(row["status"]),
            reason=row["reason"] or "",
            asked_at=row["asked_at"],
            sent_at=row["sent_at"],
            download_at=row["download_at"],
            downloaded_at=row["downloaded_at"],
            upload_at=row["upload_at"],
        )


@dataclass(frozen=True, slots=True)
class Work:
    """What a run has for one of its devices.

    Attributes:
        status: What the run does.
        reason: Why it has this status; empty without a reason.
        completed_rounds: Number of completed rounds.
        ask: Oldest open ask of the device; None without one.
        lost_attempt: Highest attempt among the ask's answers whose payload is missing or damaged; 0 if none.
    """

    status: RunStatus
    reason: str
    completed_rounds: int
    ask: Ask | None
    lost_attempt: int

    @classmethod
    def from_row(cls, row: Row) -> Work:
        """Returns the record of a row with all columns of the ask, or None for each of them."""
        return cls(
            status=RunStatus(row["run_status"]),
            reason=row["run_reason"] or "",
            completed_rounds=row["completed_rounds"],
            ask=None if row["id"] is None else Ask.from_row(row),
            lost_attempt=row["lost_attempt"] or 0,
        )


_OF_UPLOAD = (
    "receipt",
    "ask",
    "attempt",
    "sha256",
    "data_bytes",
    "samples",
    "received_at",
    "status",
    "reason",
    "quarantined_at",
)
UPLOAD_COLUMNS = ", ".join(f"u.{column} AS upload_{column}" for column in _OF_UPLOAD)
"""Columns of `uploads u` for `Upload.from_row`, which also needs `ASK_COLUMNS`, or all columns of `asks a`."""
ASK_COLUMNS = "a.round, a.step, a.step_number, a.device"


@dataclass(frozen=True, slots=True)
class Upload:
    """A row of the table `uploads`: an accepted answer, and which ask it answers.

    Times are in seconds since 1970.

    Attributes:
        round: Number of the ask's round.
        step: Name of the ask's step.
        step_number: Number of the ask's step in the round.
        device: Id of the device.
        receipt: Id of the receipt.
        ask: Id of the ask.
        attempt: Number of the device's attempt.
        sha256: SHA-256 of the payload.
        data_bytes: Size of the payload's data in bytes.
        samples: Number of samples behind the answer.
        received_at: When it was accepted.
        status: What became of it.
        reason: Why it is in no result; empty otherwise.
        quarantined_at: When its payload was found missing or damaged; None for a valid answer.
    """

    round: int
    step: str
    step_number: int
    device: str
    receipt: str
    ask: int
    attempt: int
    sha256: bytes
    data_bytes: int
    samples: int
    received_at: float
    status: UploadStatus
    reason: str
    quarantined_at: float | None

    @classmethod
    def from_row(cls, row: Row) -> Upload:
        """Returns the record of a row with the columns of `UPLOAD_COLUMNS` and of the ask."""
        return cls(
            round=row["round"],
            step=row["step"],
            step_number=row["step_number"],
            device=row["device"],
            receipt=row["upload_receipt"],
            ask=row["upload_ask"],
            attempt=row["upload_attempt"],
            sha256=row["upload_sha256"],
            data_bytes=row["upload_data_bytes"] or 0,
            samples=row["upload_samples"] or 0,
            received_at=row["upload_received_at"],
            status=UploadStatus(row["upload_status"]),
            reason=row["upload_reason"] or "",
            quarantined_at=row["upload_quarantined_at"],
        )


@dataclass(frozen=True, slots=True)
class Accepted:
    """An ask's accepted answer, at the end of an upload.

    Attributes:
        upload: The answer.
        is_new: Whether it was stored now; otherwise it is an earlier one.
        deletions: Count of deletions when it was stored; 0 for an earlier one.
    """

    upload: Upload
    is_new: bool
    deletions: int = 0


def ask_and_upload(row: Row) -> tuple[Ask, Upload | None]:
    """Returns the records of a row of an ask that is joined with its answer, if it has one."""
    return Ask.from_row(row), None if row["upload_receipt"] is None else Upload.from_row(row)


@dataclass(frozen=True, slots=True)
class Event:
    """A row of the table `events`: what happened in a run, for its operator.

    Attributes:
        id: Id in the store; later events have larger ones.
        run: Name of the run.
        round: Number of the round that it is about; 0 for none.
        device: Id of the device that it is about; empty for none.
        kind: Kind of the event.
        code: Code of a refusal; empty for other events.
        text: What happened.
        at: When it was stored, in seconds since 1970.
    """

    id: int
    run: str
    round: int
    device: str
    kind: str
    code: str
    text: str
    at: float

    @classmethod
    def from_row(cls, row: Row) -> Event:
        """Returns the record of a row that has all columns."""
        return cls(
            id=row["id"],
            run=row["run"],
            round=row["round"] or 0,
            device=row["device"] or "",
            kind=row["kind"],
            code=row["code"] or "",
            text=row["text"],
            at=row["at"] or 0.0,
        )


@dataclass(frozen=True, slots=True)
class ReportedFigure:
    """A row of the table `figures`: what a device reported about one figure in one round.

    Attributes:
        run: Name of the run.
        round: Number of the round.
        device: Id of the device.
        name: Name of the figure, such as `accuracy`; `VARIANT/NAME` for a further variant of the model.
        split: Data that the figure is about: `train`, `validation` or `test`.
        sum: Sum over the samples.
        count: Number of samples.
        by_class: Sum and number of samples by class; empty if the device did not report them.
    """

    run: str
    round: int
    device: str
    name: str
    split: str
    sum: float
    count: int
    by_class: Mapping[str, tuple[float, int]]

    @property
    def mean(self) -> float | None:
        """Mean over the samples; None without samples."""
        return self.sum / self.count if self.count else None

    @classmethod
    def from_row(cls, row: Row) -> ReportedFigure:
        """Returns the record of a row that has all columns."""
        by_class = {label: (total, count) for label, (total, count) in json.loads(row["by_class"] or "{}").items()}
        return cls(**{**row, "by_class": by_class})


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes between the server and one device in one round and direction: a row of the table `traffic`, or their sum.

    Attributes:
        round: Number of the round; 0 for what was sent before the first round.
        device: Id of the device.
        direction: `up` from the device, `down` to it.
        kind: Kind of part, `envelope` for headers; empty for the sum over all kinds.
        payloads: Number of payloads.
        tensor_bytes: Bytes of tensors before compression.
        envelope_bytes: Bytes of headers before compression.
        sent_bytes: Bytes on the link.
    """

    round: int
    device: str
    direction: str
    kind: str
    payloads: int
    tensor_bytes: int
    envelope_bytes: int
    sent_bytes: int

    @property
    def uncompressed_bytes(self) -> int:
        """Bytes of tensors and headers before compression."""
        return self.tensor_bytes + self.envelope_bytes

    @classmethod
    def from_row(cls, row: Row) -> Traffic:
        """Returns the record of a row, with any further columns left out."""
        return cls(
            round=row["round"],
            device=row["device"],
            direction=row["direction"],
            kind=row["kind"],
            payloads=int(row["payloads"]),
            tensor_bytes=int(row["tensor_bytes"]),
            envelope_bytes=int(row["envelope_bytes"]),
            sent_bytes=int(row["sent_bytes"]),
        )


@dataclass(frozen=True, slots=True)
class Participation:
    """The part of one device in a run.

    Attributes:
        device: Id of the device.
        rounds: Number of rounds that asked it.
        asks: Number of its asks.
        answers: Number of asks that it answered.
        out: Number of asks that ended without an answer.
        last_answer: Round of its last answer; None before the first.
    """

    device: str
    rounds: int
    asks: int
    answers: int
    out: int
    last_answer: int | None


@dataclass(frozen=True, slots=True)
class Replacements:
    """How often deliveries replaced the models of apps that have validation data.

    Attributes:
        replaced: Number of deliveries whose model the app took.
        kept: Number of deliveries after which the app kept its model.
    """

    replaced: int
    kept: int


@dataclass(frozen=True, slots=True)
class Token:
    """A row of the table `tokens`: an enrolment token, without its secret.

    Times are in seconds since 1970.

    Attributes:
        hash: SHA-256 of the secret.
        run: Run that the device is restricted to; empty for all runs.
        for_device: Device id that the token is valid for; empty for any device.
        created_at: When it was created.
        expires_at: When it expires.
        is_revoked: Whether it was revoked before its use.
        device: Id of the device that used it; None before its use.
        serial: Serial number in hex of the certificate issued for it; None before its use.
    """

    hash: bytes
    run: str
    for_device: str
    created_at: float
    expires_at: float
    is_revoked: bool
    device: str | None
    serial: str | None

    @classmethod
    def from_row(cls, row: Row) -> Token:
        """Returns the record of a row that has all columns."""
        return cls(
            hash=row["hash"],
            run=row["run"],
            for_device=row["for_device"],
            created_at=row["created_at"] or 0.0,
            expires_at=row["expires_at"],
            is_revoked=bool(row["revoked"]),
            device=row["device"],
            serial=row["serial"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """A row of the table `certificates`: a certificate of a device.

    Times are in seconds since 1970.

    Attributes:
        serial: Serial number in hex.
        device: Id of the device.
        run: Run that the device is restricted to; empty for all runs.
        public_key: SHA-256 of the device's SubjectPublicKeyInfo.
        pem: The certificate in PEM.
        issued_at: When it was issued.
        expires_at: When it expires.
    """

    serial: str
    device: str
    run: str
    public_key: bytes
    pem: bytes
    issued_at: float
    expires_at: float

    @classmethod
    def from_row(cls, row: Row) -> Certificate:
        """Returns the record of a row that has all columns."""
        return cls(
            serial=row["serial"],
            device=row["device"],
            run=row["run"] or "",
            public_key=row["public_key"],
            pem=row["pem"],
            issued_at=row["issued_at"] or 0.0,
            expires_at=row["expires_at"],
        )


@dataclass(frozen=True, slots=True)
class Revocation:
    """A row of the table `revocations`.

    Attributes:
        subject: What is revoked: `device:ID`, `operator:NAME`, `viewer:NAME` or `serial:HEX`.
        reason: Why; empty without a reason.
        at: When it was revoked, in seconds since 1970.
    """

    subject: str
    reason: str
    at: float

    @classmethod
    def from_row(cls, row: Row) -> Revocation:
        """Returns the record of a row that has all columns."""
        return cls(subject=row["subject"], reason=row["reason"] or "", at=row["at"])


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """A row of the table `operator_calls`: a call that changed something or was refused.

    Attributes:
        id: Id in the store; later calls have larger ones.
        at: When it was stored, in seconds since 1970.
        role: Role in the caller's certificate; `local` for a command on the store's machine.
        name: Name of the caller.
        call: Name of the method, such as RevokeDevice.
        arguments: Arguments as JSON, which is cut if they are too long.
        address: Network address of the caller; `local` for a command.
        result: The result in words; `begun` while the call is carried out.
        is_refused: Whether the call was refused.
    """

    id: int
    at: float
    role: str
    name: str
    call: str
    arguments: str
    address: str
    result: str
    is_refused: bool

    @classmethod
    def from_row(cls, row: Row) -> OperatorCall:
        """Returns the record of a row that has all columns."""
        return cls(
            id=row["id"],
            at=row["at"],
            role=row["role"],
            name=row["name"],
            call=row["call"],
            arguments=row["arguments"],
            address=row["address"],
            result=row["result"],
            is_refused=bool(row["refused"]),
        )
