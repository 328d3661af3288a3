"""A server that lies: an honest one's words with changes, to a device in this process or over a connection.

Every lie is drawn from one `Random`. Half of them change the next field in the order of the descriptors, and at
first all of them, so that every field is changed early; the others change what is there, or leave it to chance.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any

from fuzz.fields import Path, changed_at, in_order, name_of, names
from fuzz.hostile import M, hostile, swollen
from fuzz.in_process import hostile_chunks, hostile_data
from fuzz.played import Played
from google.protobuf.descriptor import Descriptor

from fleetdistill.errors import LinkError, RefusedError, WireError
from fleetdistill.wire.codes import AFTER_SECONDS, Code
from fleetdistill.wire.digests import digest
from fleetdistill.wire.payload import slots
from fleetdistill.wire.v1 import enrolment_pb2, knowledge_pb2, service_pb2

ROOTS = (
    service_pb2.CheckInResponse,
    service_pb2.NextAskResponse,
    service_pb2.UploadStatusResponse,
    service_pb2.UploadResponse,
    service_pb2.DownloadResponse,
    service_pb2.HeartbeatResponse,
    service_pb2.LeaveResponse,
    service_pb2.DeclineResponse,
    enrolment_pb2.EnrolResponse,
    enrolment_pb2.RenewResponse,
)
"""All that a server says to a device."""
FIELDS = {root.DESCRIPTOR.name: names([root.DESCRIPTOR]) for root in ROOTS}
"""`Message.field` of every field within each of them."""
_MAX_DATA = 1 << 20
_RATES = [0.2, 0.5, 0.8]
_TEXTS = ["", "no", "x" * 5000, "\x1b[2J\n", "%s {}"]
_SECONDS = ["0", "5", "-1", "nan", "1e300", "soon"]


class Liar:
    """Plays a run to one device at a time.

    Attributes:
        random: Decides everything.
        told: How many lies were told.
        touched: Message that was sent, and `Message.field` of every field within it that was changed on purpose.
        outcomes: What the lies were about.
    """

    def __init__(self) -> None:
        self.random = Random(0)
        self.told = 0
        self.rate = 0.5
        self.touched: set[tuple[str, str]] = set()
        self.outcomes: Counter[str] = Counter()
        self._orders: dict[str, Iterator[Path]] = {}
        self._played: Played | None = None
        self._payloads: dict[bytes, tuple[knowledge_pb2.PayloadHeader, bytes]] = {}
        self._at = 0

    def untouched(self) -> set[tuple[str, str]]:
        """What `touched` lacks."""
        return {(of, name) for of, fields in FIELDS.items() for name in fields} - self.touched

    def begin(self, random: Random, played: Played) -> None:
        """Another run for another device."""
        self.rate = random.choice(_RATES)
        self.random, self._played, self._payloads, self._at = random, played, dict(played.payloads), 0

    def word(self, honest: M) -> M:
        """The message, or a lie."""
        if self.random.random() >= self.rate:
            return honest
        self.count(type(honest).DESCRIPTOR.name)
        return self._changed(honest)

    def count(self, what: str) -> None:
        """Notes one lie."""
        self.told += 1
        self.outcomes[what] += 1

    def _changed(self, honest: M) -> M:
        kind = type(honest).DESCRIPTOR
        if kind.full_name not in self._orders:
            self._orders[kind.full_name] = itertools.cycle(in_order(kind))  # type: ignore[arg-type]
        if self._whole(kind) and self.random.random() < 0.5:  # type: ignore[arg-type]
            return hostile(self.random, honest)
        path = next(self._orders[kind.full_name])
        self.touched.add((kind.name, name_of(path)))
        return changed_at(self.random, honest, path)

    def _whole(self, kind: Descriptor) -> bool:
        """Whether every field of a message has been changed."""
        return FIELDS.get(kind.name, set()) <= {name for of, name in self.touched if of == kind.name}

    def refuse(self) -> None:
        """Raises what a link makes of an error status, now and then."""
        if self.random.random() >= 0.05 * self.rate:
            return
        self.count("error")
        if self.random.random() < 0.2:
            raise LinkError(self.random.choice(_TEXTS), self.random.random() * 100)
        code = self.random.choice([*(code.value for code in Code), "unknown", ""])
        details = {AFTER_SECONDS: self.random.choice(_SECONDS), "check_in": "now", "x": self.random.choice(_TEXTS)}
        raise RefusedError(code, self.random.choice(_TEXTS), dict(self.random.sample(sorted(details.items()), 2)))

    # --- what is said

    def terms(self) -> service_pb2.CheckInResponse:
        """The terms, whose payloads may be others."""
        terms = service_pb2.CheckInResponse()
        terms.CopyFrom(self.run.terms)
        for name in ("initial_weights", "proxy_digest", "extractor_file"):
            sha256 = getattr(terms.contract, name)
            if sha256 in self._payloads and self.random.random() < 0.2 * self.rate:
                setattr(terms.contract, name, self._spoilt(sha256))
        return self.word(terms)

    def next(self) -> service_pb2.NextAskResponse:
        """The next ask, whose payload may be another; at the end that the run is over."""
        if self._at >= len(self.run.asks):
            return self.word(service_pb2.NextAskResponse(finished="over"))
        if self.random.random() < 0.1:
            return self.word(service_pb2.NextAskResponse(come_back=service_pb2.ComeBack(before_seconds=1.0)))
        ask = service_pb2.Ask()
        ask.CopyFrom(self.run.asks[self._at])
        if ask.payload in self._payloads and self.random.random() < self.rate:
            ask.payload = self._spoilt(ask.payload)
        return self.word(service_pb2.NextAskResponse(ask=ask))

    def go_on(self) -> None:
        """The ask is done with."""
        self._at += 1

    def receipt(self, header: service_pb2.UploadHeader) -> service_pb2.UploadResponse:
        """The receipt of an upload."""
        receipt = service_pb2.Receipt(
            id="ab" * 16, name=header.name, sha256=header.payload.sha256, data_bytes=header.payload.data_bytes
        )
        return self.word(service_pb2.UploadResponse(receipt=receipt))

    def download(self, sha256: bytes) -> Iterator[service_pb2.DownloadResponse]:
        """A payload, or any other where there is none of this digest; refused while there is none at all."""
        if not self._payloads:
            raise RefusedError(Code.NOT_FOUND, "no payload")
        header, data = self._payloads.get(sha256) or self.random.choice(list(self._payloads.values()))
        yield self.word(service_pb2.DownloadResponse(header=header))
        for chunk in hostile_chunks(self.random, header, data, self.rate):
            yield (
                self.word(service_pb2.DownloadResponse(chunk=chunk))
                if self.random.random() < 0.1
                else (service_pb2.DownloadResponse(chunk=chunk))
            )

    @property
    def run(self) -> Played:
        """What is played."""
        assert self._played is not None
        return self._played

    def _spoilt(self, sha256: bytes) -> bytes:
        """Digest of a payload with other parts or data, of somebody who knows how digests are made."""
        header, data = self._payloads[sha256]
        changed = knowledge_pb2.PayloadHeader()
        changed.CopyFrom(header)
        if self.random.random() < 0.7:
            changed = swollen(self.random, header) if self.random.random() < 0.1 else self._changed(header)
        if self.random.random() < 0.5:
            data = hostile_data(self.random, data)
        data = _fitted(changed, data)
        changed.data_bytes, changed.sha256 = len(data), digest(changed.parts, iter([data]))
        self._payloads[changed.sha256] = (changed, data)
        self.count("payload")
        return changed.sha256


def _fitted(header: knowledge_pb2.PayloadHeader, data: bytes) -> bytes:
    """As many bytes as the header's tensors have, unless these are too many."""
    try:
        size = sum(slot.nbytes for slot in slots(header.parts))
    except WireError:
        return data
    return (data * (size // max(len(data), 1) + 1))[:size] if data and size <= max(_MAX_DATA, len(data)) else data


class LyingLink:
    """The link of a device in this process."""

    remote = False

    def __init__(self, liar: Liar) -> None:
        self._liar = liar

    def check_in(self, identity: Any, profile: Any) -> Any:
        self._liar.refuse()
        return self._liar.terms()

    def next_ask(self, identity: Any, wait_seconds: float) -> Any:
        self._liar.refuse()
        return self._liar.next()

    def heartbeat(self, identity: Any) -> None:
        self._liar.refuse()
        self._liar.word(service_pb2.HeartbeatResponse())

    def leave(self, identity: Any, *, forget: bool = False) -> bool:
        self._liar.refuse()
        return self._liar.word(service_pb2.LeaveResponse(forget_recorded=forget)).forget_recorded

    def decline(self, request: Any) -> None:
        self._liar.go_on()
        self._liar.refuse()

    def upload_status(self, identity: Any, name: Any) -> Any:
        self._liar.refuse()
        return self._liar.word(service_pb2.UploadStatusResponse(ask_open=True))

    def upload(self, header: Any, chunks: Iterator[Any]) -> Any:
        for _ in chunks:
            pass
        self._liar.refuse()
        self._liar.go_on()
        return self._liar.receipt(header).receipt

    def download(self, identity: Any, sha256: bytes, first_byte: int) -> Any:
        self._liar.refuse()
        words = self._liar.download(sha256)
        return next(words).header, (word.chunk for word in words)

    def interrupt(self) -> None: ...

    def close(self) -> None: ...
