"""Exact noise: its distribution, its source, and that two draws differ."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from fractions import Fraction

from fleetdistill.privacy.discrete_gaussian import discrete_gaussian


def test_samples_follow_the_discrete_gaussian():
    """Chi-square with sigma 2, 20,000 draws, 24 degrees of freedom: the 99 % point is 43. The seed is fixed."""
    source, draws, reach = random.Random(7), 20_000, 12
    counts = dict.fromkeys(range(-reach, reach + 1), 0)
    for _ in range(draws):
        sample = discrete_gaussian(Fraction(4), source)
        if abs(sample) <= reach:
            counts[sample] += 1
    weights = {x: math.exp(-x * x / 8) for x in counts}
    total = sum(weights.values())
    assert sum((counts[x] - draws * w / total) ** 2 / (draws * w / total) for x, w in weights.items()) < 43


def test_the_variance_of_wide_noise_is_the_wanted_one():
    source, sigma = random.Random(3), 280_000
    samples = [discrete_gaussian(Fraction(sigma**2), source) for _ in range(4_000)]
    root = math.sqrt(sum(x * x for x in samples) / len(samples))
    assert abs(root / sigma - 1) < 0.04  # 3.5 standard errors; the seed is fixed


def test_two_processes_never_draw_the_same_noise():
    script = (
        "from fractions import Fraction; from fleetdistill.privacy.discrete_gaussian import discrete_gaussian as d; "
        "print([d(Fraction(2**40)) for _ in range(8)])"
    )
    first, second = (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True) for _ in range(2)
    )
    assert first.stdout != second.stdout
