"""Devices of a run for people: their part in it, one device in detail, and their classes."""

from __future__ import annotations

import json
from collections import defaultdict

from fleetdistill.errors import ConfigurationError
from fleetdistill_server.store.database import Row
from fleetdistill_server.store.records import Ask, Certificate, Upload
from fleetdistill_server.store.states import AskStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.texts import when
from fleetdistill_server.views.progress import state_of
from fleetdistill_server.views.runs import View, contract_of, device_rows, event_row, rate

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
    part = {row["device"]: row for row in store.summaries.participation(run, only)}
    events: defaultdict[str, Row] = defaultdict(lambda: dict.fromkeys(_COUNTED.values(), 0))
    for row in store.summaries.counted_events(run, list(_COUNTED)):
        events[row["device"]][_COUNTED[row["kind"]]] = row["count"]
    ends = store.summaries.certificate_ends()
    names = ("rounds", "asks", "answers", "out", "last_answer")
    return View(
        {
            "devices": [
                {
                    **row,
                    **{name: part.get(row["device"], {}).get(name, None if name == names[-1] else 0) for name in names},
                    **events[row["device"]],
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
    found = participants(store, run, name, served=served).lists["devices"]
    if not found:
        raise ConfigurationError(f"run {run!r} has no device {name[:64]!r}; `fleetdistill devices` lists them")
    asks = store.summaries.asks_of_device(run, name, MAX_ASKS)
    answered = {ask.round for ask, _ in asks if ask.status is AskStatus.ANSWERED}
    reported = [row for row in store.summaries.figures_of_device(run, name) if row["round"] in answered]
    events = store.summaries.events(run, before=None, device=name, most=MAX_DEVICE_EVENTS)[::-1]
    certificates = store.credentials.certificates(name)
    return View(
        {
            "asks": [_ask_row(ask, upload) for ask, upload in asks],
            "figures": [_figure_row(row) for row in reported],
            "events": [event_row(event) for event in events],
            "certificates": [_certificate_row(certificate) for certificate in certificates],
        },
        found[0],
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
            rows.append({"device": part["device"], **counted})
    return View({"devices": rows}, {"run": run, "classes": labels})


def _counts(store: Store, run: str, part: Row) -> Row | None:
    if part["last_answer"] is None:
        return None
    figures = store.summaries.figures_of(run, part["last_answer"], part["device"])
    found = {row["split"]: row for row in figures if row["name"] == "accuracy"}
    for split in _SPLITS:
        counts = json.loads(found[split]["by_class"] or "{}") if split in found else {}
        if counts:
            return {"split": split, "counts": {label: count for label, (_, count) in counts.items()}}
    return None


def _figure_row(row: Row) -> Row:
    return {"round": row["round"], "name": row["name"], "split": row["split"], "mean": rate(row), "count": row["count"]}


def _ask_row(ask: Ask, upload: Upload | None) -> Row:
    if upload is None:
        return {**state_of(ask, None), "upload": None, "bytes": None, "not_used_because": ""}
    used = {"upload": upload.status, "bytes": upload.data_bytes, "not_used_because": upload.reason}
    return {**state_of(ask, upload), **used}


def _certificate_row(certificate: Certificate) -> Row:
    issued = when(certificate.issued_at) if certificate.issued_at else None
    times = {"issued": issued, "expires": when(certificate.expires_at)}
    return {"serial": certificate.serial, "run": certificate.run, **times}
