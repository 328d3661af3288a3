"""Named points of the code where a test makes a process fail, for the proof that no crash loses an upload.

`hit("device.promote.between-renames")` stands before or after a durable step. Points are switched on by the
environment variable FLEETDISTILL_FAILPOINTS, read once when a process starts, or by `switched_on` within a test's own
process; never by a device, a message or a run's configuration. While all are off, which is always so in production,
`hit` is an empty function.

    FLEETDISTILL_FAILPOINTS="front.receipt.before-send=kill@3;disk.before-fsync=error:ENOSPC"

Each entry is `name=action` or `name=action@n`: only at the n-th hit of that name in this process, from 1. The name `*`
stands for any point and counts the hits of all together. Actions:

    kill            SIGKILL to this very process
    exit:STATUS     ends the process at once with an exit status (1 if left out), without cleaning up
    sleep:SECONDS   stands still
    error:NAME      raises OSError with that errno, such as ENOSPC for a full disk (EIO if left out)

docs/explanation/durability.md tells what may be lost at each point, and which test kills there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fleetdistill.errors import ConfigurationError

VARIABLE = "FLEETDISTILL_FAILPOINTS"
ANY = "*"

FAILPOINTS = {
    # Both ends: every file that must be whole is written, fsynced, renamed, and its directory fsynced.
    "disk.before-fsync": "a file is written, its content is not yet fsynced",
    "disk.before-rename": "a file is fsynced under its temporary name",
    "disk.before-directory-fsync": "a file is renamed, its directory is not yet fsynced",
    "disk.after-directory-fsync": "a file is durable under its name",
    # The front takes an upload. The engine stages the payloads of its asks through the same code.
    "blob.before-staged-write": "data of a payload are checked, not yet in the staging file",
    "blob.after-staged-write": "data of a payload are in the staging file",
    "blob.before-commit": "a payload is staged whole, not yet durable under its digest",
    "blob.after-commit": "a payload is durable under its digest, no row speaks of it yet",
    "front.receipt.before-commit": "the receipt's row is written within the open transaction",
    "front.commit.before": "the commit thread has run a group of jobs, the transaction is still open",
    "front.commit.after": "a group is committed, none of its calls has an answer yet",
    "front.receipt.before-send": "the receipt is committed, the engine not woken, the device not told",
    # The engine runs rounds.
    "engine.contract.before-commit": "the payloads of the contract are stored, the contract is not published",
    "engine.contract.after-commit": "the contract is published, the run has no checkpoint yet",
    "engine.start.before-commit": "enough devices are present, no round is open",
    "engine.start.after-commit": "a round is open with its cohort, nothing is asked",
    "engine.asks.before-commit": "the payloads of a step's asks are stored, the asks are not written",
    "engine.asks.after-commit": "the asks of a step are written, the front is not told",
    "engine.answer.after-read": "an answer is read, the method does not have it yet",
    "engine.short.before-commit": "a round fell short, its close is written within the open transaction",
    "engine.short.after-commit": "a round is closed as short, the state of before is not restored yet",
    "engine.quarantine.before-move": "an answer's payload is found damaged or gone, nothing is done about it",
    "engine.quarantine.after-move": "the damaged file is in quarantine, the answer still counts",
    "engine.quarantine.after-commit": "the answer is reported and its device asked again, the front is not told",
    "engine.checkpoint.before-write": "a round's answers are in the method's state, nothing of it is kept",
    "engine.checkpoint.after-write": "the checkpoint after a round is durable, the run does not name it yet",
    "engine.close.before-commit": "the close of a round is written within the open transaction",
    "engine.close.after-commit": "a round is closed, what it no longer needs is still there",
    "engine.gc.before-drop": "a blob that nothing needs is about to be deleted",
    "engine.gc.after-drop": "a blob that nothing needs is deleted",
    "engine.end.before-commit": "all rounds are done, the run is not marked as finished",
    "engine.end.after-commit": "the run is finished, the front is not told",
    # The engine or a command forgets a device.
    "forget.after-state": "the run's state is one without the device, what the device has sent is still there",
    "forget.before-note": "nothing of the device is left, the device does not count as forgotten",
    # The operator's commands.
    "rollback.before-commit": "an earlier checkpoint is read, the run still has its own",
    "rollback.after-commit": "the run has the earlier checkpoint, later ones are still there",
    "backup.after-snapshot": "the database is copied, no payload is",
    "backup.before-manifest": "everything is in the backup but its manifest, without which it is none",
    "restore.before-rename": "the store is made whole beside its place",
    # The SDK introduces a device, answers, and promotes the answer's state with the receipt.
    "device.identity.before-save": "the device knows its id and secret, device.json does not have them",
    "device.identity.after-save": "device.json has the device's id and secret",
    "device.check-in.before-save": "the server has admitted the device, the run and profile are not kept",
    "device.check-in.after-save": "the run and the profile are kept",
    "device.first-state.before-save": "the run's initial weights are in the model, nothing is kept",
    "device.first-state.after-save": "the initial state is kept",
    "device.outbox.before-data": "the answer is computed, nothing of it is kept",
    "device.outbox.before-candidate": "the answer's payload is in the outbox",
    "device.outbox.before-manifest": "payload and states are in the outbox, which does not count yet",
    "device.outbox.after-manifest": "the answer counts, nothing of it is sent",
    "device.upload.before-send": "the server said what it lacks, nothing of it is sent",
    "device.upload.after-receipt": "the receipt has come, the device has not acted on it",
    "device.outcome.before-note": "the device knows what became of the answer, nothing says so on the disk",
    "device.outcome.after-note": "what became of the answer is kept, nothing is done about it",
    "device.promote.before-renames": "the answer's state is about to become the device's",
    "device.promote.between-renames": "the app's model is the answer's, the device's state is still the last one",
    "device.promote.after-renames": "both are the answer's, the outbox still counts",
    "device.drop.after-manifest": "the outbox no longer counts, its files are still there",
    "device.drop.after-files": "the outbox is empty",
    "device.outcome.after-told": "the app has been told what became of the answer",
}
"""Every point by name, with what has happened when it is hit; of one process in the order in which a run comes by."""


class FailpointError(ConfigurationError):
    """FLEETDISTILL_FAILPOINTS names an unknown point or action."""


@dataclass(frozen=True)
class _Entry:
    act: Callable[[], None]
    number: int  # 0: at every hit


def _off(name: str) -> None:
    """What `hit` is while nothing is switched on."""


hit: Callable[[str], None] = _off
"""Marks a point. Call it as `failpoints.hit(...)`, so that switching on reaches the call."""


def switch_on(text: str) -> None:
    """Switches the named points on in this process, in place of what was on; an empty text switches all off.

    Args:
        text: What the environment variable may hold; see the module's docstring.

    Raises:
        FailpointError: A name or an action is unknown.
    """
    global hit
    entries = _parse(text)
    hit = _Points(entries).hit if entries else _off


@contextlib.contextmanager
def switched_on(text: str) -> Iterator[None]:
    """The same until the end of the block."""
    switch_on(text)
    try:
        yield
    finally:
        switch_on("")


class _Points:
    def __init__(self, entries: dict[str, _Entry]) -> None:
        self._entries = entries
        self._hits: Counter[str] = Counter()
        self._lock = threading.Lock()

    def hit(self, name: str) -> None:
        if name not in FAILPOINTS:
            raise FailpointError(f"the code hits the failpoint {name!r}, which is not in FAILPOINTS")
        with self._lock:
            self._hits.update((name, ANY))
            due = [one for key in (name, ANY) if (one := self._entries.get(key)) and one.number in (0, self._hits[key])]
        for entry in due:
            entry.act()


def _parse(text: str) -> dict[str, _Entry]:
    return dict(_entry(part.strip()) for part in text.split(";") if part.strip())


def _entry(part: str) -> tuple[str, _Entry]:
    name, _, wanted = part.partition("=")
    if name != ANY and name not in FAILPOINTS:
        raise FailpointError(f"{VARIABLE}: unknown failpoint {name!r}; known are * and {', '.join(FAILPOINTS)}")
    action, _, number = wanted.partition("@")
    word, _, value = action.partition(":")
    try:
        return name, _Entry(_ACTIONS[word](value), _positive(number) if number else 0)
    except (KeyError, ValueError) as error:
        known = "kill, exit:STATUS, sleep:SECONDS or error:ERRNO, each with @n or without"
        raise FailpointError(f"{VARIABLE}: {part!r} asks for {wanted!r}, must be {known}") from error


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(f"{number} is not positive")
    return number


def _kill(value: str) -> Callable[[], None]:
    if value:
        raise ValueError("kill takes no value")
    number = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows ends a process at once with any number
    return lambda: os.kill(os.getpid(), number)


def _exit(value: str) -> Callable[[], None]:
    status = int(value or 1)
    return lambda: os._exit(status)


def _sleep(value: str) -> Callable[[], None]:
    seconds = float(value)
    return lambda: time.sleep(seconds)


def _error(value: str) -> Callable[[], None]:
    number = {name: number for number, name in errno.errorcode.items()}[value or "EIO"]

    def fail() -> None:
        raise OSError(number, f"{os.strerror(number)} (a failpoint)")

    return fail


_ACTIONS: dict[str, Callable[[str], Callable[[], None]]] = {
    "kill": _kill,
    "exit": _exit,
    "sleep": _sleep,
    "error": _error,
}


def _switch_on_from_environment() -> None:
    text = os.environ.get(VARIABLE, "")
    if text.strip():
        switch_on(text)
        print(f"warning: {VARIABLE} is set, this process fails on purpose: {text}", file=sys.stderr, flush=True)


_switch_on_from_environment()
