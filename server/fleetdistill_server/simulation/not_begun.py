"""What is said after Ctrl-C while the modules of a simulation were still being imported; it imports nothing itself."""

from pathlib import Path


def not_begun(out: Path) -> str:
    """The line after Ctrl-C in a simulation that had not begun yet."""
    return f"interrupted before anything was simulated; nothing was changed in {out}: give the same command again"
