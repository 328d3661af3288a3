"""Message for Ctrl-C while a simulation's modules are being imported; this module has no slow imports."""

from pathlib import Path


def not_begun(out: Path) -> str:
    """Returns the line that is printed after Ctrl-C before a simulation has begun."""
    return f"interrupted before the simulation started; nothing was changed in {out}; run the command again"
