"""Resume points of long trainings: after a restart the engine continues a training instead of repeating it.

The training loop only copies its state to the host's memory; a thread writes it. A training that continues from a
resume point takes the same steps as one that was not interrupted.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor

from fleetdistill.errors import NoSpaceError, StoreError

logger = logging.getLogger("fleetdistill.server.training")


class Storage(Protocol):
    """Stores the newest resume point of a run."""

    def save(self, key: str, state: Any) -> None:
        """Replaces the resume point durably; called in a thread."""

    def load(self, key: str) -> Any | None:
        """Returns the state saved under a key; None if the resume point has another key or is missing."""

    def clear(self) -> None:
        """Deletes the resume point."""


class ResumePoints:
    """Saves and restores trainings of one engine.

    Args:
        storage: Where resume points are kept.
        seconds: Seconds between two resume points, above 0.
        now: Monotonic clock in seconds.

    Attributes:
        origin: Returns everything that the next training depends on, as JSON: the round, the state that it started
            from, and the answers that were read. Set by the engine.
    """

    def __init__(self, storage: Storage, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self.origin: Callable[[], Any] = lambda: None
        self._storage = storage
        self._seconds = seconds
        self._now = now
        self._last = now()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="resume-points")
        self._writing: Future[None] | None = None
        self._saved = True  # a point of an earlier engine may exist

    def begin(self, training: Any) -> tuple[str, Any | None]:
        """Returns the key of a training and the state to continue from, or None.

        Args:
            training: What distinguishes the training from others of the round, as JSON.
        """
        described = json.dumps([self.origin(), training], sort_keys=True)
        key, self._last = hashlib.sha256(described.encode()).hexdigest(), self._now()
        return key, self._storage.load(key) if self._saved else None

    def is_due(self) -> bool:
        """Returns whether the last resume point is old enough and is written."""
        busy = self._writing is not None and not self._writing.done()
        return not busy and self._now() - self._last >= self._seconds

    def save(self, key: str, state: Any) -> None:
        """Starts to write a resume point; copies the state's tensors first."""
        self._last, self._saved = self._now(), True
        self._writing = self._thread.submit(self._save, key, copy(state))

    def _save(self, key: str, state: Any) -> None:
        try:
            self._storage.save(key, state)
        except (NoSpaceError, StoreError) as error:  # the training continues without it
            logger.warning("a resume point of the training cannot be written: %s", error)

    def wait(self) -> None:
        """Returns when no resume point is being written."""
        if self._writing is not None:
            self._writing.result()

    def clear(self) -> None:
        """Deletes the resume point after the end of a round."""
        self.wait()
        if self._saved:
            self._storage.clear()
            self._saved = False


def copy(state: Any) -> Any:
    """Returns a state of dicts, lists and tensors with copies of its tensors on the CPU."""
    if isinstance(state, Tensor):
        return torch.empty_like(state, device="cpu").copy_(state)
    if isinstance(state, dict):
        return {key: copy(value) for key, value in state.items()}
    return [copy(value) for value in state] if isinstance(state, list | tuple) else state
