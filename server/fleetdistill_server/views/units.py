"""Human-readable units and numbers."""

from __future__ import annotations


def readable_bytes(count: int) -> str:
    """Formats a number of bytes in kB, MB or GB, in powers of ten."""
    if count >= 1e9:
        return f"{count / 1e9:.2f} GB"
    return f"{count / 1e6:.2f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def counted(number: int, what: str) -> str:
    """Returns a number with its noun: `1 round`, `2 rounds`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
