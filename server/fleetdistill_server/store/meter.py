"""What a front reports about its work, for metrics; the class that counts it is a part of an annex."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["Meter"]


class Meter:
    """Ignores what it is told, as a front without `[server] metrics` does."""

    def sent(self, direction: str, kinds: Mapping[str, int]) -> None:
        """Takes the bytes of a payload on the link by kind of part, once they are committed to the store."""

    def acknowledged(self) -> None:
        """Takes an answer that is committed."""

    def grouped(self, jobs: int) -> None:
        """Takes the number of jobs that were committed together."""

    def receipt_took(self, seconds: float) -> None:
        """Takes the seconds from the last byte of an answer to its receipt."""

    def upload_begun(self) -> None:
        """Takes the begin of an upload call."""

    def upload_refused(self, code: str) -> None:
        """Takes the end of an upload call with an error code."""

    def call_ended(self, method: str, code: str) -> None:
        """Takes the end of a call of any method; `code` is `ok`, an error code or `broken`."""

    async def watch_loop(self) -> None:
        """Measures the event loop until it is cancelled."""
