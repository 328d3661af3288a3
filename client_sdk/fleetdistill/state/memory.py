"""The state of a simulated device in memory: no files, no fsync, and no record of what was sent.

`MemoryStorage` has the interface of `Storage`, so the same device runs on either. What must outlive the process is in
`contents`, which the simulation saves after each round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from fleetdistill.errors import NoRoomError
from fleetdistill.state.directory import MAX_SPOOL_BYTES, Storage
from fleetdistill.state.files import Files
from fleetdistill.state.outbox import Outbox, Outcome, Pending
from fleetdistill.state.sent_ledger import Sent, SentLedger
from fleetdistill.wire.codec import Payload

__all__ = ["MemoryStorage"]


class MemoryStorage(Storage):
    """State of a device without a state directory.

    Args:
        directory: Directory of exported models, created when needed; names the device in messages.
        contents: `contents` of an earlier object, to continue from.
        max_answer_bytes: Maximum size of an answer with its states, in bytes.

    Attributes:
        contents: Content of each file that a state directory would have, by name. Complete while no answer is pending.
        changed: Whether `contents` has changed since the caller last set this to False.
    """

    has_directory = False

    def __init__(
        self, directory: Path, contents: Mapping[str, bytes] | None = None, max_answer_bytes: int = MAX_SPOOL_BYTES
    ) -> None:
        Files.__init__(self, directory)  # without the lock and the folders of a state directory
        self.contents = dict(contents or {})
        self.changed = False
        self.outbox = _MemoryOutbox(self, max_answer_bytes)
        self.ledger = _NoLedger(self)

    def load(self, name: str) -> bytes | None:
        return self.contents.get(name)

    def remove(self, name: str) -> None:
        if self.contents.pop(name, None) is not None:
            self.changed = True

    def wipe(self, name: str) -> None:
        self.remove(name)

    def save(self, name: str, data: bytes, mode: int = 0o644) -> None:
        self.contents[name] = data
        self.changed = True

    def note(self, name: str, data: bytes) -> None:
        self.save(name, data)

    def close(self) -> None:
        return


class _MemoryOutbox(Outbox):
    """The answer in progress, as the objects that the device made."""

    def __init__(self, storage: MemoryStorage, max_answer_bytes: int) -> None:
        super().__init__(storage, max_answer_bytes)
        self._contents = storage
        self._answer: tuple[Pending, Payload, bytes, bytes | None] | None = None
        self._tries = 0
        self._outcome_due: Outcome | None = None
        self._last: Outcome | None = None

    def put(self, pending: Pending, payload: Payload, candidate: bytes, delivered: bytes | None = None) -> None:
        self._check_vacant(pending)
        needed = payload.data_bytes + len(candidate) + len(delivered or b"")
        if needed > self._max_answer_bytes:
            raise NoRoomError(
                f"the answer and its state are {needed} bytes, the limit is {self._max_answer_bytes} bytes; "
                "raise Budgets(spool_bytes=...)"
            )
        self._answer, self._tries = (pending, payload, candidate, delivered), 0

    def pending(self) -> Pending | None:
        return None if self._answer is None else self._answer[0]

    def stored(self) -> Pending | None:
        return self.pending()

    def count_try(self) -> int:
        self._tries += 1
        return self._tries

    @property
    def tries(self) -> int:
        return self._tries

    @contextlib.contextmanager
    def answer(self) -> Iterator[Payload]:
        assert self._answer is not None  # opened only for the pending answer
        yield self._answer[1]

    def promote(self, *, replaced: bool) -> None:
        assert self._answer is not None  # only a pending answer has a receipt
        _, _, candidate, delivered = self._answer
        if replaced and delivered is not None:
            self._contents.save("delivered.safetensors", delivered)
        self._contents.save("state.safetensors", candidate)
        self._answer = None

    def drop(self) -> None:
        self._answer = None

    def save_outcome(self, outcome: Outcome) -> None:
        self._outcome_due = outcome

    def outcome(self) -> Outcome | None:
        return self._outcome_due

    def mark_reported(self) -> None:
        self._last, self._outcome_due = self._outcome_due, None

    def last_outcome(self) -> Outcome | None:
        return self._outcome_due or self._last

    def next_attempt(self, number: int, step_number: int) -> int:
        last = self._last
        return last.pending.attempt + 1 if last is not None and last.pending.name[:2] == (number, step_number) else 1


class _NoLedger(SentLedger):
    """Records nothing: a simulated device has no user who could ask what it has sent."""

    def begin_answer(self, entry: Sent) -> None:
        return

    def begin_check_in(self, entry: Sent) -> None:
        return

    def end_check_in(self, run: str) -> None:
        return

    def end_answer(self, run: str, name: tuple[int, int, int], *, receipt: str = "", code: str = "") -> None:
        return

    def record(self, entry: Sent) -> None:
        return
