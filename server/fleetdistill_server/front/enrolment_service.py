"""The gRPC service for enrolment. `security/roles.py` defines who may call it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from fleetdistill.errors import RefusedError
from fleetdistill.link.credentials import AUTHORITIES
from fleetdistill.wire.v1 import enrolment_pb2, enrolment_pb2_grpc
from fleetdistill_server.front.errors import abort, ended, in_pool
from fleetdistill_server.front.guard import holder_in
from fleetdistill_server.intake.limiter import Limiter
from fleetdistill_server.security.tokens import EnrolmentApi
from fleetdistill_server.store.group_commit import Commit
from fleetdistill_server.store.store import Store


class EnrolmentService(enrolment_pb2_grpc.EnrolmentServiceServicer):
    """Issues and renews certificates for devices."""

    def __init__(
        self, api: EnrolmentApi, store: Store, commit: Commit, pool: ThreadPoolExecutor, limiter: Limiter
    ) -> None:
        self._api = api
        self._store = store
        self._commit = commit
        self._pool = pool
        self._limiter = limiter

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
        self._api.check_token(self._store, request.secret)
        given = (request.secret, request.device, request.signing_request)
        certificate = self._commit(lambda store: self._api.enrol(store, *given))
        return enrolment_pb2.EnrolResponse(certificate=certificate, authorities=self._authorities())

    def _renew(self, request: enrolment_pb2.RenewRequest, holder: Any) -> enrolment_pb2.RenewResponse:
        certificate = self._commit(lambda store: self._api.renew(store, holder, request.signing_request))
        return enrolment_pb2.RenewResponse(certificate=certificate, authorities=self._authorities())

    def _authorities(self) -> bytes:
        return (self._api.directory / AUTHORITIES).read_bytes()
