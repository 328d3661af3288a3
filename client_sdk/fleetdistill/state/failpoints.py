"""Failpoints: named points in the code at which tests make a process fail, to verify crash safety.

`hit("device.promote.between-renames")` marks a point before or after a durable step. Tests enable points with the
environment variable FLEETDISTILL_FAILPOINTS, read once at process start, or with `switched_on` in their own process;
devices, messages and configurations cannot. `hit` does nothing while no point is enabled, as in production.

    FLEETDISTILL_FAILPOINTS="front.receipt.before-send=kill@3;disk.before-fsync=error:ENOSPC"

An entry is `name=action`, or `name=action@n` for only the n-th hit of that name in this process, from 1. The name `*`
means any point and counts the hits of all points together. Actions:

    kill            sends SIGKILL to this process
    exit:STATUS     exits immediately with a status (default 1), without cleanup
    sleep:SECONDS   sleeps
    error:NAME      raises OSError with an errno, such as ENOSPC for a full disk (default EIO)

docs/explanation/durability.md lists what can be lost at each point, and the test that kills the process there.
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
    # Device and server: a durable file is written, fsynced and renamed, then its directory is fsynced.
    "disk.before-fsync": "a file is written, but not fsynced",
    "disk.before-rename": "a file is fsynced under its temporary name",
    "disk.before-directory-fsync": "a file is renamed, but its directory is not fsynced",
    "disk.after-directory-fsync": "a file is durable under its name",
    # The front receives an upload. The engine stages the payloads of its asks with the same code.
    "blob.before-staged-write": "data of a payload are checked, but not in the staging file",
    "blob.after-staged-write": "data of a payload are in the staging file",
    "blob.before-commit": "a payload is completely staged, but not durable under its digest",
    "blob.after-commit": "a payload is durable under its digest, but no row references it",
    "front.receipt.before-commit": "the receipt's row is written in the open transaction",
    "front.commit.before": "the commit thread has run a group of jobs; the transaction is open",
    "front.commit.after": "a group is committed, but none of its calls has a reply",
    "front.receipt.before-send": "the receipt is committed, but the engine is not woken and the receipt not sent",
    # An operator creates, starts, pauses, resumes, stops or clones a run; the supervisor gives it an engine.
    "runs.change.before-commit": "the run's new state is written in the open transaction",
    "runs.change.after-commit": "the run's new state is committed, but the command has not answered",
    "runs.delete.before-commit": "the run's rows are deleted in the open transaction",
    "runs.delete.after-commit": "the run's rows are deleted, but its files are not",
    "supervisor.engine.before-token": "a run's turn has come, but it has no engine",
    "supervisor.engine.after-token": "the fencing token of a run's engine is committed, but no engine is started",
    "supervisor.engine.after-start": "a run's engine is started",
    # An operator's call is stored in the transaction of its change, or as begun before and with its result after it.
    "operators.before-entry": "an operator's call is admitted, but nothing is stored",
    "operators.before-commit": "a change and its entry are written in the open transaction",
    "operators.after-begun": "a call that is not one transaction is stored as begun, but has changed nothing",
    "operators.before-result": "the call's work is done, but the call is stored as begun",
    "operators.after-result": "the call is stored with its result, but has not answered",
    # The engine runs rounds.
    "engine.contract.before-commit": "the payloads of the contract are stored, but the contract is not published",
    "engine.contract.after-commit": "the contract is published, but the run has no checkpoint",
    "engine.start.before-commit": "enough devices are present, but no round is open",
    "engine.start.after-commit": "a round is open with its cohort, but has no asks",
    "engine.asks.before-commit": "the payloads of a step's asks are stored, but not the asks",
    "engine.asks.after-commit": "the asks of a step are written, but the front is not notified",
    "engine.answer.after-read": "an answer is read, but not passed to the method",
    "engine.training.before-name": "the resume point of a training is stored, but not named",
    "engine.training.after-name": "the resume point is named, but the previous one is not deleted",
    "engine.short.before-commit": "a round is short, and its close is written in the open transaction",
    "engine.short.after-commit": "a round is closed as short, but the previous state is not restored",
    "engine.quarantine.before-move": "an answer's payload was found damaged or missing; nothing is changed yet",
    "engine.quarantine.after-move": "the damaged file is in quarantine, but the answer is still accepted",
    "engine.quarantine.after-commit": "the answer is reported and asked for again, but the front is not notified",
    "engine.checkpoint.before-write": "a round's answers are in the method's state, which is not saved",
    "engine.checkpoint.after-write": "the checkpoint of a round is durable, but the run does not reference it",
    "engine.close.before-commit": "the close of a round is written in the open transaction",
    "engine.close.after-commit": "a round is closed, but its unneeded data are not deleted",
    "engine.gc.before-drop": "an unreferenced blob is about to be deleted",
    "engine.gc.after-drop": "an unreferenced blob is deleted",
    "engine.end.before-commit": "all rounds are complete, but the run is not marked as finished",
    "engine.end.after-commit": "the run is finished, but the front is not notified",
    # The engine or a command deletes a device's data (`devices forget`).
    "forget.after-state": "the run's state no longer includes the device, but its uploads are not deleted",
    "forget.before-note": "the device's data are deleted, but the device is not marked as forgotten",
    # Commands of the operator.
    "rollback.before-commit": "an earlier checkpoint is read, but the run has its current one",
    "rollback.after-commit": "the run has the earlier checkpoint, but later ones are not deleted",
    "backup.after-snapshot": "the database is copied, but no payload",
    "backup.before-manifest": "the backup is complete except for its manifest",
    "restore.before-rename": "the restored store is complete, but not renamed to its directory",
    # The SDK checks in, answers, and commits the answer's state with the receipt.
    "device.identity.before-save": "the device has its id and secret, but device.json does not",
    "device.identity.after-save": "device.json has the device's id and secret",
    "device.check-in.before-save": "the server has admitted the device, but run and profile are not saved",
    "device.check-in.after-save": "the run and the profile are saved",
    "device.first-state.before-save": "the run's initial weights are in the model, but nothing is saved",
    "device.first-state.after-save": "the initial state is saved",
    "device.privacy.after-record": "a private release is in the ledger, its noise is not drawn yet",
    "device.privacy.after-release": "the noisy sums are stored, but not in an answer",
    "device.secure.before-freeze": "a secure sum's noise is drawn, but the session is not stored",
    "device.secure.after-freeze": "the session of a secure sum is stored, but nothing is sent",
    "device.secure.after-step": "the answer to a step of a secure sum is recorded, but not in the outbox",
    "device.secure.after-end": "the end of a secure sum is recorded, but its root and input are not erased",
    "device.outbox.before-data": "the answer is computed, but nothing is saved",
    "device.outbox.before-candidate": "the answer's payload is in the outbox",
    "device.outbox.before-manifest": "payload and states are in the outbox, but not the manifest",
    "device.outbox.after-manifest": "the manifest is in the outbox, but nothing is sent",
    "device.ledger.after-answer": "the ledger has the answer, but nothing is sent",
    "device.upload.before-send": "the server has returned the upload's status, but nothing is sent",
    "device.upload.after-receipt": "the receipt has arrived, but is not processed",
    "device.outcome.before-note": "the answer's outcome is known, but not saved",
    "device.outcome.after-note": "the answer's outcome is saved, but not processed",
    "device.ledger.after-outcome": "the ledger has the answer's outcome, which is not processed",
    "device.deploy.after-keep": "the app's model is kept as an earlier version, but the next one is not announced",
    "device.promote.before-renames": "the answer's state is about to be committed",
    "device.promote.between-renames": "the app's model is the answer's, but the device's state is the previous one",
    "device.promote.after-renames": "model and state are the answer's, but the outbox is not empty",
    "device.drop.after-manifest": "the manifest is deleted, but the other files are not",
    "device.drop.after-files": "the outbox is empty",
    "device.outcome.after-told": "the app has been notified of the answer's outcome",
    "device.deploy.before-record": "the new version is exported, but not recorded as the one in use",
    "device.deploy.after-record": "the new version is recorded, and versions that are no longer kept are deleted",
    "device.roll-back.after-request": "the app has requested an earlier version of the model",
    "device.roll-back.after-file": "a file of the earlier version replaces the current one, but not all files yet",
    "device.roll-back.after-record": "the earlier version is in use, but the app has not been notified",
    # The app or its user erases the state directory (`Device.forget`, `fleetdistill device forget`).
    "device.forget.after-mark": "the directory is marked as being erased, but complete",
    "device.forget.after-files": "the files are deleted, but the directory is still marked",
}
"""All points by name with the state at the hit; those of a process are in the order of a run."""


class FailpointError(ConfigurationError):
    """FLEETDISTILL_FAILPOINTS has an unknown point or action."""


@dataclass(frozen=True)
class _Entry:
    act: Callable[[], None]
    number: int  # 0 for every hit


def _off(name: str) -> None:
    """Does nothing; the value of `hit` while no point is enabled."""


hit: Callable[[str], None] = _off
"""Marks a point. Call it as `failpoints.hit(...)`, so that the call uses the current function."""


def switch_on(text: str) -> None:
    """Enables points in this process and disables all others; an empty text disables all.

    Args:
        text: Entries in the format of the environment variable; see the module's docstring.

    Raises:
        FailpointError: A name or an action is unknown.
    """
    global hit
    entries = _parse(text)
    hit = _Failpoints(entries).hit if entries else _off


@contextlib.contextmanager
def switched_on(text: str) -> Iterator[None]:
    """Enables points for the block; disables all points after it."""
    switch_on(text)
    try:
        yield
    finally:
        switch_on("")


class _Failpoints:
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
        raise FailpointError(f"{VARIABLE}: unknown failpoint {name!r}; expected * or one of {', '.join(FAILPOINTS)}")
    action, _, number = wanted.partition("@")
    word, _, value = action.partition(":")
    try:
        return name, _Entry(_ACTIONS[word](value), _positive(number) if number else 0)
    except (KeyError, ValueError) as error:
        known = "kill, exit:STATUS, sleep:SECONDS or error:ERRNO, each with an optional @n"
        raise FailpointError(f"{VARIABLE}: {part!r} has action {wanted!r}, must be {known}") from error


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(f"{number} is not positive")
    return number


def _kill(value: str) -> Callable[[], None]:
    if value:
        raise ValueError("kill takes no value")
    number = getattr(signal, "SIGKILL", signal.SIGTERM)  # on Windows any signal ends a process immediately
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
        print(f"warning: {VARIABLE} is set, so this process fails on purpose: {text}", file=sys.stderr, flush=True)


_switch_on_from_environment()
