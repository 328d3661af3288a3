"""Checks everything that a device uploads before the store keeps it, for both links.

The header is checked against the contract and the ask before any data is accepted. Each chunk is then checked against
its checksum and each value against its rule, which follows from its part's kind and the contract, as it streams in. At
the end, ids must be unique and the SHA-256 must match. An invalid upload is rejected as a whole, with a code and a
message that names device, tensor and row.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping

import numpy as np

from fleetdistill import knowledge  # registers the kinds  # noqa: F401
from fleetdistill.errors import PayloadTooLargeError, RefusedError, WireError
from fleetdistill.wire import payload as wire
from fleetdistill.wire.codes import Code
from fleetdistill.wire.compression import unpack
from fleetdistill.wire.digests import Check
from fleetdistill.wire.kind import KINDS, Array, kind_of, on_the_wire
from fleetdistill.wire.payload import DTYPES, DataSource, Slot, elements_of
from fleetdistill.wire.schema import ROWS, TensorSchema
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2
from fleetdistill_server.store.blobs import Staging

TENSOR = "tensor"
"""Kind that marks an entry of an ask's `expects` as the path of a column; all other entries name parts."""
_MAX_QUOTED = 5


class Ingest:
    """Receives one payload chunk by chunk into a staging area and checks it.

    Args:
        device: Id of the sending device, for error messages.
        header: The payload's header.
        contract: The run's contract, which the payload must fit.
        expects: Maps the names of the expected parts to their kinds; a part "metrics" is always allowed. If only some
            of the contract's feature columns are expected, `PART/features/COLUMN` maps to "tensor" for each of them; if
            only some of a model's tensors are, `PART/PATH` does.
        samples: Number of samples that the device declared; None if it declared none.

    Raises:
        RefusedError: The header does not fit the contract or the ask.
    """

    def __init__(
        self,
        device: str,
        header: knowledge_pb2.PayloadHeader,
        contract: contract_pb2.Contract,
        expects: Mapping[str, str],
        samples: int | None = None,
    ) -> None:
        self._device = device
        self._samples = samples
        self.header = header
        self._contract = contract
        self.slots = self._slots()
        with self._naming_device():
            _check_size(header, self.slots, contract.max_upload_bytes)
        self._check_kinds(expects)
        with self._naming_device():
            wanted = {path for path, kind in expects.items() if kind == TENSOR}
            self._rules = {
                path: rule for part in header.parts.parts for path, rule in rules_of(part, contract, wanted).items()
            }
        for slot in self.slots:
            self._check_slot(slot)
        self._check_rows()
        self._staging: Staging | None = None
        self._digest = self._check_of(header)
        self._number = 0
        self._carry = b""

    def start(self, staging: Staging, earlier: Ingest | None = None) -> int:
        """Resumes from the bytes in a staging area; returns the offset of the first missing byte.

        Staged bytes are read and checked again unless `earlier` has checked the same bytes of the same payload.

        Raises:
            RefusedError: The staged bytes are damaged or longer than the payload.
        """
        self._staging = staging
        held = staging.length
        if earlier is not None and earlier.header == self.header and earlier._examined == held:
            self._digest = earlier._digest
            self._number = earlier._number
            self._carry = earlier._carry
            self._examined = held
            return held
        if held > self._total:
            raise self._refuse(Code.BAD_MESSAGE, f"{held} bytes are staged, but the payload has {self._total}")
        try:
            for piece in wire.pieces(staging, 0, held):
                self._examine(piece)
        except RefusedError as refusal:  # these bytes passed the checks on arrival, so the disk has changed them
            text = f"the staged part of the upload is damaged ({refusal}); send the upload again"
            raise self._refuse(Code.CHECKSUM, text) from refusal
        return held

    def feed(self, chunk: wire.AnyChunk) -> int:
        """Checks and stages the next chunk; returns its size on the wire, in bytes.

        Raises:
            RefusedError: The checksum, order, size or a value is wrong.
            StoreError: The disk is full.
        """
        assert self._staging is not None
        sent = chunk.data  # read once, because each access copies the field
        if wire.checksum(sent) != chunk.crc32c:
            text = f"a chunk at byte {chunk.offset} fails its CRC-32C check; send it again"
            raise self._refuse(Code.CHECKSUM, text, wire.slot_at(self.slots, chunk.offset))
        data = self._unpack(chunk, sent)
        self._check_place(chunk, len(data))
        self._examine(data)
        self._staging.append(data)
        return len(sent)

    def finish(self) -> None:
        """Runs the checks that need the whole payload.

        Raises:
            RefusedError: Bytes are missing, ids are not unique, the SHA-256 differs, or tensors do not fit each other.
        """
        assert self._staging is not None
        if self._staging.length != self._total:
            have = self._staging.length
            raise self._refuse(Code.INCOMPLETE, f"the stream ended after {have} of {self._total} bytes")
        if not self._digest.matches():
            label = self._digest.algorithm.label
            raise self._refuse(Code.CHECKSUM, f"the {label} of parts and data does not match the header")
        self._check_whole(self._staging)

    def check(self, source: DataSource) -> None:
        """Checks the values of a payload that was encoded in this process, whose digest is therefore known.

        Raises:
            RefusedError: A value is wrong, ids are not unique, or tensors do not fit each other.
        """
        for slot in self.slots:
            self._check_values(slot, elements_of(slot, source), 0)
        self._check_whole(source)

    def _check_whole(self, source: DataSource) -> None:
        for slot in self.slots:
            if self._rules[slot.path].unique:
                self._check_unique(slot, source)
            if self._rules[slot.path].row_sums is not None:
                self._check_row_sums(slot, source)
        by_path = {slot.path: slot for slot in self.slots}
        for part in self.header.parts.parts:
            with self._naming_device():
                check_data(part, self._contract, by_path, source, self._samples)

    @property
    def _total(self) -> int:
        return self.slots[-1].stop if self.slots else 0

    def _check_of(self, header: knowledge_pb2.PayloadHeader) -> Check:
        """Returns the check of the payload's digest; a header has one, so that no other payload's name can be taken."""
        if header.sha256 and header.blake3:
            raise self._refuse(Code.BAD_MESSAGE, "the header has a SHA-256 and a BLAKE3, expected one of them")
        try:
            return Check(header)
        except WireError as error:
            raise self._refuse(Code.BAD_MESSAGE, str(error)) from error

    def _slots(self) -> tuple[Slot, ...]:
        try:
            return wire.slots(self.header.parts)
        except WireError as error:
            raise self._refuse(Code.BAD_MESSAGE, str(error)) from error

    def _check_kinds(self, expects: Mapping[str, str]) -> None:
        kinds = {part.name: part.WhichOneof("kind") for part in self.header.parts.parts}
        if len(kinds) != len(self.header.parts.parts):
            raise self._refuse(Code.BAD_MESSAGE, "two parts have the same name")
        wanted = {name: kind for name, kind in expects.items() if kind != TENSOR}
        if "metrics" in kinds:
            wanted.setdefault("metrics", "metrics")
        if kinds != wanted:
            raise self._refuse(
                Code.BAD_MESSAGE, f"the answer has parts {_list_names(kinds)}, expected {_list_names(wanted)}"
            )

    def _check_slot(self, slot: Slot) -> None:
        rule = self._rules.get(slot.path)
        if rule is None:
            raise self._refuse(Code.BAD_TENSOR, f"tensor {slot.path!r} is not part of the contract", slot)
        if slot.dtype not in rule.types:
            expected = " or ".join(dtype.name for dtype in rule.types)
            raise self._refuse(Code.BAD_TENSOR, f"{slot.path} is {slot.dtype.name}, expected {expected}", slot)
        if rule.quantized != (slot.channels is not None):
            forms = ("raw", "quantised per channel")
            form, expected = forms if rule.quantized else forms[::-1]
            raise self._refuse(Code.BAD_TENSOR, f"{slot.path} is {form}, expected {expected}", slot)
        if rule.shape is not None and not _fits(slot.shape, rule.shape):
            text = f"{slot.path} has shape {list(slot.shape)}, expected {_shape_text(rule.shape)}"
            raise self._refuse(Code.BAD_TENSOR, text, slot)

    def _check_rows(self) -> None:
        rows: dict[str, Slot] = {}
        for slot in self.slots:
            shape = self._rules[slot.path].shape
            if shape is None or shape[:1] != (ROWS,):
                continue
            if slot.shape[0] == 0:
                raise self._refuse(Code.BAD_TENSOR, f"{slot.path} has no rows, expected at least 1", slot)
            self._check_own_rows(slot)
            first = rows.setdefault(slot.path.split("/")[0], slot)
            if slot.shape[0] != first.shape[0]:
                text = f"{slot.path} has {slot.shape[0]} rows, but {first.path} has {first.shape[0]}; they must agree"
                raise self._refuse(Code.BAD_TENSOR, text, slot)

    def _check_own_rows(self, slot: Slot) -> None:
        """Checks that a tensor of samples has at most as many rows as the device declared samples."""
        if KINDS[slot.kind].rows_are_samples and self._samples is not None and slot.shape[0] > self._samples:
            text = f"{slot.path} has {slot.shape[0]} rows, but the device declared {self._samples} samples"
            # If this server was restored from a backup, the declaration may be newer; the device then checks in again.
            raise self._refuse(Code.BAD_VALUE, text, slot, check_in="again")

    def _unpack(self, chunk: wire.AnyChunk, sent: wire.Data) -> wire.Data:
        try:
            return unpack(sent, chunk.compression, wire.CHUNK_BYTES)
        except WireError as error:
            raise self._refuse(Code.BAD_MESSAGE, str(error), wire.slot_at(self.slots, chunk.offset)) from error

    def _check_place(self, chunk: wire.AnyChunk, size: int) -> None:
        assert self._staging is not None
        if not 1 <= size <= wire.CHUNK_BYTES:
            raise self._refuse(Code.BAD_MESSAGE, f"a chunk has {size} bytes, must be 1 to {wire.CHUNK_BYTES}")
        if chunk.offset + size > self._total:
            text = f"a chunk ends at byte {chunk.offset + size}, but the payload has {self._total} bytes"
            raise self._refuse(Code.BAD_MESSAGE, text)
        if chunk.offset != self._staging.length:
            text = f"a chunk starts at byte {chunk.offset}, expected {self._staging.length}"
            raise self._refuse(Code.OUT_OF_STEP, text, wire.slot_at(self.slots, chunk.offset))

    def _examine(self, data: wire.Data) -> None:
        """Hashes bytes in order and checks each complete element; `_carry` holds the start of an incomplete one."""
        self._digest.update(data)
        while len(data):
            while self._examined >= self.slots[self._number].stop:
                self._number += 1
            slot = self.slots[self._number]
            piece, data = data[: slot.stop - self._examined], data[slot.stop - self._examined :]
            first = (self._examined - len(self._carry) - slot.start) // slot.dtype.itemsize
            self._examined += len(piece)
            joined = self._carry + piece if self._carry else piece
            whole = len(joined) - len(joined) % slot.dtype.itemsize
            self._check_values(slot, np.frombuffer(joined[:whole], slot.dtype), first)
            self._carry = bytes(joined[whole:])

    _examined = 0

    def _check_values(self, slot: Slot, values: np.ndarray, first: int) -> None:
        rule = self._rules[slot.path]
        if values.dtype.kind == "f" and not _all_finite(values):
            self._refuse_where(_non_finite(values), values, first, slot, f"non-finite {rule.what}")
        if rule.low is not None or rule.high is not None:
            low = rule.low if rule.low is not None else -math.inf
            high = rule.high
            bad = values < low if high is None else (values < low) | (values >= high)
            bounds = f"outside [{low:g}, {high:g})" if high is not None else f"below {low:g}"
            self._refuse_where(bad, values, first, slot, f"{rule.what} {{value}} {bounds}")
        if rule.above is not None:
            text = f"{rule.what} {{value}} not above {rule.above:g}"
            self._refuse_where(values <= rule.above, values, first, slot, text)

    def _refuse_where(self, bad: np.ndarray, values: np.ndarray, first: int, slot: Slot, text: str) -> None:
        if not bad.any():
            return
        at = int(bad.argmax())
        row = (first + at) // max(math.prod(slot.shape[1:]), 1)
        text = text.replace("{value}", f"{values[at].item():g}")
        raise self._refuse(Code.BAD_VALUE, f"{text} at row {row} of {slot.path}", slot, row=str(row))

    def _check_unique(self, slot: Slot, source: DataSource) -> None:
        def read() -> Iterator[np.ndarray]:
            return (np.frombuffer(piece, slot.dtype) for piece in wire.pieces(source, slot.start, slot.stop))

        result = first_repeat(read, math.prod(slot.shape))
        if result is not None:
            value, row = result
            text = f"duplicate {self._rules[slot.path].what} {value} at row {row} of {slot.path}"
            raise self._refuse(Code.BAD_VALUE, text, slot, row=str(row))

    def _check_row_sums(self, slot: Slot, source: DataSource) -> None:
        rule = self._rules[slot.path]
        assert rule.row_sums is not None
        least, most = rule.row_sums
        row_bytes = slot.nbytes // slot.shape[0]
        rows = max(wire.CHUNK_BYTES // row_bytes, 1)  # rows per read
        for first in range(0, slot.shape[0], rows):
            start = slot.start + first * row_bytes
            data = source.read(start, min(rows * row_bytes, slot.stop - start))
            sums = np.frombuffer(data, slot.dtype).reshape(-1, row_bytes // slot.dtype.itemsize).sum(1, np.float64)
            bad = (sums < least) | (sums > most)
            if bad.any():
                at = int(bad.argmax())
                text = f"{rule.what} sum to {sums[at]:g} at row {first + at} of {slot.path}"
                text += f", expected at most {most:g}" if sums[at] > most else f", expected at least {least:g}"
                raise self._refuse(Code.BAD_VALUE, text, slot, row=str(first + at))

    def _refuse(self, code: Code, text: str, slot: Slot | None = None, **details: str) -> RefusedError:
        if slot is not None:
            details["tensor"] = slot.path
        return RefusedError(code, f"device {self._device}: {text}", {"device": self._device, **details})

    @contextlib.contextmanager
    def _naming_device(self) -> Iterator[None]:
        try:
            yield
        except RefusedError as refusal:
            raise self._refuse(Code(refusal.code), str(refusal), None, **refusal.details) from refusal


def _check_size(header: knowledge_pb2.PayloadHeader, slots: tuple[Slot, ...], limit: int) -> None:
    size = slots[-1].stop if slots else 0
    if size > limit:
        raise RefusedError(Code.TOO_LARGE, str(PayloadTooLargeError(size, limit)))
    if header.data_bytes != size:
        text = f"the header declares {header.data_bytes} data bytes, but its tensors have {size}"
        raise RefusedError(Code.BAD_MESSAGE, text)


def _all_finite(values: np.ndarray) -> bool:
    """Returns whether all values are finite, in one pass fewer than `_non_finite`, which locates the others."""
    return not _non_finite(values).any() if values.dtype == np.float16 else bool(np.isfinite(values).all())


def _non_finite(values: np.ndarray) -> np.ndarray:
    if values.dtype != np.float16:
        return np.asarray(~np.isfinite(values))
    # A float16 with all exponent bits set is NaN or infinite; ten times as fast as numpy.isfinite on float16.
    return np.asarray((values.view(np.uint16) & 0x7C00) == 0x7C00)


def _fits(shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    return len(shape) == len(expected) and all(want in (ROWS, have) for have, want in zip(shape, expected, strict=True))


def _shape_text(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join("N" if size == ROWS else str(size) for size in shape) + "]"


def _list_names(parts: Mapping[str, str | None]) -> str:
    """Formats the first parts and their kinds for a message, with names cut to 64 characters."""
    listed = ", ".join(f"{name[:64]} ({kind})" for name, kind in sorted(parts.items())[:_MAX_QUOTED]) or "none"
    return listed if len(parts) <= _MAX_QUOTED else f"{listed} and {len(parts) - _MAX_QUOTED} more"


def rules_of(
    part: knowledge_pb2.Part, contract: contract_pb2.Contract, wanted: Collection[str] = ()
) -> dict[str, TensorSchema]:
    """Returns the schema of each tensor of a part by path.

    Args:
        part: The uploaded part.
        contract: The run's contract.
        wanted: Paths of the feature columns, or of a model's tensors, that the ask expects; empty for all of the
            contract's.

    Raises:
        RefusedError: A tensor that the contract requires is missing, or another field does not fit.
    """
    kind = kind_of(part)
    tensors = on_the_wire(kind, kind.expected(part, contract, wanted), DTYPES[contract.knowledge_type])
    return {f"{part.name}/{path}": rule for path, rule in tensors.items()}


def check_data(
    part: knowledge_pb2.Part,
    contract: contract_pb2.Contract,
    slots: Mapping[str, Slot],
    source: DataSource,
    samples: int | None,
) -> None:
    """Runs the checks of a part that involve several tensors.

    Args:
        part: The uploaded part.
        contract: The run's contract.
        slots: The payload's tensors by path.
        source: The tensors' data.
        samples: Number of samples that the device declared; None if it declared none.

    Raises:
        RefusedError: The tensors do not fit each other or the contract.
    """
    kind_of(part).check_data(part, contract, _StagedData(part.name, slots, source), samples)


class _StagedData:
    """Implements `fleetdistill.wire.kind.PartData` on top of staged data."""

    def __init__(self, part: str, slots: Mapping[str, Slot], source: DataSource) -> None:
        self._part = part
        self._slots = slots
        self._source = source

    def __contains__(self, name: str) -> bool:
        return f"{self._part}/{name}" in self._slots

    def array(self, name: str) -> Array:
        return wire.array_of(self._slots[f"{self._part}/{name}"], self._source)


# --- Finds duplicates in a column that does not fit in memory, by reading the column repeatedly.

ROOM = 1 << 20
"""Default number of values that one pass over the column holds in memory."""
_MAX_READINGS = 64
Read = Callable[[], Iterator[np.ndarray]]


def first_repeat(read: Read, count: int, room: int = ROOM) -> tuple[int, int] | None:
    """Returns the smallest duplicated value and the row of its second occurrence; None if all values differ.

    A strictly increasing column is read once. Any other column is read once per `room` values, smallest values first,
    but at most about 64 times: for longer columns, each pass holds a 64th of the values. Memory use is twice the values
    held: 16 MiB with the default `room` for columns up to 512 MiB, and 1/32 of the column above that.

    Args:
        read: Returns the int64 column from its start, as an iterator over non-empty pieces.
        count: Length of the column.
        room: Number of values to hold per pass, at least 2.
    """
    if _is_increasing(read):
        return None
    value = _smallest_repeat(read, max(room, -(-count // _MAX_READINGS)))
    return None if value is None else (value, _second_row(read, value))


def _is_increasing(read: Read) -> bool:
    last = None
    for piece in read():
        if (last is not None and piece[0] <= last) or not (piece[1:] > piece[:-1]).all():
            return False
        last = piece[-1]
    return True


def _smallest_repeat(read: Read, room: int) -> int | None:
    low = None
    buffer = np.empty(2 * room, np.int64)
    while True:
        held, is_all = _smallest(read, low, buffer)
        repeated = np.flatnonzero(held[1:] == held[:-1])
        if len(repeated):
            return int(held[repeated[0]])
        if is_all:
            return None
        low = held[-1]  # included again, because equal values may not have fitted


def _smallest(read: Read, low: np.int64 | None, buffer: np.ndarray) -> tuple[np.ndarray, bool]:
    """Returns up to half a buffer of the smallest values from `low` on, sorted, and whether no larger values remain."""
    room = len(buffer) // 2
    used = 0
    high = None
    for piece in read():
        wanted = piece if low is None else piece[piece >= low]
        wanted = wanted if high is None else wanted[wanted <= high]
        while len(wanted):
            taken = wanted[: len(buffer) - used]
            buffer[used : used + len(taken)] = taken
            used, wanted = used + len(taken), wanted[len(taken) :]
            if used == len(buffer):
                buffer.partition(room - 1)
                used, high = room, buffer[room - 1]
    buffer[:used].sort()
    return buffer[: min(used, room)], high is None and used <= room


def _second_row(read: Read, value: int) -> int:
    rows: list[int] = []
    first = 0
    for piece in read():
        rows += (first + np.flatnonzero(piece == value)[:2]).tolist()
        if len(rows) > 1:
            return rows[1]
        first += len(piece)
    raise AssertionError(f"{value} is no longer duplicated; the column changed between two passes")
