"""Calls that may each be the last: an engine is killed between any two steps, within the test's own process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Crash(Exception):
    """Stands for kill -9; nothing in the product knows it."""


@dataclass
class Fuse:
    """Counts the steps of an engine and blows at one of them."""

    blows_at: int = -1
    touched: int = 0

    def touch(self) -> None:
        self.touched += 1
        if self.touched == self.blows_at:
            raise Crash


PARTS = ("blobs", "history", "runs", "devices", "asks", "credentials")
"""What a store consists of."""


class Fragile:
    """Anything whose every call may be the last: the fuse is touched before it and after it."""

    def __init__(self, inner: Any, fuse: Fuse) -> None:
        self._inner, self._fuse = inner, fuse

    def __getattr__(self, name: str) -> Any:
        result = getattr(self._inner, name)
        if name in PARTS:
            return Fragile(result, self._fuse)
        return result if name == "transaction" or not callable(result) else self._guarded(result)

    def _guarded(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self._fuse.touch()
            result = call(*args, **kwargs)
            self._fuse.touch()
            return result

        return guarded
