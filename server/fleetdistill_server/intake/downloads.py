"""Payloads on their way to devices."""

from __future__ import annotations

import contextlib

from fleetdistill.errors import DamagedError, RefusedError, StoreError
from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.codes import Code
from fleetdistill.wire.compression import choose
from fleetdistill.wire.v1 import knowledge_pb2, service_pb2
from fleetdistill_server.intake.commit import Commit
from fleetdistill_server.intake.sessions import Sessions
from fleetdistill_server.store.database import Row
from fleetdistill_server.store.store import Store
from fleetdistill_server.store.traffic import Counted, Sending


class Downloads:
    """Opens payloads that an ask or the contract names."""

    def __init__(
        self,
        store: Store,
        commit: Commit,
        sessions: Sessions,
        compression: knowledge_pb2.Compression.ValueType,
    ) -> None:
        self._store = store
        self._commit = commit
        self._sessions = sessions
        self._compression = compression
        self._damaged: set[bytes] = set()  # told already

    def open(self, request: service_pb2.DownloadRequest) -> tuple[Payload, Sending]:
        """Opens a payload that an ask or the contract names, and its chunks from the wanted byte on.

        Who takes the chunks calls `end` on them where the device stops taking them.
        """
        run, device = self._sessions.authenticate(request.identity)
        wanted = request.sha256
        contract = self._sessions.contract(run)
        for_all = wanted in {contract.initial_weights, contract.proxy_digest, contract.extractor_file} - {b""}
        ask = self._store.asks.next_open(run, device) if for_all else self._store.asks.naming(run, device, wanted)
        if not wanted or not (for_all or ask):
            raise RefusedError(Code.NOT_FOUND, f"device {device}: payload {wanted.hex()} is not meant for it")
        try:
            payload = self._store.blobs.open(wanted)
        except StoreError as error:
            if for_all or (ask is not None and ask["status"] == "open"):
                if isinstance(error, DamagedError):
                    self._note_damage(run, ask, error)
                raise
            text = f"device {device}: payload {wanted.hex()} is gone, the round that it belonged to is over"
            raise RefusedError(Code.NOT_FOUND, text) from error
        header_bytes = payload.header().ByteSize()
        number = ask["round"] if ask else 0

        def count(sent: Counted) -> None:
            with contextlib.suppress(StoreError):  # a download is worth more than its count
                self._commit(lambda store: store.history.add_traffic(run, number, device, "down", sent, header_bytes))

        packed = choose(self._compression, request.compressions)
        chunks = wire.chunks(payload.source, payload.slots, request.first_byte, packed)
        return payload, Sending(chunks, payload.slots, count)

    def _note_damage(self, run: str, ask: Row | None, damage: DamagedError) -> None:
        """Says once that what devices are to fetch is lost; the engine makes it again where it can."""
        if damage.sha256 not in self._damaged:
            self._damaged.add(damage.sha256)
            text, number = f"what devices are to fetch is lost on the server. {damage}", ask["round"] if ask else 0
            self._commit(lambda store: store.history.add_event(run, "quarantined", text, number=number))
