"""Human-readable units."""

from __future__ import annotations


def readable_bytes(count: int) -> str:
    """Formats a number of bytes in kB, MB or GB, in powers of ten."""
    if count >= 1e9:
        return f"{count / 1e9:.2f} GB"
    return f"{count / 1e6:.2f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"
