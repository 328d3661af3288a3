"""Serves payloads to devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import cache

from fleetdistill.errors import DamagedError, RefusedError, StoreError, StoreUnavailableError
from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.codes import Code
from fleetdistill.wire.compression import choose, offered
from fleetdistill.wire.v1 import knowledge_pb2, service_pb2
from fleetdistill_server.intake.sessions import DOWNLOAD, DOWNLOADED, AskTimes, Sessions
from fleetdistill_server.store.group_commit import Commit
from fleetdistill_server.store.records import Ask
from fleetdistill_server.store.states import AskStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.store.traffic import Counted, Sending, counted


class Downloads:
    """Opens the payloads that a device's asks or its contract refer to.

    Attributes:
        times: Notes when downloads begin and end; None notes nothing.
    """

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
        self.times: AskTimes | None = None
        self._last = b"", Counted()  # counts of the payload that was handed over last: often all devices get it
        self._damaged: set[bytes] = set()  # digests with a recorded event

    def open(self, request: service_pb2.DownloadRequest) -> Sending:
        """Opens a payload for download.

        Returns:
            The payload with its chunks from the requested byte on. Call its `end` if the device stops reading early.

        Raises:
            RefusedError: The payload is not part of the device's asks or contract, or has been deleted.
            StoreError: The payload is damaged or cannot be read.
        """
        payload, count = self._find(request.identity, request.sha256)
        packed = choose(self._compression, request.compressions)
        chunks = wire.chunks(payload.source, payload.slots, request.first_byte, packed)
        return Sending(payload, chunks, count, request.first_byte)

    def hand_over(self, identity: service_pb2.Identity, sha256: bytes) -> Payload:
        """Returns a payload to a device in this process, and counts the bytes that it would have on a network.

        Raises:
            RefusedError, StoreError: As `open`.
        """
        payload, count = self._find(identity, sha256)
        if sha256 != self._last[0]:
            self._last = sha256, counted(payload, choose(self._compression, offered()))
        count(self._last[1])
        return payload

    def count(self, run: str, asks: Iterable[tuple[int, str, bytes]]) -> None:
        """Counts the payloads of a contract and of asks as downloaded, without handing them over.

        For devices of a simulation that get the final result without being made.

        Args:
            run: Name of the run.
            asks: Round, device and payload of each ask.
        """
        contract = self._sessions.contract(run)
        packed = choose(self._compression, offered())

        @cache
        def counts_of(sha256: bytes) -> tuple[Counted, int]:
            payload = self._store.blobs.open(sha256)
            return counted(payload, packed), payload.header().ByteSize()

        def job(store: Store) -> None:
            for number, device, asked in asks:
                for sha256 in {contract.initial_weights, contract.proxy_digest, asked} - {b""}:
                    store.history.add_traffic(run, number, device, "down", *counts_of(sha256))

        self._commit(job)

    def _find(self, identity: service_pb2.Identity, wanted: bytes) -> tuple[Payload, Callable[[Counted], None]]:
        """Returns a payload that a device may download, and the function that counts its bytes."""
        run, device = self._sessions.authenticate(identity)
        contract = self._sessions.contract(run)
        for_all = wanted in {contract.initial_weights, contract.proxy_digest, contract.extractor_file} - {b""}
        ask = self._store.asks.next_open(run, device) if for_all else self._store.asks.with_payload(run, device, wanted)
        if not wanted or not (for_all or ask):
            text = f"device {device}: neither its asks nor the contract refer to payload {wanted.hex()}"
            raise RefusedError(Code.NOT_FOUND, text)
        try:
            payload = self._store.blobs.open(wanted)
        except StoreError as error:
            away = isinstance(error, StoreUnavailableError)
            if away or for_all or (ask is not None and ask.status is AskStatus.OPEN):
                if isinstance(error, DamagedError):
                    self._note_damage(run, ask, error)
                raise
            text = f"device {device}: payload {wanted.hex()} was deleted because its round is over"
            raise RefusedError(Code.NOT_FOUND, text) from error
        header_bytes, number = payload.header_bytes, ask.round if ask else 0
        self._note_time(ask, DOWNLOAD)

        def count(sent: Counted) -> None:
            self._note_time(ask, DOWNLOADED)
            with contextlib.suppress(StoreError):  # a failed count must not fail the download
                self._commit(lambda store: store.history.add_traffic(run, number, device, "down", sent, header_bytes))

        return payload, count

    def _note_time(self, ask: Ask | None, what: str) -> None:
        if self.times is not None and ask is not None:
            self.times.note(ask.id, what)

    def _note_damage(self, run: str, ask: Ask | None, damage: DamagedError) -> None:
        """Records an event about a damaged payload, once per payload; the engine recreates the payload if it can."""
        if damage.sha256 not in self._damaged:
            self._damaged.add(damage.sha256)
            text = f"a payload for devices was lost on the server. {damage}"
            number = ask.round if ask else 0
            self._commit(lambda store: store.history.add_event(run, "quarantined", text, number=number))
