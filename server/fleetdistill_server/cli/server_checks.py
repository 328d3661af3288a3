"""The checks of `fleetdistill doctor run.toml`: a server seen from its own machine. Nothing is changed."""

from __future__ import annotations

import contextlib
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fleetdistill.device.doctor import (
    DAY_SECONDS,
    ERROR,
    OK,
    WARNING,
    Finding,
    certificate_findings,
    findings,
    versions,
)
from fleetdistill.errors import ConfigurationError, DamagedError, FleetDistillError, StoreError, in_words
from fleetdistill.link.credentials import AUTHORITIES, split
from fleetdistill.state.durable import open_to_others
from fleetdistill_server.cli.serve_checks import (
    check_addresses,
    check_extras,
    check_ports,
    check_security,
    check_store_is_there,
    in_use,
    not_in_use,
    readable_keys,
    without_access,
)
from fleetdistill_server.config.section import read_toml
from fleetdistill_server.config.server_config import ServerSection, load_server_config, load_service_config
from fleetdistill_server.security.pki import SERVER
from fleetdistill_server.service.process_state import FRONT, read_processes
from fleetdistill_server.service.processes import hard_limit_of_files
from fleetdistill_server.service.serve_lock import serving
from fleetdistill_server.store.blobs import Blobs
from fleetdistill_server.store.checks import check_schema, is_current
from fleetdistill_server.store.database import Database
from fleetdistill_server.store.disk_space import bytes_under
from fleetdistill_server.store.location import Location, has_store
from fleetdistill_server.store.retention import needed
from fleetdistill_server.store.rollback import way_back
from fleetdistill_server.store.store import Store, open_for_reading
from fleetdistill_server.texts import readable_bytes
from fleetdistill_server.views.health import failed_runs, problems_of_processes

_PACKAGES = ("grpcio", "torch", "onnxruntime", "cryptography", "psycopg", "s3fs")
_FEW_FILES = 4096
"""Open files below which a server of a thousand devices refuses connections."""
_SERVER_DAYS, _CA_DAYS = 30, 90
_NEARLY_FULL = 0.9
Found = Iterator[tuple[str, str]]
_SHOWN = 5
_CLOCK_SECONDS = 60.0
"""Newest row's lead over the clock from which the clock counts as set back."""


def examine(
    path: Path, *, quick: bool = False, insecure: bool = False, clock: Callable[[], float] = time.time
) -> list[Finding]:
    """Examines the server of a run.toml or server.toml.

    Args:
        path: Path of the file.
        quick: Whether to look only whether payloads exist, instead of comparing each with its digest.
        insecure: Whether plain text on an address other than loopback is allowed.
        clock: Clock of this machine, Unix seconds.
    """
    result = findings("versions", lambda: [(OK, versions(_PACKAGES))])
    result += findings("settings", lambda: _settings(path))
    try:
        config = load_server_config(path)
    except ConfigurationError:
        return result  # the previous check has its message
    server = config.server
    with contextlib.suppress(FleetDistillError):  # the next checks say what is wrong with the store
        server = in_use(config).server
    opened = _StoreForReading(server)
    checks: dict[str, Callable[[], Found]] = {
        "extras": lambda: _extras(server),
        "processes": lambda: _processes(server, path, opened),
        "access": lambda: _access(server),
        "ports": lambda: _ports(server),
        "TLS": lambda: _tls(server, insecure, clock()),
        "disk": lambda: _disk(server),
        "hardware": lambda: _hardware(server),
        "open files": _open_files,
        "store": lambda: _store(server, opened, clock(), quick=quick),
    }
    with contextlib.closing(opened):
        return [*result, *(finding for name, check in checks.items() for finding in findings(name, check))]


class _StoreForReading:
    """A server's store, opened when a check first needs it; one that cannot be reached is waited for only once."""

    def __init__(self, server: ServerSection) -> None:
        self._server = server
        self._opened: tuple[Database, Blobs] | None = None
        self._failure: ConfigurationError | StoreError | None = None

    def open(self) -> tuple[Database, Blobs]:
        """Returns the database, possibly with old tables, and the payloads; raises as `open_for_reading`."""
        if self._failure is not None:
            raise self._failure
        if self._opened is None:
            try:
                self._opened = open_for_reading(Path(self._server.store), Location.of(self._server))
            except (ConfigurationError, StoreError) as error:
                self._failure = error
                raise
        return self._opened

    def read(self, read: Callable[[Store], list[str]]) -> list[str]:
        """Returns what is read of the store; nothing of one that cannot be read, of which its own check says why."""
        if has_store(Path(self._server.store)):
            with contextlib.suppress(ConfigurationError, StoreError):
                database, blobs = self.open()
                return read(Store(database, blobs)) if is_current(database) else []
        return []

    def close(self) -> None:
        if self._opened is not None:
            self._opened[0].close()


def _settings(path: Path) -> Found:
    from fleetdistill_server.config.run_config import load_run_config

    if "run" in read_toml(path):
        config = load_run_config(path)
        yield OK, f"{path} describes run {config.run.name!r} with {config.run.method}"
    else:
        load_service_config(path)
        yield OK, f"{path} describes a server without a run"
    if differ := not_in_use(path):
        yield WARNING, differ


def _extras(server: ServerSection) -> Found:
    check_extras(server)
    yield OK, "everything that the settings need is installed"


def _processes(server: ServerSection, path: Path, opened: _StoreForReading) -> Found:
    directory = Path(server.store)
    served_now = serving(directory)
    for text in opened.read(failed_runs):
        yield WARNING, text
    if served_now is None:
        waiting = opened.read(lambda store: [repr(run.name) for run in store.runs.active()])
        need = f", but runs are to go on ({', '.join(waiting)}); run `fleetdistill serve {path}`" if waiting else ""
        yield WARNING if waiting else OK, f"no server uses the store {server.store}{need}"
        return
    wrong = problems_of_processes(directory)
    for text in wrong:
        yield ERROR, f"{text}; see `runs show` and the server's log"
    if not wrong:
        yield (
            OK,
            f"a server serves run {served_now.run!r}" if served_now.run else "a server serves all runs of the store",
        )


def _access(server: ServerSection) -> Found:
    found = without_access(server)
    yield from ((ERROR, text) for text in found)
    if not found:
        yield OK, "this user can use the store" + ("" if server.tls() is None else " and the PKI")


def _ports(server: ServerSection) -> Found:
    check_addresses(server)
    if serving(Path(server.store)) is None:
        check_ports(server)
        yield OK, "free"
        return
    if any(process.name == FRONT and process.problems() for process in read_processes(Path(server.store))):
        yield ERROR, f"the front, which answers on {server.listen}, has the problem above"
        return
    host, _, port = server.listen.rpartition(":")
    if port == "0":
        yield OK, "chosen by the system; the server printed them when it started"
        return
    try:
        socket.create_connection((_reachable(host), int(port)), timeout=5).close()
        yield OK, f"the server listens on {server.listen}"
    except OSError as error:
        yield ERROR, f"the server does not listen on {server.listen}: {in_words(error)}; see its log"


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "[::]": "::1"}.get(host, host.strip("[]"))


def _tls(server: ServerSection, insecure: bool, now: float) -> Found:
    warning = check_security(server, insecure)
    tls = server.tls()
    if tls is None:
        yield (WARNING, warning) if warning else (OK, f"plain text on {server.listen}, which only this machine reaches")
        return
    from fleetdistill.link.x509 import check_fits, life

    key, chain = split((tls.directory / SERVER).read_bytes())
    authorities = (tls.directory / AUTHORITIES).read_bytes()
    try:
        check_fits(key, chain, authorities)
    except ValueError as error:
        raise ConfigurationError(f"{tls.directory}: {error}; run `fleetdistill pki renew-server`") from error
    renew = f"run `fleetdistill pki renew-server --pki {tls.directory}`"
    yield from certificate_findings("the server's certificate", *life(chain), now, renew, _SERVER_DAYS * DAY_SECONDS)
    rotate = f"run `fleetdistill pki rotate-ca --pki {tls.directory}`"
    yield from certificate_findings("the CA", *life(authorities), now, rotate, _CA_DAYS * DAY_SECONDS)
    yield from ((ERROR, text) for text in readable_keys(tls.directory))


def _disk(server: ServerSection) -> Found:
    directory = Path(server.store).resolve()
    place = next(item for item in (directory, *directory.parents) if item.exists())
    try:
        free, used = shutil.disk_usage(place).free, bytes_under(directory) if directory.exists() else 0
    except OSError as error:
        raise StoreError(f"{directory} cannot be read: {in_words(error)}") from error
    keep, budget = server.keep_free_bytes, server.disk_budget_bytes
    text = f"{readable_bytes(free)} are free at {place}, the store has {readable_bytes(used)}"
    prune = "or run `fleetdistill runs prune RUN`"
    if free < keep:
        limit = f"[server] keep_free_bytes = {readable_bytes(keep)}"
        yield ERROR, f"{text}; uploads are refused below {limit}. Free some space, {prune}"
    elif budget and used > budget * _NEARLY_FULL:
        level, state = (ERROR, "exceeds") if used > budget else (WARNING, "nearly fills")
        limit = f"[server] disk_budget_bytes = {readable_bytes(budget)}"
        yield level, f"{text}, which {state} {limit}; raise it, {prune}"
    else:
        yield OK, text


def _hardware(server: ServerSection) -> Found:
    from fleetdistill_server.methods.base import pick_torch_device

    device = pick_torch_device(server.torch_device)
    yield (
        OK,
        f"the engine uses {device}" + ("" if str(device) != "cpu" else "; PyTorch finds no GPU, or none is wanted"),
    )


def _open_files() -> Found:
    limit = hard_limit_of_files()
    if limit < _FEW_FILES:
        yield WARNING, f"at most {limit} open files, one per connection; raise `ulimit -Hn`, or LimitNOFILE in systemd"
    else:
        yield OK, f"at most {limit}"


def _store(server: ServerSection, opened: _StoreForReading, now: float, *, quick: bool) -> Found:
    """Yields what is wrong with the store; with `quick` only whether payloads exist, as always in an object store."""
    directory = Path(server.store)
    check_store_is_there(server)
    if not has_store(directory):
        yield OK, f"there is no store in {directory} yet; `fleetdistill serve` creates it"
        return
    if text := open_to_others(directory):
        yield WARNING, text
    database, blobs = opened.open()
    database.check()
    yield OK, f"the database {database.name} is intact"
    check_schema(database, blobs)
    if not is_current(database):
        text = "an earlier version wrote the store; back it up before `fleetdistill serve` migrates it"
        yield WARNING, f"{text}. Payloads were not checked"
        return
    blobs.check()
    store = Store(database, blobs)
    yield from _clock(store, now)
    yield from _payloads(store, read=not quick and not server.blobs)


def _clock(store: Store, now: float) -> Found:
    newest = store.latest_time() or 0.0
    if newest > now + _CLOCK_SECONDS:
        lead = f"{newest - now:,.0f} s later than this machine's clock"
        yield ERROR, f"the newest row is from {_when(newest)}, {lead}; set the clock, for example with NTP"


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _payloads(store: Store, *, read: bool) -> Found:
    """Compares the payloads and checkpoints that are needed with their digests, or looks whether they exist."""
    wanted = needed(store)
    damaged = {}
    newest = {store.runs.existing(run).checkpoint for run in store.runs.names()}  # without them, a run cannot go on
    order = lambda sha256: (sha256 not in newest, sha256 not in wanted.checkpoints, sha256)  # noqa: E731
    for sha256 in sorted(wanted.payloads | wanted.checkpoints, key=order):
        is_payload = sha256 in wanted.payloads
        reason = _damage(store, sha256, is_payload=is_payload, read=read)
        if reason:
            lost = "the server asks devices again for lost answers" if is_payload else _without(store, sha256)
            damaged[sha256] = f"{reason}; {lost}"
    if damaged:  # a server beside this command deletes what it no longer needs
        again = needed(store)
        damaged = {one: reason for one, reason in damaged.items() if one in again.payloads | again.checkpoints}
    for _, reason in list(damaged.items())[:_SHOWN]:
        yield ERROR, reason
    if len(damaged) > _SHOWN:
        yield ERROR, f"{len(damaged) - _SHOWN} more payloads or checkpoints are missing or damaged"
    if not damaged:
        how = "match their digests" if read else "exist"
        yield OK, f"all {len(wanted.payloads | wanted.checkpoints)} payloads and checkpoints {how}"


def _damage(store: Store, sha256: bytes, *, is_payload: bool, read: bool) -> str:
    if not store.blobs.has(sha256):
        return f"{'payload' if is_payload else 'checkpoint'} {sha256.hex()} is missing"
    if read:
        try:
            if is_payload:
                store.blobs.open(sha256, verify=True)
            else:
                store.blobs.get_state(sha256)
        except DamagedError as error:
            return str(error)
    return ""


def _without(store: Store, sha256: bytes) -> str:
    """Returns which runs need a checkpoint that is lost, and what to do."""
    said = []
    for run in store.runs.names():
        if store.runs.existing(run).checkpoint == sha256:
            said.append(f"run {run!r} cannot go on from it: {way_back(store, run, sha256)}")
        elif result := [checkpoint.round for checkpoint in store.runs.checkpoints(run) if checkpoint.sha256 == sha256]:
            said.append(f"run {run!r} cannot be rolled back to round {result[-1]}")
    return "; ".join(said)
