"""TLS of the front, and the service for enrolment.

Certificates are reloaded when their files change, so rotation needs no restart. gRPC calls `before_handshake` for
every new connection. Open connections are not affected.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from fleetdistill.errors import ConfigurationError, FleetDistillError, RefusedError, RunError, StoreError, in_words
from fleetdistill.link.credentials import AUTHORITIES, split
from fleetdistill.link.x509 import check_fits
from fleetdistill.names import is_name
from fleetdistill.wire.codes import Code
from fleetdistill.wire.v1 import enrolment_pb2, enrolment_pb2_grpc
from fleetdistill_server.config.server_config import ServerSection, Tls
from fleetdistill_server.front.errors import abort, ended, in_pool
from fleetdistill_server.front.guard import Guard, holder_in, identity_of
from fleetdistill_server.front.strangers import Strangers
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.security.certificates import Role
from fleetdistill_server.security.pki import SERVER, Authority, without
from fleetdistill_server.security.tokens import EnrolmentApi, save_enrol_port, token_of
from fleetdistill_server.views.certificates import ending_soon, unusable

logger = logging.getLogger("fleetdistill.server.tls")
EXPIRY_SECONDS = 60.0
"""Time between two looks at the certificates of the server."""
_NOTED = (Code.NOT_ALLOWED, Code.REVOKED, Code.EXPIRED, Code.OLD_CA)
_MAX_WAITING = 64
"""Refusals that may wait for a thread; further ones are dropped, so that a device that floods fills no queue."""


class EnrolmentService(enrolment_pb2_grpc.EnrolmentServiceServicer):
    """Issues and renews certificates for devices. `security/roles.py` defines who may call it."""

    def __init__(self, api: EnrolmentApi, devices: DeviceApi, pool: ThreadPoolExecutor) -> None:
        self._api = api
        self._devices = devices
        self._store = devices.store
        self._commit = devices.commit
        self._pool = pool
        self._limiter = devices.limiter

    async def Enrol(self, request: enrolment_pb2.EnrolRequest, context: Any) -> enrolment_pb2.EnrolResponse:
        try:
            place = self._limiter.begin_enrolment()
        except RefusedError as refusal:
            await abort(context, refusal)
        work = self._pool.submit(self._enrol, request)
        work.add_done_callback(
            lambda _: place.release()
        )  # a cancelled call does not stop the work, so its share stays reserved
        return await ended(context, asyncio.wrap_future(work))

    async def Renew(self, request: enrolment_pb2.RenewRequest, context: Any) -> enrolment_pb2.RenewResponse:
        holder = holder_in(context)
        assert holder is not None  # the guard admits only callers with a certificate
        return await in_pool(self._pool, context, partial(self._renew, request, holder))

    def _enrol(self, request: enrolment_pb2.EnrolRequest) -> enrolment_pb2.EnrolResponse:
        arguments = (request.secret, request.device, request.signing_request)
        try:
            self._api.check_token(self._store, request.secret)
            certificate = self._commit(lambda store: self._api.enrol(store, *arguments))
        except RefusedError as refusal:
            with contextlib.suppress(StoreError):  # it is refused anyway
                self._note(request, refusal)
            raise
        return enrolment_pb2.EnrolResponse(certificate=certificate, authorities=self._authorities())

    def _note(self, request: enrolment_pb2.EnrolRequest, refusal: RefusedError) -> None:
        """Records a refused enrolment if the caller has a token of this server; strangers write no events."""
        token = token_of(self._store, request.secret)
        if token is not None:
            device = request.device if is_name(request.device) else ""
            self._devices.note_refusal([token.run], device, refusal, is_proven=False)

    def _renew(self, request: enrolment_pb2.RenewRequest, holder: Any) -> enrolment_pb2.RenewResponse:
        certificate = self._commit(lambda store: self._api.renew(store, holder, request.signing_request))
        return enrolment_pb2.RenewResponse(certificate=certificate, authorities=self._authorities())

    def _authorities(self) -> bytes:
        return (self._api.directory / AUTHORITIES).read_bytes()


@dataclass(frozen=True)
class Ports:
    """The ports of a front; `enrol` is None in plain text."""

    devices: int
    enrol: int | None = None


def listen_on(server: Any, enrolment: Any, listen: str, tls: Tls | None, strangers: Strangers) -> Ports:
    """Binds the ports of the gRPC servers for devices and, with TLS, for enrolment, whose strangers are bounded.

    Raises:
        RunError: An address cannot be bound.
        ConfigurationError: The PKI cannot be read.
    """
    if tls is None:
        with _binding("listen", listen):
            return Ports(server.add_insecure_port(listen))
    with _binding("listen", listen):
        devices = server.add_secure_port(listen, _credentials(tls.directory, True, strangers))
    with _binding("enrol_listen", tls.enrol_listen):
        enrol = enrolment.add_secure_port(tls.enrol_listen, _credentials(tls.directory, False, strangers))
    strangers.watch(devices, enrol)
    return Ports(devices, enrol)


@contextlib.contextmanager
def _binding(setting: str, address: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # gRPC's, whose text has no reason
        text = f"the address is in use or not this machine's; set another in [server] {setting}"
        raise RunError(f"cannot listen on {address}: {text}") from error


def add_services(
    server: Any,
    enrolment: Any,
    config: ServerSection,
    api: DeviceApi,
    pool: ThreadPoolExecutor,
    tls: Tls,
    ports: Ports,
    guard: Guard,
) -> None:
    """Adds the services that require TLS, enrolment and operations."""
    from fleetdistill.wire.v1 import operations_pb2_grpc
    from fleetdistill_server.front.operations_service import (  # imports rich, which plain text does not need
        OperationsService,
        store_refusals,
    )
    from fleetdistill_server.intake.operator_log import OperatorLog

    store = Path(config.store)
    certificates = EnrolmentApi(tls.directory, tls.certificate_days)
    service = EnrolmentService(certificates, api, pool)
    for item in (server, enrolment):  # one port enrols, the other renews certificates; see `security/roles.py`
        enrolment_pb2_grpc.add_EnrolmentServiceServicer_to_server(service, item)
    assert ports.enrol is not None
    try:
        save_enrol_port(store, ports.enrol)
    except StoreError as error:  # the disk may be full; devices can be served anyway
        logger.error("%s; until the next start `fleetdistill enrol` needs --enrol-port %d", error, ports.enrol)
    log = OperatorLog(api.commit)
    of_people, of_devices = store_refusals(log, pool), note_refusals(api, pool)

    def on_refusal(*refused: Any) -> None:
        of_people(*refused)
        of_devices(*refused)

    guard.on_refusal = on_refusal
    operations = OperationsService(api, log, store, pool, tls.directory, ports.enrol, config.data_directories)
    operations_pb2_grpc.add_OperationsServiceServicer_to_server(operations, server)


def note_refusals(api: DeviceApi, pool: ThreadPoolExecutor) -> Callable[[str, Any, FleetDistillError, Any], None]:
    """Returns a function for the guard that notes refused calls of devices with a certificate, without waiting."""
    waiting: set[asyncio.Future[None]] = set()

    def note(method: str, context: Any, refusal: FleetDistillError, request: Any) -> None:
        holder = holder_in(context)
        if not isinstance(refusal, RefusedError) or refusal.code not in _NOTED or len(waiting) >= _MAX_WAITING:
            return
        if holder is None or holder.role is not Role.DEVICE:
            return
        identity = identity_of(request)
        runs = ("" if identity is None else identity.run, holder.run)
        work = partial(_note_refusal, api, runs, holder.name, refusal)
        job = asyncio.get_running_loop().run_in_executor(pool, work)
        waiting.add(job)
        job.add_done_callback(waiting.discard)

    return note


def _note_refusal(api: DeviceApi, runs: tuple[str, ...], device: str, refusal: RefusedError) -> None:
    with contextlib.suppress(StoreError):  # the call was refused anyway; an outage is logged elsewhere
        api.note_refusal(runs, device, refusal)


def check_files(directory: Path) -> None:
    """Raises ConfigurationError if a server cannot use this PKI for TLS or for enrolment."""
    _Files(directory).configuration()
    Authority(directory)
    try:
        check_fits(*split((directory / SERVER).read_bytes()), (directory / AUTHORITIES).read_bytes())
    except ValueError as error:
        raise ConfigurationError(f"{directory / SERVER}: {error}; run `fleetdistill pki renew-server`") from error


async def log_not_valid(server: ServerSection) -> None:
    """Logs once each certificate of the server itself that is not valid or ends soon, and that all are valid again.

    Runs until it is cancelled.
    """
    known: list[str] = []
    soon: list[str] = []
    while True:
        texts, ending = await asyncio.to_thread(lambda: (unusable(server), ending_soon(server)))
        for text in texts:
            if text not in known:
                logger.error("%s", text)
        if known and not texts:
            logger.warning("the certificates of the server can be used again")
        for text in ending:
            if text not in soon:
                logger.warning("%s", text)
        known, soon = texts, ending
        await asyncio.sleep(EXPIRY_SECONDS)


def _credentials(directory: Path, client_certificates: bool, strangers: Strangers) -> Any:
    """Returns the credentials of a port.

    Args:
        directory: Directory of the PKI.
        client_certificates: Whether clients must present a certificate of an accepted CA.
        strangers: Told of each new connection.

    Raises:
        ConfigurationError: The files cannot be read.
    """
    files = _Files(directory)
    first = files.configuration()

    def before_handshake() -> Any:
        strangers.before_handshake()
        return files.changed()

    return grpc.dynamic_ssl_server_credentials(
        first, before_handshake, require_client_authentication=client_certificates
    )


class _Files:
    """The files with the server's certificate and the accepted CAs."""

    def __init__(self, directory: Path) -> None:
        self._paths = (directory / SERVER, directory / AUTHORITIES)
        self._stamp: tuple[tuple[int, int], ...] = ()

    def configuration(self) -> Any:
        """Reads the files. Raises ConfigurationError."""
        try:
            stamp = self._stamps()
            key, chain = split(self._paths[0].read_bytes())
            authorities = self._paths[1].read_bytes()
        except FileNotFoundError as error:
            path = Path(error.filename)
            raise ConfigurationError(without(path.parent, path.name)) from error
        except OSError as error:
            text = f"cannot read the server's certificate: {in_words(error)}; it must be readable for the server's user"
            raise ConfigurationError(text) from error
        if not (key and chain):
            raise ConfigurationError(
                f"{self._paths[0]} must contain a key and a certificate; run `fleetdistill pki renew-server`"
            )
        self._stamp = stamp
        return grpc.ssl_server_certificate_configuration([(key, chain)], authorities)

    def changed(self) -> Any:
        """Returns a new configuration if the files have changed and can be read, else None."""
        try:
            return None if self._stamps() == self._stamp else self.configuration()
        except (OSError, ConfigurationError) as error:
            logger.error("cannot use the changed certificate; the previous one stays in use: %s", error)
            return None

    def _stamps(self) -> tuple[tuple[int, int], ...]:
        return tuple((stat.st_mtime_ns, stat.st_ino) for stat in (path.stat() for path in self._paths))
