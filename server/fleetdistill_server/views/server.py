"""The server as a whole: processes, engines and queue, disk, store, certificates, backups and versions."""

from __future__ import annotations

import contextlib
import platform
import shutil
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from fleetdistill.link.credentials import IDENTITY, split
from fleetdistill.version import VERSION
from fleetdistill_server.config.server_config import ServerSection
from fleetdistill_server.security.certificates import Role
from fleetdistill_server.security.revocation import accepted_authorities, is_accepted, of_forgotten_ca
from fleetdistill_server.service.process_state import FRONT, read_processes
from fleetdistill_server.service.serve_lock import last_served, serving
from fleetdistill_server.service.served import Served, served
from fleetdistill_server.store.disk_space import bytes_under
from fleetdistill_server.store.location import read_location
from fleetdistill_server.store.states import ACTIVE
from fleetdistill_server.store.store import Store
from fleetdistill_server.texts import counted, when
from fleetdistill_server.views.certificates import OWN, RENEWALS, SOON_SECONDS, validity_of
from fleetdistill_server.views.health import failed_runs, problems
from fleetdistill_server.views.results import missing_in
from fleetdistill_server.views.runs import TableRow, View, shown_status

__all__ = ["OF_FORGOTTEN_CA", "REVOKED"]

_SOON_SHARE = 0.25
"""Time left of a device's certificate from which it is to be renewed, as a share of its validity: devices renew
theirs before."""
_DUE = ("expired", "expires soon")
"""States of a certificate that somebody has to renew."""
REVOKED, OF_FORGOTTEN_CA = "revoked", "of a forgotten CA, not admitted"
"""States of a certificate that admits nobody any more."""
_MOST = 100
_NAMED = 5
"""Largest number of devices that a sentence names."""
_BACKUPS = 5
_PACKAGES = ("torch", "grpcio", "nicegui")


def server(store: Store, directory: Path) -> View:
    """Returns the state of the server of the store in a directory, and of the store itself.

    Facts: `problems`, `failed_runs` and `warnings`, sentences; `serves`, `version`, `engines_at_once`, `store`,
    `database`, `payloads` and `runs`; in bytes `disk_free`, `disk_used`, `keep_free` and `disk_budget`, which is 0 for
    none. Lists: `processes`, `queue`, `certificates`, `backups` and `versions`.

    Raises:
        StoreError: The store could not be read.
    """
    served_now = serving(directory)
    started = last_served(directory)
    section = ServerSection() if started is None else started.server
    works = served(directory, store)
    certificates = [*_own_certificates(section, store), *_device_certificates(section, store)]
    lists = {
        "processes": _processes(directory) if served_now is not None else [],
        "queue": _queue(store, works),
        "certificates": certificates,
        "backups": _backups(store),
        "versions": _versions(),
    }
    facts = {
        "problems": problems(store, directory),
        "failed_runs": failed_runs(store),
        "warnings": [
            *(_warning(row) for row in certificates if _is_due(row)),
            *shut_out_devices(section, store),
            *_incomplete_backup(lists["backups"]),
        ],
        "serves": served_now is not None,
        "version": VERSION,
        "engines_at_once": 0 if served_now is None else served_now.engines,
    }
    return View(lists, {**facts, **_place(store, directory), **_disk(directory, section)})


def _processes(directory: Path) -> list[TableRow]:
    rows = []
    for process in read_processes(directory):
        state = (
            "works"
            if process.pid is not None and not process.waits
            else "starts again"
            if process.name == FRONT or process.waits
            else "ends"
        )
        if process.hangs:
            state = "hangs"
        rows.append(
            {
                "process": process.name,
                "run": process.run,
                "state": state,
                "pid": process.pid,
                "restarts": process.restarts,
            }
        )
    return rows


def _queue(store: Store, works: Served) -> list[TableRow]:
    order = {run.name: number for number, run in enumerate(store.run_control.queue())}
    active = [run for run in store.runs.all() if run.status in ACTIVE]
    active.sort(key=lambda run: order.get(run.name, len(order)))
    return [{"run": run.name, "status": shown_status(run, works), "engine": run.name in works.runs} for run in active]


def _place(store: Store, directory: Path) -> TableRow:
    location = read_location(directory)
    return {
        "store": str(directory.resolve()),
        "database": "PostgreSQL" if location.database else "SQLite",
        "payloads": location.blobs or "files",
        "runs": len(store.runs.names()),
    }


def _disk(directory: Path, section: ServerSection) -> TableRow:
    with contextlib.suppress(OSError):
        return {
            "disk_free": shutil.disk_usage(directory).free,
            "disk_used": bytes_under(directory),
            "keep_free": section.keep_free_bytes,
            "disk_budget": section.disk_budget_bytes,
        }
    return {"disk_free": None, "disk_used": None, "keep_free": section.keep_free_bytes, "disk_budget": 0}


def _own_certificates(section: ServerSection, store: Store) -> Iterator[TableRow]:
    """Yields the certificates in the directory of the PKI, which has those of people unless `--out` was elsewhere."""
    tls = section.tls()
    if tls is None:
        return
    people = sorted(
        path for role in (Role.OPERATOR, Role.VIEWER) for path in tls.directory.glob(f"{role}-*/{IDENTITY}")
    )
    revoked = {revocation.subject.replace(":", "-", 1) for revocation in store.credentials.revocations()}
    files = {holder: tls.directory / name for holder, name in OWN.items()}
    accepted = accepted_authorities(tls.directory)
    for holder, path in {**files, **{path.parent.name: path for path in people}}.items():
        if (valid := validity_of(path)) is not None:
            row = _certificate(holder, "", valid[1], SOON_SECONDS)
            if holder in revoked:
                row["state"] = REVOKED
            elif holder not in OWN and accepted and not is_accepted(_certificate_in(path), accepted):
                row["state"] = OF_FORGOTTEN_CA
            yield row


def _certificate_in(path: Path) -> bytes:
    try:
        return split(path.read_bytes())[1]
    except OSError:  # it is being replaced
        return b""


def devices_of_forgotten_ca(section: ServerSection, store: Store) -> set[str]:
    """Returns the devices that the server does not admit, because their certificates are of a CA that it forgot."""
    tls = section.tls()
    return set() if tls is None else of_forgotten_ca(tls.directory, store)


def shut_out_devices(section: ServerSection, store: Store) -> list[str]:
    """Returns a sentence on the devices that cannot connect because of another CA; empty if there are none."""
    devices = sorted(devices_of_forgotten_ca(section, store))
    if not devices:
        return []
    names = ", ".join(devices[:_NAMED]) + (", ..." if len(devices) > _NAMED else "")
    return [
        f"{counted(len(devices), 'device')} cannot connect, with certificates of a CA that this PKI does not have "
        f"({names}): enrol them again, or revoke them; if the PKI was replaced, restore your copy of it"
    ]


def _device_certificates(section: ServerSection, store: Store) -> list[TableRow]:
    """Returns the certificates of devices that should have renewed them, or are not admitted, and are not revoked."""
    forgotten = devices_of_forgotten_ca(section, store)
    revoked = {revocation.subject for revocation in store.credentials.revocations()}
    rows = [
        _certificate(
            certificate.device,
            certificate.device,
            certificate.expires_at,
            _SOON_SHARE * (certificate.expires_at - certificate.issued_at),
        )
        for certificate in store.credentials.newest_certificates()
        if f"{Role.DEVICE}:{certificate.device}" not in revoked
    ]
    for row in rows:
        if row["device"] in forgotten:
            row["state"] = OF_FORGOTTEN_CA
    return [row for row in rows if row["state"] in (*_DUE, OF_FORGOTTEN_CA)][:_MOST]


def _certificate(holder: str, device: str, ends: float, soon: float) -> TableRow:
    left = ends - time.time()
    state = _DUE[0] if left <= 0 else _DUE[1] if left < soon else "valid"
    return {"holder": holder, "device": device, "expires": when(ends), "state": state}


def _is_due(row: TableRow) -> bool:
    """Returns whether a person has to renew a certificate; an expired one of the server itself is a problem."""
    is_problem = row["state"] == _DUE[0] and row["holder"] in OWN
    return row["state"] in _DUE and not row["device"] and not is_problem


def _warning(row: TableRow) -> str:
    verb = "has expired" if row["state"] == _DUE[0] else f"expires at {row['expires']}"
    remedy = RENEWALS.get(row["holder"], "issue another with `fleetdistill pki issue`")
    return f"the certificate of {row['holder']} {verb}; {remedy}"


def _backups(store: Store) -> list[TableRow]:
    calls = store.operator_calls.newest(before=None, call="BackUp", text="", most=_MOST)
    made = [call for call in calls if not call.is_refused][:_BACKUPS]
    return [{"at": when(call.at), "result": call.result.partition(": {")[0]} for call in made]


def _incomplete_backup(backups: Sequence[TableRow]) -> Iterator[str]:
    """Yields a sentence on the newest backup if payloads are missing in it."""
    newest = next((row for row in backups if str(row["result"]).startswith("done")), None)
    if newest is not None and (lacks := missing_in(str(newest["result"]))):
        yield (
            f"the newest backup, of {newest['at']}, is incomplete{lacks}: keep the earlier ones; "
            "`fleetdistill doctor` names what the store has lost, and for which run"
        )


def _versions() -> list[TableRow]:
    rows = [{"name": "fleetdistill", "version": VERSION}, {"name": "Python", "version": platform.python_version()}]
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            rows.append({"name": name, "version": metadata.version(name)})
    return rows
