"""Weights that several files of a state directory have: they are stored once, and the other files refer to them.

    weights/SHA256              a device's first state: a frozen extractor, and the app's own network
    downloads/DIGEST.payload    the extractor file of a device without PyTorch

These files never change. A state file refers to tensors in them as follows; its content with the tensors is the same
to the byte, so that its checksum covers them. ONNX files refer to them by `fleetdistill.deployment.external_weights`.

    fleetdistill weights 1 SIZE\\n    SIZE is that of the list
    a list in JSON: [bytes of the rest, file, offset, bytes of the file], ..., [bytes of the rest]
    the rest
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from fleetdistill.errors import StateError
from fleetdistill.state.disk import disk_errors
from fleetdistill.state.durable import make_directory
from fleetdistill.state.files import Files

__all__ = ["load_state"]

WEIGHTS = "weights"
"""Folder in the state directory."""
MIN_FILE_BYTES = 1 << 20
"""Smaller files are not referred to, so that the files of a small model stay whole."""
_MIN_TENSOR_BYTES = 4096
_NEAR_BYTES = 1 << 20
_MARK = b"fleetdistill weights 1 "
Place = tuple[str, int]
"""File and offset of a tensor."""


class SharedWeights:
    """The files that others may refer to, mapped.

    Args:
        files: Content of each file by its path within the state directory.
    """

    def __init__(self, files: dict[str, mmap.mmap]) -> None:
        self._files = files
        self._next = dict.fromkeys(files, 0)  # tensors mostly have the same order

    def find(self, tensor: bytes) -> Place | None:
        """Returns where the bytes of a tensor are; None if they are small or nowhere."""
        if len(tensor) < _MIN_TENSOR_BYTES:
            return None
        for limit in (_NEAR_BYTES + len(tensor), None):  # first a few bytes of each file, because most tensors follow
            for name, content in self._files.items():
                first = 0 if limit is None else self._next[name]
                at = content.find(tensor, first, len(content) if limit is None else first + limit)
                if at >= 0:
                    self._next[name] = at + len(tensor)
                    return name, at
        return None


@contextmanager
def shared_weights(directory: Path, extractor: bytes = b"") -> Iterator[SharedWeights]:
    """Context manager that opens the files to which others may refer.

    Args:
        directory: The state directory.
        extractor: Digest of the run's extractor file, which a device without PyTorch has downloaded.
    """
    paths = [*sorted((directory / WEIGHTS).glob("?" * 64)), directory / f"downloads/{extractor.hex()}.payload"]
    with ExitStack() as stack:
        files = {}
        for path in paths:
            if path.is_file() and path.stat().st_size >= MIN_FILE_BYTES:
                file = stack.enter_context(path.open("rb"))
                mapped = stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
                files[path.relative_to(directory).as_posix()] = mapped
        yield SharedWeights(files)


def keep_weights(files: Files, states: list[bytes]) -> None:
    """Stores states that have weights which later ones have too; deletes those of a start that a crash has ended."""
    if not files.has_directory:
        return
    with disk_errors(files.directory):
        make_directory(files.directory / WEIGHTS)
        for path in (files.directory / WEIGHTS).iterdir():
            path.unlink()
    for state in states:
        rest = without_weights(files, state)
        if len(rest) >= MIN_FILE_BYTES:
            files.save(f"{WEIGHTS}/{hashlib.sha256(rest).hexdigest()}", rest)


def without_weights(files: Files, state: bytes) -> bytes:
    """Returns a state that refers to the device's shared weights; unchanged if it has none, or another format."""
    if not files.has_directory or state[8:9] != b"{":
        return state
    start = 8 + int.from_bytes(state[:8], "little")
    header = json.loads(state[8:start])
    offsets = sorted(tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__")
    references: list[list[int | str]] = []
    rest, done = [], 0
    with disk_errors(files.directory), shared_weights(files.directory) as shared:
        for first, last in offsets:
            tensor = state[start + first : start + last]
            if (place := shared.find(tensor)) is not None:
                rest.append(state[done : start + first])
                references.append([len(rest[-1]), *place, len(tensor)])
                done = start + last
    if not references:
        return state
    rest.append(state[done:])
    listed = json.dumps([*references, [len(rest[-1])]]).encode()
    return b"".join([_MARK, str(len(listed)).encode(), b"\n", listed, *rest])


def with_weights(directory: Path, state: bytes) -> bytes:
    """Returns the content of a state file with the weights that it refers to.

    Raises:
        StateError: The file is damaged, or one to which it refers is missing or damaged.
    """
    if not state.startswith(_MARK):
        return state
    pieces, read = [], dict[str, bytes]()
    try:
        line = state.index(b"\n") + 1
        at = line + int(state[len(_MARK) : line])
        for size, *reference in json.loads(state[line:at]):
            pieces.append(state[at : at + size])
            at += size
            if reference:
                name, offset, length = reference
                if name not in read:
                    read[name] = _checked(directory, name)
                pieces.append(read[name][offset : offset + length])
    except (ValueError, TypeError) as error:
        raise StateError(f"the saved state is damaged: its list of weights cannot be read: {error}") from error
    return b"".join(pieces)


def _checked(directory: Path, name: str) -> bytes:
    data = Files(directory).load(name)
    if data is None:
        raise StateError(f"the saved state is damaged: {name}, to which it refers, is missing")
    if hashlib.sha256(data).hexdigest() != name.removeprefix(f"{WEIGHTS}/"):
        raise StateError(f"the saved state is damaged: {name}, to which it refers, does not match its digest")
    return data


def load_state(files: Files, name: str) -> bytes | None:
    """Returns the content of a state file with its weights, or None if it does not exist. Raises StateError."""
    state = files.load(name)
    return None if state is None else with_weights(files.directory, state)
