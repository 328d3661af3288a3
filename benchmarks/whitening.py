"""Makes `whitening.npz`, the constants of the public features of private class statistics, from synthetic images.

    python benchmarks/whitening.py

For each image size: 4,000 dead-leaves images, their scattering features after the random projection, the mean of these
features, and the 192 principal directions, each divided by the root of its eigenvalue. No data set is involved.

Numbers that the file has stay as they are, and directions are only added: all devices of a run need equal constants,
and another processor rounds some of them differently in the last bit. Delete the file to make all of it again.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fleetdistill.methods.classstats.class_space import projection_for
from fleetdistill.methods.classstats_private.config import MAX_WHITENED
from fleetdistill.methods.classstats_private.public_features import CONSTANTS, SIDES
from fleetdistill.models.scattering import scattering

IMAGES = 4000
_BASE = 28
_BATCH = 250


def dead_leaves(count: int, side: int, seed: int = 0) -> Tensor:
    """Returns images of 2 to 8 ellipses and boxes of random place, size, angle and grey, later ones over earlier ones.

    Args:
        count: Number of images.
        side: Height and width in pixels; shapes scale with it.
        seed: Seed of the shapes.

    Returns:
        `[count, 1, side, side]` float32 in [0, 1].
    """
    random = np.random.default_rng(seed)
    line = (np.arange(side) + 0.5) * _BASE / side
    y, x = np.meshgrid(line, line, indexing="ij")
    images = np.zeros((count, side, side), np.float32)
    for image in images:
        for _ in range(random.integers(2, 9)):
            left, top = random.uniform(0, _BASE, 2)
            width, height = random.uniform(1.5, 9, 2)
            angle, grey = random.uniform(0, np.pi), random.uniform(0, 1)
            u = (x - left) * np.cos(angle) + (y - top) * np.sin(angle)
            v = -(x - left) * np.sin(angle) + (y - top) * np.cos(angle)
            ellipse = (u / width) ** 2 + (v / height) ** 2 <= 1
            image[ellipse if random.random() < 0.5 else (abs(u) <= width) & (abs(v) <= height)] = grey
    return torch.from_numpy(images[:, None])


def projected(images: Tensor) -> np.ndarray:
    """Returns the images' projected scattering features, `[n, D]` float64."""
    shape = tuple(images.shape[1:])
    extractor = scattering(shape)
    with torch.no_grad():
        features = torch.cat([extractor(batch).flatten(1) for batch in images.split(_BATCH)]).double().numpy()
    return np.asarray(features @ projection_for(shape, features.shape[1]))


def whitening(side: int) -> dict[str, np.ndarray]:
    """Returns the constants of one image size: `mean_SIDE` `[D]` and `directions_SIDE` `[D, 192]`."""
    rows = projected(dead_leaves(IMAGES, side))
    values, vectors = np.linalg.eigh(np.cov(rows.T))
    values, vectors = values[::-1][:MAX_WHITENED], vectors[:, ::-1][:, :MAX_WHITENED]
    directions = vectors * np.where(vectors[abs(vectors).argmax(axis=0), range(MAX_WHITENED)] < 0, -1, 1)
    return {
        f"mean_{side}": rows.mean(axis=0).astype(np.float32),
        f"directions_{side}": (directions / np.sqrt(values)).astype(np.float16),
    }


def extended(made: dict[str, np.ndarray], stored: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the stored constants, followed by those directions of `made` that are not stored yet."""
    kept = {name: stored.get(name, one[..., :0]) for name, one in made.items()}
    return {name: np.concatenate([kept[name], one[..., kept[name].shape[-1] :]], axis=-1) for name, one in made.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    made = {name: one for side in SIDES for name, one in whitening(side).items()}
    stored = dict(np.load(CONSTANTS)) if CONSTANTS.exists() else {}
    np.savez_compressed(CONSTANTS, **extended(made, stored))
    print(f"{CONSTANTS}: {CONSTANTS.stat().st_size:,} bytes")
