"""Units as people read them."""

from __future__ import annotations


def readable_bytes(count: int) -> str:
    """A number of bytes for people, in powers of ten."""
    return f"{count / 1e6:.2f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"
