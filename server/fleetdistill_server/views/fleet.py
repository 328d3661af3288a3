"""Devices of a run for people: their part in it, their states in a round, one device in detail, and their classes."""

from __future__ import annotations

from fleetdistill.errors import ConfigurationError
from fleetdistill_server.store.records import Ask, Certificate, Participation, ReportedFigure, Upload
from fleetdistill_server.store.states import DEADLINE_PASSED, AskStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.texts import round_or_none, when
from fleetdistill_server.views.runs import TableRow, View, contract_of, device_rows, event_row

_COUNTED = {"refused": "refusals", "late": "late", "declined": "declined"}
"""Kinds of events that are counted by device, and the names of the columns."""
MAX_ASKS = 5_000
"""Largest number of a device's asks that are shown; the newest are shown."""
MAX_DEVICE_EVENTS = 1_000
_SPLITS = ("train", "test")
ACKNOWLEDGED, OUT = "acknowledged", "out"
"""States of a device that has answered, and of one that is out of the round for no more special reason."""
_LEFT = ("device left", "device not present", "device revoked", "device to be forgotten", "lease ended")
"""Reasons stored for asks of devices that are gone."""


def participants(store: Store, run: str, only: str | None = None, *, served: bool = True) -> View:
    """Returns the devices of a run with their rounds, answers, refusals and certificates, ordered by id.

    See `device_rows` for `served`.

    Raises:
        ConfigurationError: The run does not exist.
    """
    store.runs.existing(run)
    parts = {part.device: part for part in store.summaries.participation(run, only)}
    events = store.summaries.events_of_devices(run, list(_COUNTED))
    ends = store.summaries.certificate_ends()
    return View(
        {
            "devices": [
                {
                    **row,
                    **_part_row(parts.get(row["device"])),
                    **{name: events.get(row["device"], {}).get(kind, 0) for kind, name in _COUNTED.items()},
                    "certificate_expires": when(ends[row["device"]]) if row["device"] in ends else None,
                }
                for row in device_rows(store, run, only, served=served)
            ]
        }
    )


def device(store: Store, run: str, name: str, *, served: bool = True) -> View:
    """Returns one device in detail: its asks with their answers, its figures by round, its events and certificates.

    Raises:
        ConfigurationError: The run does not exist, or the device is not one of its devices.
    """
    result = participants(store, run, name, served=served).lists["devices"]
    if not result:
        raise ConfigurationError(f"run {run!r} has no device {name[:64]!r}; `fleetdistill devices` lists them")
    asks = store.summaries.asks_of_device(run, name, MAX_ASKS)
    answered = {ask.round for ask, _ in asks if ask.status is AskStatus.ANSWERED}
    reported = [figure for figure in store.summaries.figures_of_device(run, name) if figure.round in answered]
    events = store.summaries.events(run, before=None, device=name, most=MAX_DEVICE_EVENTS)[::-1]
    certificates = store.credentials.certificates(name)
    return View(
        {
            "asks": [_ask_row(ask, upload) for ask, upload in asks],
            "figures": [_figure_row(figure) for figure in reported],
            "events": [event_row(event) for event in events],
            "certificates": [_certificate_row(certificate) for certificate in certificates],
        },
        result[0],
    )


def classes(store: Store, run: str) -> View:
    """Returns the number of samples by class of each device whose app allows `counts`, from its last answered round.

    The counts are those of the training data if the device reported them, else those of its test data.

    Raises:
        ConfigurationError: The run does not exist.
    """
    labels = list(contract_of(store.runs.existing(run)).classes)
    rows = []
    for part in store.summaries.participation(run):
        counted = _counts(store, run, part)
        if counted is not None:
            rows.append({"device": part.device, **counted})
    return View({"devices": rows}, {"run": run, "classes": labels})


def _part_row(part: Participation | None) -> TableRow:
    if part is None:
        return {"rounds": 0, "asks": 0, "answers": 0, "out": 0, "last_answer": None}
    return {
        "rounds": part.rounds,
        "asks": part.asks,
        "answers": part.answers,
        "out": part.out,
        "last_answer": part.last_answer,
    }


def _counts(store: Store, run: str, part: Participation) -> TableRow | None:
    if part.last_answer is None:
        return None
    figures = store.summaries.figures_of(run, part.last_answer, part.device)
    by_split = {figure.split: figure.by_class for figure in figures if figure.name == "accuracy"}
    for split in _SPLITS:
        if by_class := by_split.get(split):
            return {"split": split, "counts": {label: count for label, (_, count) in by_class.items()}}
    return None


def _figure_row(figure: ReportedFigure) -> TableRow:
    return {
        "round": figure.round,
        "name": figure.name,
        "split": figure.split,
        "mean": round_or_none(figure.mean, 4),
        "count": figure.count,
    }


def _ask_row(ask: Ask, upload: Upload | None) -> TableRow:
    if upload is None:
        return {**state_of(ask, None), "upload": None, "bytes": None, "not_used_because": ""}
    used = {"upload": upload.status, "bytes": upload.data_bytes, "not_used_because": upload.reason}
    return {**state_of(ask, upload), **used}


def _certificate_row(certificate: Certificate) -> TableRow:
    issued = when(certificate.issued_at) if certificate.issued_at else None
    times = {"issued": issued, "expires": when(certificate.expires_at)}
    return {"serial": certificate.serial, "run": certificate.run, **times}


def round_progress(store: Store, run: str, number: int | None = None) -> View:
    """Returns the asks of a round and their devices' states, with times in seconds since 1970, by step and device.

    Open asks of other rounds, which occur with buffered rounds, are included. While the fact `paused_at` is not None,
    deadlines stand still: they move by the time of the pause once an engine works on the run again.

    Args:
        store: Store that contains the run.
        run: Name of the run.
        number: Number of the round; None for the open round, or the newest one if none is open.

    Raises:
        ConfigurationError: The run does not exist.
    """
    paused_at = store.runs.existing(run).paused_at
    if number is None:
        number = store.runs.open_number(run) or store.summaries.last_round(run)
    facts = dict.fromkeys(("round", "status", "started_at", "ended_at"))
    for shown, _ in store.summaries.rounds(run, number, number):
        facts = {
            "round": shown.number,
            "status": shown.status,
            "started_at": shown.started_at,
            "ended_at": shown.ended_at,
        }
    asks = [state_of(ask, upload) for ask, upload in store.summaries.asks_of_round(run, number)]
    return View({"asks": asks}, {**facts, "paused_at": paused_at})


def state_of(ask: Ask, upload: Upload | None) -> TableRow:
    """Returns the state of an ask: device, round, step, state, reason, and what happened when."""
    return {
        "round": ask.round,
        "step_number": ask.step_number,
        "step": ask.step,
        "device": ask.device,
        "state": _state(ask),
        "reason": ask.reason,
        "asked_at": ask.asked_at,
        "sent_at": ask.sent_at,
        "download_at": ask.download_at,
        "downloaded_at": ask.downloaded_at,
        "upload_at": ask.upload_at,
        "acknowledged_at": None if upload is None else upload.received_at,
        "deadline_at": ask.deadline_at,
    }


def _state(ask: Ask) -> str:
    if ask.status is AskStatus.ANSWERED:
        return ACKNOWLEDGED
    return _open_state(ask) if ask.status is AskStatus.OPEN else _out_state(ask.reason)


def _open_state(ask: Ask) -> str:
    if ask.upload_at is not None:
        return "uploading"
    if ask.downloaded_at is not None:
        return "training"
    if ask.download_at is not None:
        return "downloading"
    return "training" if ask.sent_at is not None and not ask.payload else "asked"


def _out_state(reason: str) -> str:
    if reason == DEADLINE_PASSED:
        return "late"
    if reason in _LEFT:
        return "left"
    if reason.startswith("refused: "):
        return "refused"
    return "declined" if reason == "declined" else OUT
