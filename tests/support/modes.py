"""What other users of a machine may read."""

from __future__ import annotations

from pathlib import Path


def open_to_others(place: Path) -> list[str]:
    """Returns a file or directory, and what is in it, where others have a permission; the names are for a failure."""
    found = [place, *sorted(place.rglob("*"))]
    return [f"{path} {path.stat().st_mode & 0o777:o}" for path in found if path.stat().st_mode & 0o077]
