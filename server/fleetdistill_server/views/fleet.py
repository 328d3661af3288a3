"""Devices of a run for people: their part in it, one device in detail, and their classes."""

from __future__ import annotations

from fleetdistill.errors import ConfigurationError
from fleetdistill_server.store.records import Ask, Certificate, Participation, ReportedFigure, Upload
from fleetdistill_server.store.states import AskStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.texts import round_or_none, when
from fleetdistill_server.views.progress import state_of
from fleetdistill_server.views.runs import TableRow, View, contract_of, device_rows, event_row

_COUNTED = {"refused": "refusals", "late": "late", "declined": "declined"}
"""Kinds of events that are counted by device, and the names of the columns."""
MAX_ASKS = 5_000
"""Largest number of a device's asks that are shown; the newest are shown."""
MAX_DEVICE_EVENTS = 1_000
_SPLITS = ("train", "test")


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
