"""The seed tree of a run: the seed of each random draw depends only on the run's seed and the draw's name."""

from __future__ import annotations

import hashlib

__all__ = ["derive_seed"]


def derive_seed(run_seed: int, *path: object) -> int:
    """Returns the seed of a named draw, such as `derive_seed(seed, round, "train", "device-03")`.

    Args:
        run_seed: Seed from the run's configuration, the root of the tree.
        path: Names and numbers that identify the draw; converted to text.

    Returns:
        An integer in `[0, 2**63)`: the first 63 bits of a SHA-256, so that seeds of similar names are independent.
    """
    text = "/".join(str(part) for part in (run_seed, *path))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
