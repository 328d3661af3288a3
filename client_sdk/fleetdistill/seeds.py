"""The seed tree of a run: every random draw has a name, and the name alone decides it."""

from __future__ import annotations

import hashlib


def derive_seed(run_seed: int, *path: object) -> int:
    """Seed for one named draw, such as `derive_seed(seed, round, "train", "device-03")`.

    Args:
        run_seed: Root of the tree, from the run's configuration.
        path: Names and numbers that lead to the draw; their text is what counts.

    Returns:
        A number in `[0, 2**63)`: the first 63 bits of a SHA-256, so that neighbouring names share nothing.
    """
    text = "/".join(str(part) for part in (run_seed, *path))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
