"""Views of runs and devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import GENERAL
from fleetdistill.methods import config_class
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.event_kinds import LARGE_DEVICE, LEFT_OUT, MOST_OF_THE_WEIGHT
from fleetdistill_server.figures import sums_of
from fleetdistill_server.security.certificates import Role
from fleetdistill_server.service.served import NOT_SERVED, Served, state_of
from fleetdistill_server.store.records import Device, Event, Replacements, ReportedFigure, Run, Upload
from fleetdistill_server.store.run_figures import RoundFigures, round_figures
from fleetdistill_server.store.states import ACTIVE, IDLE, QUEUED, WAITING, RunStatus, UploadStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.store.sums import EVERY
from fleetdistill_server.texts import counted, round_or_none, to_json, when
from fleetdistill_server.views.expected import Expected, expected, of_the_fleet

__all__ = ["NO_SERVER", "UNTIL_STOPPED", "TableRow", "View", "named"]
NO_SERVER = "no server"
"""What follows the status of an active run that no server works on."""
UNTIL_STOPPED = "until stopped"
"""Text shown for a run without a number of rounds."""
_FURTHER = "/accuracy"
"""Suffix of the accuracy figures of further variants; the variant's name precedes it."""
MAX_EVENTS = 1000
"""Largest number of events shown for a run; the newest are shown."""
_MAX_ANSWERS = 4
"""Largest number of further variants shown, because devices choose the names of their figures."""
TableRow = dict[str, Any]
"""A row of a view's table: plain values by column, as JSON has them."""


@dataclass(frozen=True)
class View:
    """Named lists of rows, with `facts` shown above the tables.

    Attributes:
        lists: Rows of plain values, by title.
        facts: Values by name.
    """

    lists: dict[str, list[TableRow]]
    facts: dict[str, Any] = field(default_factory=dict)

    def json(self) -> str:
        """Returns the view as JSON: an object, or an array if the view consists of a single list."""
        value: Any = {**self.facts, **self.lists}
        if not self.facts and len(self.lists) == 1:
            value = next(iter(self.lists.values()))
        return to_json(value, indent=1)


def runs(store: Store, served: Served = NOT_SERVED, *, present: bool = True) -> View:
    """Returns a view of all runs; see `run_row`."""
    return View({"runs": [run_row(store, item, served, present=present) for item in store.runs.all()]})


def run(store: Store, name: str, served: Served = NOT_SERVED, *, present: bool = True) -> View:
    """Returns a view of one run: its rounds, accuracies, traffic and events.

    Args:
        store: Store that contains the run.
        name: Name of the run.
        served: What a server currently works on.
        present: Whether devices can be present, as `may_be_present`.

    Raises:
        ConfigurationError: The run does not exist.
    """
    shown = store.runs.existing(name)
    expectations = expected(store, name)
    figures = round_figures(store.database, name)
    sums = [row for figure in figures for row in secure_sum_rows(store, name, figure)]
    lists = {
        "rounds": round_rows(store, shown, figures),
        **({"secure_sums": sums} if sums else {}),
        **_answers(store, name),
        **_leave_one_out(expectations),
        "bytes": store.summaries.bytes_of_devices(name),
        "bytes_by_kind": bytes_by_kind(store, name),
        "reported_uploads": [_reported_row(upload) for upload in store.summaries.reported_uploads(name)],
        "events": [event_row(event) for event in store.history.newest_events(name, MAX_EVENTS)],
    }
    totals = {
        "events_in_all": store.history.count_events(name),
        "checkpoints_after_rounds": [one.round for one in store.runs.checkpoints(name) if store.blobs.has(one.sha256)],
        "guards_fired": sum(store.summaries.guards(name, 0, EVERY).values()),
        "models_replaced": sum(figure.replaced or 0 for figure in figures),
        "models_kept": sum(figure.kept or 0 for figure in figures),
        **_expected_of_the_fleet(expectations),
    }
    facts = {**run_row(store, shown, served, present=present), **_end(store, shown), **totals, **_privacy(shown)}
    return View(lists, facts)


def round_rows(store: Store, run: Run, figures: Sequence[RoundFigures]) -> list[TableRow]:
    """Returns rounds as rows with equal names: those of every run, and of the figures that the run's method declares.

    `kept` and `replaced` are None if no app has validation data.
    """
    suspects = suspects_by_round(store, run.name)
    return [
        {
            "round": figure.round.number,
            "status": f"{figure.round.status}: {figure.round.reason}"
            if figure.round.reason
            else str(figure.round.status),
            "cohort": len(figure.round.cohort),
            "used": figure.answers.used,
            "reported": figure.answers.reported,
            "guards": figure.guards,
            "kept": figure.kept,
            "replaced": figure.replaced,
            "seconds": round_or_none(figure.round.seconds, 2),
            "train_loss": round_or_none(figure.train_loss, 4),
            "test_accuracy": round_or_none(figure.test_accuracy, 4),
            **{name: round_or_none(value, run.figures[name].digits) for name, value in figure.method.items()},
            "global_accuracy": round_or_none(figure.global_accuracy, 4),
            "suspects": ", ".join(suspects.get(figure.round.number, ())),
            "bytes_up": figure.bytes_up,
            "bytes_down": figure.bytes_down,
        }
        for figure in figures
    ]


def secure_sum_rows(store: Store, run: str, figure: RoundFigures) -> list[TableRow]:
    """Returns the secure sums of a round as rows; numbers of devices are None for steps that a sum did not reach.

    `sum` is the number of a sum of several in its round.
    """
    sums = sums_of(figure.round.figures)
    sent = store.summaries.bytes_of_sums(run, figure.round.number) if sums else []
    return [
        {
            "round": figure.round.number,
            "sum": number if len(sums) > 1 else None,
            "status": f"failed: {one.failure}" if one.failure else "made",
            "asked": one.asked,
            "keys": one.keys,
            "boxes": one.boxes,
            "inputs": one.inputs,
            "signatures": one.signatures,
            "shares": one.shares,
            "min_devices": one.min_devices,
            "threshold": one.threshold,
            "noise_shares": one.noise_shares,
            "dropped": one.dropped_text,
            "seconds": round(one.seconds, 2),
            "bytes_up": up,
            "bytes_down": down,
            "sid": one.sid,
            "roster": one.roster,
        }
        for (number, one), (up, down) in zip(sorted(sums.items()), sent, strict=False)
    ]


def bytes_by_kind(store: Store, run: str) -> list[TableRow]:
    """Returns the byte counts by kind of part, over all devices and rounds."""
    return sorted(bytes_by(store, run, ("kind",)), key=lambda row: str(row["kind"]))


def bytes_by(store: Store, run: str, columns: tuple[str, ...], first: int = 0) -> list[TableRow]:
    """Returns byte counts from round `first` on by columns, headers being of the kind `envelope`."""
    counts = store.summaries.bytes(run, columns, first, EVERY)
    return [{name: value for name, value in row.items() if name != "envelope_bytes"} for row in counts]


def devices(store: Store, only: str | None, *, served: bool = True) -> View:
    """Returns a view of the devices of one run, or of all runs if `only` is None; see `device_rows`."""
    names = store.runs.names() if only is None else [store.runs.existing(only).name]
    return View({"devices": [row for name in names for row in device_rows(store, name, served=served)]})


def device_rows(store: Store, run: str, only: str | None = None, *, served: bool = True) -> list[TableRow]:
    """Returns the rows of a run's devices, ordered by id; only of one device if `only` is given.

    Without a server (`served`) no device is present, whatever one that was killed has left in the store.
    """
    newest = store.history.newest_figures(run, "accuracy", "test", only)
    reported = _Reported(
        store.summaries.replacements_of_devices(run, only),
        {figure.device: figure for figure in newest if figure.name == "accuracy"},
        expected(store, run, only),
    )
    revoked = {revocation.subject for revocation in store.credentials.revocations()}
    shown = [device for device in store.devices.all(run) if only in (None, device.id)]
    return [_device_row(device, reported, revoked, served=served) for device in shown]


def contract_of(run: Run) -> contract_pb2.Contract:
    """Returns a run's contract; an empty one until the engine has prepared the run."""
    return contract_pb2.Contract.FromString(run.contract)


def run_row(store: Store, run: Run, served: Served, *, present: bool = True) -> TableRow:
    """Returns the summary of a run: `devices` have ever checked in, and `present` are checked in now."""
    state = state_of(run, served) if served.includes(run.name) else ""
    waits = ""
    if state == WAITING and run.waits_for:
        waits = _needs(run.waits_for)
    elif state == IDLE and run.waits_until is not None:
        waits = f"the next round starts at {when(run.waits_until)}, because of min_round_seconds"
    return {
        "run": run.name,
        "method": run.method,
        "status": shown_status(run, served),
        "reason": _reason(run) or waits,
        "completed_rounds": run.completed_rounds,
        "wanted_rounds": run.max_rounds,
        "present": len(store.devices.present(run.name)) if present else 0,
        "devices": store.devices.count(run.name),
        "created": when(run.created_at),
    }


def _reason(run: Run) -> str:
    """Returns a run's reason; of one that has more rounds to go, with the command that continues it."""
    has_more = run.max_rounds is None or run.completed_rounds < run.max_rounds
    if run.status not in (RunStatus.PAUSED, RunStatus.STOPPED) or not has_more or "`fleetdistill " in run.reason:
        return run.reason
    return "; ".join(filter(None, [run.reason, f"to continue: `fleetdistill runs start {run.name}`"]))


def shown_status(run: Run, served: Served) -> str:
    """Returns a run's status, with what keeps its engine from working, such as `queued (1 of 2)`."""
    name = run.name
    state = state_of(run, served)
    if state == QUEUED:
        return f"{state} ({served.queued.index(name) + 1} of {len(served.queued)})"
    if run.status not in ACTIVE:
        return state
    idle = "engine hangs" if name in served.hanging else "" if served.includes(name) else NO_SERVER
    return f"{state} ({idle})" if idle else state


def _end(store: Store, run: Run) -> TableRow:
    """Returns when a finished run ended, with its last round; nothing for other runs."""
    if run.status is not RunStatus.FINISHED:
        return {}
    times = store.summaries.times_of_rounds(run.name, store.summaries.last_round(run.name) - 1)
    ended = [at for _, at in times.values() if at is not None]
    return {"ended": when(ended[-1])} if ended else {}


def _privacy(run: Run) -> TableRow:
    """Returns the meaning of a private run's epsilon; nothing for other runs."""
    try:
        guarantee = config_class(run.method).from_settings(run.config.get("method", {})).guarantee
    except ConfigurationError:  # a method that this process does not know
        return {}
    return {} if guarantee is None else {"privacy": guarantee.sentence}


@dataclass(frozen=True)
class _Reported:
    """What the devices of a run reported: model replacements, newest test accuracy, and leave-one-out, by device."""

    replacements: Mapping[str, Replacements]
    test_accuracy: Mapping[str, ReportedFigure]
    expected: Mapping[str, Expected]


def _answers(store: Store, run: str) -> dict[str, list[TableRow]]:
    """Returns each device's newest test accuracy by variant, if devices report several variants.

    The method defines the names of the further variants.
    """
    reported = defaultdict[str, list[ReportedFigure]](list)
    for figure in store.history.newest_figures(run, "accuracy", "test"):
        reported[figure.name].append(figure)
    taken = (GENERAL + _FURTHER, "device" + _FURTHER)  # names of other columns
    further = [name for name in reported if name != "accuracy" and name not in taken]
    if not further:
        return {}
    # Variants reported by the most devices come first.
    usual = sorted(further, key=lambda name: -len(reported[name]))[:_MAX_ANSWERS]
    named = {name.removesuffix(_FURTHER): reported[name] for name in sorted(usual)}
    answers = {GENERAL: reported["accuracy"], **named}
    rows: dict[str, TableRow] = {}
    for answer, newest in answers.items():
        for figure in newest:
            row = rows.setdefault(figure.device, {"device": figure.device, **dict.fromkeys(answers)})
            row[answer] = round_or_none(figure.mean, 4)
    return {"test_accuracy_of_answers": [rows[device] for device in sorted(rows)]}


def _leave_one_out(expectations: Mapping[str, Expected]) -> dict[str, list[TableRow]]:
    """Returns each device's expected accuracy on unseen data like its own, if devices report it."""
    rows = [
        {
            "device": device,
            **{answer: round(rate, 4) for answer, rate in one.rates.items()},
            "own_statistics_kept": one.own_statistics_kept,
        }
        for device, one in expectations.items()
    ]
    return {"leave_one_out": rows} if rows else {}


def _expected_of_the_fleet(expectations: Mapping[str, Expected]) -> TableRow:
    """Returns the expected accuracy over the samples of all devices."""
    rates = of_the_fleet(expectations.values()) or {}
    return {f"leave_one_out_{answer}": round(rate, 4) for answer, rate in rates.items()}


def _reported_row(upload: Upload) -> TableRow:
    return {
        "round": upload.round,
        "step": upload.step,
        "device": upload.device,
        "receipt": upload.receipt,
        "reason": upload.reason,
    }


def event_row(event: Event) -> TableRow:
    """Returns an event as a row; `round` is None for an event of the run."""
    return {
        "round": event.round or None,
        "device": event.device,
        "kind": event.kind,
        "code": event.code,
        "text": event.text,
        "at": when(event.at),
    }


def _device_row(device: Device, reported: _Reported, revoked: set[str], *, served: bool) -> TableRow:
    profile = contract_pb2.DeviceProfile.FromString(device.profile)
    expectation = reported.expected.get(device.id)
    accuracy = reported.test_accuracy.get(device.id)
    replacements = reported.replacements.get(device.id)
    return {
        "run": device.run,
        "device": device.id,
        "present": served and device.is_present,
        "revoked": f"{Role.DEVICE}:{device.id}" in revoked,
        "forgotten": _forgotten(device),
        "model": profile.model_name,
        "parameters": profile.parameters,
        "samples": profile.samples,
        "test_accuracy": None if accuracy is None else round_or_none(accuracy.mean, 4),
        "leave_one_out": round(expectation.rates["general"], 4) if expectation is not None else None,
        "kept": None if replacements is None else replacements.kept,
        "replaced": None if replacements is None else replacements.replaced,
        "sdk": profile.sdk_version,
        "last_seen": when(device.last_seen),
    }


def _forgotten(device: Device) -> str | None:
    """Returns when a device was forgotten, "asked" while the request is pending, or None without a request."""
    if device.forgotten_at is not None:
        return when(device.forgotten_at)
    return "asked" if device.forget_asked_at is not None else None


def _needs(devices: int) -> str:
    return f"needs {counted(devices, 'device')} that {'is' if devices == 1 else 'are'} present"


# --- Finds devices that `[method] robust` left out of three consecutive rounds that they took part in.
#
# The suspects are only shown to the operator; no device is revoked automatically.

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
