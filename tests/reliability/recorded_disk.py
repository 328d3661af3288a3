"""A disk that forgets what was not synced: what a power cut may leave of a directory, at every moment of some code.

SIGKILL cannot show that an fsync is missing, because the system still has what the process wrote. So the code runs once
while its calls that name, remove and sync files are recorded; from the record every state is made that a power cut may
leave. Nothing but these is taken for granted:

    the content of a file is on the disk after an fsync of it; until then it is the old one, the new one, empty or torn
    a name, or its removal, is on the disk after an fsync of its directory; until then it is there or not, one by one
    a rename is whole or not at all, but for the old name, which may live on beside the new one

Files that are written without such calls, as SQLite does, are outside: give them as `committed`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

Tree = Mapping[str, bytes | None]
"""Files by their path, directories as None."""
Check = Callable[[Path, tuple[Any, ...]], None]
"""Looks at the directory after a cut, and at what the code had said before it; raises what it likes if it is bad."""
Leaves = Callable[[Sequence[bytes]], bytes]
"""What is left of a file; first comes what was synced last, at the end what was written last."""


@dataclass(frozen=True, eq=False)
class Change:
    """A name of a directory that is not on the disk yet, or its removal, which may need another change."""

    directory: int
    name: str
    node: int
    removed: bool = False
    needs: Change | None = None


@dataclass
class _File:
    synced: bytes = b""
    written: bytes = b""


@dataclass(frozen=True)
class Moment:
    """One moment of the code, just before it did something to a name or synced something.

    Attributes:
        before: What it was about to do.
        said: What the code had said by then; see `RecordedDisk.say`.
        committed: Files that are written in other ways, whole as they then were.
    """

    before: str
    said: tuple[Any, ...]
    committed: Mapping[str, bytes]
    files: Mapping[int, _File]
    names: Mapping[int, Mapping[str, int]]
    pending: tuple[Change, ...]

    def cut(self, kept: Sequence[bool], leaves: Leaves) -> Tree:
        """What a power cut leaves at this moment, by what it does to each of `pending` and to each file."""
        names = {number: dict(entries) for number, entries in self.names.items()}
        lost: list[Change] = []
        for change, is_kept in zip(self.pending, kept, strict=True):
            if is_kept and change.needs not in lost:
                _apply(change, names)
            else:
                lost.append(change)
        tree = dict(_walk(_ROOT, "", names, {number: leaves(_leftovers(file)) for number, file in self.files.items()}))
        return {**tree, **{path: data for path, data in self.committed.items() if str(Path(path).parent) in tree}}


_ROOT = 0
_NAMED = {"fsync": 1, "replace": 2, "rename": 2, "mkdir": 1, "unlink": 1, "remove": 1}
"""How many arguments of a call say what it is about."""


def _apply(change: Change, names: dict[int, dict[str, int]]) -> None:
    entries = names[change.directory]
    if not change.removed:
        entries[change.name] = change.node
    elif entries.get(change.name) == change.node:  # the name may be another file's by now
        del entries[change.name]


def _walk(
    number: int, path: str, names: Mapping[int, Mapping[str, int]], left: Mapping[int, bytes]
) -> Iterator[tuple[str, bytes | None]]:
    for name, node in names[number].items():
        if node in names:
            yield f"{path}{name}", None
            yield from _walk(node, f"{path}{name}/", names, left)
        else:
            yield f"{path}{name}", left[node]


def _leftovers(file: _File) -> list[bytes]:
    """What may be in a file after the cut, the loss of everything unsynced first."""
    torn = file.written[: len(file.written) // 2]
    return list(dict.fromkeys([file.synced, b"", torn, file.written])) if file.synced != file.written else [file.synced]


@dataclass
class RecordedDisk:
    """Records what code does to the files under a directory.

    Attributes:
        root: The directory; it is there and durable.
        committed: Reads files that are written in other ways, by their path below `root`; they are left out otherwise.
        deaf_to: The number, from 0, of an fsync that does nothing, as if the code had left it out.
        moments: Every moment so far, and the one after the last call.
        fsyncs: What was synced, in order.
        deaf_since: Number of the first moment after the fsync that did nothing.
    """

    root: Path
    committed: Callable[[], Mapping[str, bytes]] = dict
    ignored: Callable[[str], bool] = lambda name: False
    deaf_to: int | None = None
    moments: list[Moment] = field(default_factory=list)
    fsyncs: list[str] = field(default_factory=list)
    deaf_since: int = 0

    def __post_init__(self) -> None:
        self._numbers = itertools.count(1)
        self._nodes: dict[Path, int] = {self.root: _ROOT}
        self._files: dict[int, _File] = {}
        self._names: dict[int, dict[str, int]] = {_ROOT: {}}
        self._pending: list[Change] = []
        self._said: list[Any] = []

    def say(self, fact: Any) -> None:
        """Notes what the code has achieved or is about to do, for the checks of later moments."""
        self._remember(f"{fact}")
        self._said.append(fact)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Records what this process does until the end of the block."""
        calls: dict[str, Callable[..., None]]
        calls = {"fsync": self._fsync, "replace": self._replace, "rename": self._replace, "mkdir": self._mkdir}
        calls |= {"unlink": self._unlink, "remove": self._unlink}
        with contextlib.ExitStack() as stack:
            for name, double in calls.items():
                stack.enter_context(mock.patch.object(os, name, self._around(getattr(os, name), double)))
            yield
        self._remember("the end")

    def _around(self, real: Callable[..., Any], model: Callable[..., None]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            known = [arg for arg in args[: _NAMED[real.__name__]] if self._is_known(arg)]
            if known:
                self._remember(f"{real.__name__} {' '.join(self._name(item) for item in known)}")
            result = None if known and real.__name__ == "fsync" else real(*args, **kwargs)  # nobody cuts this power
            if known:
                model(*known)
            return result

        return call

    def _is_known(self, given: Any) -> bool:
        if isinstance(given, int):
            return self._path_of(given) is not None
        return isinstance(given, str | Path) and Path(given).is_relative_to(self.root)

    def _path_of(self, descriptor: int) -> Path | None:
        number = os.fstat(descriptor).st_ino
        return next((path for path in self._all() if path.stat().st_ino == number), None)

    def _name(self, given: Any) -> str:
        path = self._path_of(given) if isinstance(given, int) else Path(given)
        assert path is not None
        return str(path.relative_to(self.root))

    def _all(self) -> list[Path]:
        return [self.root, *(path for path in sorted(self.root.rglob("*")) if not self.ignored(path.name))]

    def _remember(self, before: str) -> None:
        self._look()
        files = {number: _File(file.synced, file.written) for number, file in self._files.items()}
        names = {number: dict(entries) for number, entries in self._names.items()}
        self.moments.append(
            Moment(before, tuple(self._said), dict(self.committed()), files, names, tuple(self._pending))
        )

    def _look(self) -> None:
        """Finds new files and what is written to files by now: both come without a call that is recorded."""
        for path in self._all():
            if path not in self._nodes:
                assert path.is_file(), f"{path} was made by a call that is not recorded"
                self._add(path, next(self._numbers))
            if path.is_file():
                self._files.setdefault(self._nodes[path], _File()).written = path.read_bytes()

    def _add(self, path: Path, node: int) -> Change:
        self._nodes[path] = node
        change = Change(self._nodes[path.parent], path.name, node)
        self._pending.append(change)
        return change

    def _mkdir(self, path: str | Path) -> None:
        number = next(self._numbers)
        self._names[number] = {}
        self._add(Path(path), number)

    def _unlink(self, path: str | Path, needs: Change | None = None) -> None:
        node = self._nodes.pop(Path(path))
        self._pending.append(Change(self._nodes[Path(path).parent], Path(path).name, node, True, needs))

    def _replace(self, source: str | Path, target: str | Path) -> None:
        self._unlink(source, needs=self._add(Path(target), self._nodes[Path(source)]))

    def _fsync(self, descriptor: int) -> None:
        path = self._path_of(descriptor)
        assert path is not None
        self.fsyncs.append(str(path.relative_to(self.root)))
        if len(self.fsyncs) - 1 == self.deaf_to:
            self.deaf_since = len(self.moments)
            return
        node = self._nodes[path]
        if node in self._files:
            self._files[node].synced = path.read_bytes()
            return
        for change in list(self._pending):
            if change.directory == node and change.needs not in self._pending:
                _apply(change, self._names)
                self._pending.remove(change)


def _first(left: Sequence[bytes]) -> bytes:
    return left[0]


def _last(left: Sequence[bytes]) -> bytes:
    return left[-1]


def _cuts(moment: Moment) -> Iterator[tuple[str, Tree]]:
    """Every name or none left, each one alone, and each one missing; with all unsynced data and with none."""
    count = len(moment.pending)
    kept = {"no names": [False] * count, "all names": [True] * count}
    for number, change in enumerate(moment.pending):
        if change.needs is None:
            own = [item is change or item.needs is change for item in moment.pending]
            kept |= {f"only name {number}": own, f"all names but {number}": [not item for item in own]}
    for names, mask in kept.items():
        for data, leaves in (("no data", _first), ("all data", _last)):
            yield f"{names} and {data} left of what was not synced", moment.cut(mask, leaves)


def check_every_cut(moments: Sequence[Moment], work: Path, check: Check) -> int:
    """Cuts the power at every moment in many ways, and looks at each state that differs from the others.

    Args:
        moments: Of a `RecordedDisk`.
        work: An empty directory to make the states in.
        check: What must hold.

    Returns:
        How many states there were.

    Raises:
        AssertionError: The first state that the check refuses.
    """
    seen = set()
    for moment in moments:
        for kind, tree in _cuts(moment):
            state = (str(moment.said), frozenset(tree.items()))
            if state not in seen:
                seen.add(state)
                check_cut(tree, moment, kind, work, check)
    return len(seen)


def check_cut(tree: Tree, moment: Moment, kind: str, work: Path, check: Check) -> None:
    """Makes one state and looks at it."""
    target = work / "cut"
    target.mkdir()
    try:
        for path, data in tree.items():
            (target / path).mkdir() if data is None else (target / path).write_bytes(data)
        check(target, moment.said)
    except Exception as error:
        raise AssertionError(f"power cut before {moment.before!r}, {kind}: {error!r}") from error
    finally:
        shutil.rmtree(target)
