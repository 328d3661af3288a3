"""The table of sample ids: the same sample keeps its id across rounds and restarts.

Ids are numbers in the order in which samples were first sent, so they contain nothing about a sample. The table stores
24 bytes for each current sample; it never leaves the device.
"""

from __future__ import annotations

import struct
from collections import defaultdict

import google_crc32c
import numpy as np

from fleetdistill.errors import StateError
from fleetdistill.state.files import Files
from fleetdistill.state.format import damaged_error

FILE = "sample_ids.bin"
_HEADER = struct.Struct("<8sqqqI")  # magic, next id, samples, bytes of a digest, CRC-32C with 0 in this place
_MAGIC = b"FDIDS\0\0\1"


class SampleIds:
    """Gives each sample of a device an id, `int64` from 0; an id is never used for another sample.

    Args:
        files: The state directory.
    """

    def __init__(self, files: Files) -> None:
        self._files = files

    def of(self, digests: np.ndarray) -> np.ndarray:
        """Returns the ids of samples, after storing the ids of new ones durably and removing those of missing ones.

        Equal samples have ids in the order of their rows; if one of them is removed, the last id of them is.

        Args:
            digests: `[N, D]` uint8, the digest of each sample.

        Returns:
            `[N]` int64, unique.

        Raises:
            StateError: The table is damaged, or cannot be written.
        """
        following, known = self._load()
        if known is not None and np.array_equal(known[0], digests):
            return known[1]
        available: dict[bytes, list[int]] = defaultdict(list)
        if known is not None:
            for digest, number in zip(known[0], known[1].tolist(), strict=True):
                available[digest.tobytes()].append(number)
        ids = np.empty(len(digests), np.int64)
        for row, digest in enumerate(digests):
            earlier = available.get(digest.tobytes())
            if earlier:
                ids[row] = earlier.pop(0)
            else:
                ids[row], following = following, following + 1
        self._save(following, digests, ids)
        return ids

    def check(self) -> None:
        """Raises StateError if the table is damaged."""
        self._load()

    def _load(self) -> tuple[int, tuple[np.ndarray, np.ndarray] | None]:
        """Returns the next id, and the stored digests and ids; 0 and None without a table."""
        data = self._files.load(FILE)
        if data is None:
            return 0, None
        try:
            magic, following, count, width, crc = _HEADER.unpack_from(data)
            digests = np.frombuffer(data, np.uint8, count * width, _HEADER.size).reshape(count, width)
            ids = np.frombuffer(data, "<i8", count, _HEADER.size + count * width).astype(np.int64)
        except (struct.error, ValueError) as error:
            raise self._damaged() from error
        unsealed = _HEADER.pack(magic, following, count, width, 0) + data[_HEADER.size :]
        if google_crc32c.value(unsealed) != crc:
            raise self._damaged()
        if magic != _MAGIC or len(data) != _HEADER.size + count * (width + 8) or (ids >= following).any():
            raise self._damaged()
        return following, (digests, ids)

    def _save(self, following: int, digests: np.ndarray, ids: np.ndarray) -> None:
        body, fields = digests.tobytes() + ids.astype("<i8").tobytes(), (_MAGIC, following, len(ids), digests.shape[1])
        crc = google_crc32c.value(_HEADER.pack(*fields, 0) + body)
        self._files.save(FILE, _HEADER.pack(*fields, crc) + body, mode=0o600)

    def _damaged(self) -> StateError:
        path = self._files.directory / FILE
        return damaged_error(path, "earlier sample ids are unknown")
