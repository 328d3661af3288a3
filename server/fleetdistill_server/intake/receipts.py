"""Records accepted answers, and creates their receipts or the errors for asks that no longer accept answers."""

from __future__ import annotations

from functools import partial

from fleetdistill.errors import RefusedError
from fleetdistill.knowledge import Metrics
from fleetdistill.state import failpoints
from fleetdistill.wire.codec import Payload, decode
from fleetdistill.wire.codes import Code
from fleetdistill.wire.digests import identity
from fleetdistill.wire.v1 import knowledge_pb2, service_pb2
from fleetdistill_server.intake.commit import Commit
from fleetdistill_server.store.records import Ask, Upload
from fleetdistill_server.store.retention import drop_unneeded
from fleetdistill_server.store.states import DEADLINE_PASSED
from fleetdistill_server.store.store import Store
from fleetdistill_server.store.traffic import Counted

LARGEST_NUMBER = (1 << 63) - 1
"""Largest integer that SQLite stores; the wire's uint64 allows larger ones."""
_LONGEST_SENTENCE = 1000


def record(
    run: str, ask: Ask, header: service_pb2.UploadHeader, counted: Counted, deletions: int, store: Store
) -> Upload | None:
    """Records an answer and its traffic; returns the answer, or None if the ask no longer accepts answers.

    `deletions` is the store's count of deletions from before the payload was stored. If it has changed, the payload is
    looked for again; no deletion runs during this transaction.
    """
    payload = header.payload
    device = ask.device
    digest = identity(header.payload)
    first = store.asks.upload_of(ask.id) is None
    if first and not (store.deletions.none_since(deletions) or store.blobs.has(digest)):
        raise RefusedError(Code.INCOMPLETE, f"device {device}: the payload is missing; send it again")
    upload = store.asks.accept_upload(ask.id, header.name.attempt, digest, payload.data_bytes, header.samples)
    if upload is not None and first:
        store.history.add_traffic(run, ask.round, device, "up", counted, payload.ByteSize())
        store.database.after_commit(store.database.meter.acknowledged)
        for part in payload.parts.parts:
            if part.WhichOneof("kind") == "metrics":
                store.history.add_figures(run, ask.round, device, _metrics(part))
    failpoints.hit("front.receipt.before-commit")
    return upload


def drop_if_to_forget(run: str, device: str, sha256: bytes, commit: Commit) -> None:
    """Deletes a late answer's payload immediately if its device is to be forgotten; sweeps delete all others.

    Does nothing while a backup is made, since waiting would block all commits; a later sweep deletes the payload.
    """
    if commit(partial(_announce_if_to_forget, run, device)):
        commit(partial(drop_unneeded, digests=[sha256], wait_seconds=0.0))


def _announce_if_to_forget(run: str, device: str, store: Store) -> bool:
    known = store.devices.get(run, device)
    if known is None or known.forget_asked_at is None:
        return False
    store.deletions.announce()
    return True


def other_ask(ask: Ask) -> RefusedError:
    """Returns the error for an answer whose ask has another payload, which happens after a backup is restored."""
    step = f"step {ask.step!r} of round {ask.round}"
    text = f"device {ask.device}: the answer does not belong to the current ask, {step}"
    return RefusedError(Code.CLOSED, f"{text}; the server was restored from a backup")


def closed(ask: Ask | None) -> RefusedError:
    """Returns the error for an ask whose deadline has passed or whose round is over for this device."""
    if ask is None:
        return RefusedError(Code.CLOSED, "the ask no longer exists")
    why = ask.reason or ask.status
    text = f"device {ask.device}: step {ask.step!r} of round {ask.round} no longer accepts answers ({why})"
    return RefusedError(Code.LATE if why == DEADLINE_PASSED else Code.CLOSED, text[:_LONGEST_SENTENCE])


def receipt_of(name: service_pb2.UploadName, upload: Upload) -> service_pb2.Receipt:
    """Builds the receipt message of an accepted answer."""
    return service_pb2.Receipt(
        id=upload.receipt,
        name=service_pb2.UploadName(round=name.round, step_number=name.step_number, attempt=upload.attempt),
        sha256=upload.sha256,
        data_bytes=upload.data_bytes,
        received_at_ms=int(upload.received_at * 1000),
    )


def _metrics(part: knowledge_pb2.Part) -> Metrics:
    parts = knowledge_pb2.Parts(parts=[part])
    found = decode(Payload(parts, (), _NoData(), b""))[part.name]
    assert isinstance(found, Metrics)
    return found


class _NoData:
    def read(self, start: int, size: int) -> bytes:
        return b""
