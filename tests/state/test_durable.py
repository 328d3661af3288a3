"""Writes to files without a buffer: nothing is lost when the system writes only a part."""

from __future__ import annotations

import io

import pytest

from fleetdistill.state.durable import write_all


class Halting(io.RawIOBase):
    """A file whose every write takes at most some bytes."""

    def __init__(self, most: int) -> None:
        self.most, self.written = most, bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        part = bytes(data[: self.most])
        self.written += part
        return len(part)


@pytest.mark.parametrize("most", [1, 3, 7, 100])
@pytest.mark.parametrize("kind", [bytes, memoryview])
def test_all_is_written_although_each_write_takes_a_part(most: int, kind: type) -> None:
    file = Halting(most)
    write_all(file, kind(b"seven b"))
    write_all(file, kind(b""))
    assert file.written == b"seven b"
