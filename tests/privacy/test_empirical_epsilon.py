"""A lower bound on epsilon from releases of neighbouring data: below the claimed one, and above it with half the noise.

The attacker of Jagielski, Ullman and Oprea (Auditing Differentially Private Machine Learning, 2020): it knows both data
sets, projects a release on their difference (the most powerful test for Gaussian noise), and guesses. From its error
rates follows a bound that holds with 99 % confidence (Clopper and Pearson, halves for the two rates).
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from scipy.stats import beta

from fleetdistill.methods.classstats_private.sums import (
    SHARES,
    NoiseScale,
    RowSums,
    class_sums,
    on_grid,
    release_exact,
    release_rounded,
    unit_rows,
)
from fleetdistill.methods.classstats_secure.encoding import decode, exact_numbers, unit_rows_on_grid
from fleetdistill.methods.classstats_secure.noise import noise_vector
from fleetdistill.privacy.accountant import discrete_mu_for, mu_for
from fleetdistill.secure.session import PRIVATE, Parameters

CLASSES, SIZE, DELTA, CONFIDENCE = 3, 4, 1e-5, 0.99
RELEASES = 100_000
_ROOTS = [math.sqrt(share) for share in SHARES]


def neighbours(classes: int = CLASSES, size: int = SIZE) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Rows and labels of 20 rows, and of the same with one row more."""
    generator = np.random.default_rng(0)
    rows, labels = on_grid(unit_rows(generator.normal(size=(21, size)))), generator.integers(0, classes, 21)
    return (rows[:20], labels[:20]), (rows, labels)


def isometric(sums):
    """The release as one vector in which a row changes at most 1, `[numbers]` or `[releases, numbers]`."""
    upper = np.triu_indices(sums.second_moment.shape[-1], 1)
    beside = math.sqrt(2) * sums.second_moment[..., *upper]
    diagonal = np.diagonal(sums.second_moment, axis1=-2, axis2=-1)
    flat = sums.sums.reshape(*sums.sums.shape[:-2], -1)
    parts = [_ROOTS[0] * sums.counts, _ROOTS[1] * flat, _ROOTS[2] * diagonal, _ROOTS[2] * beside]
    return np.concatenate(parts, axis=-1)


def guesses(released, without, plus):
    """The projections on the difference of both data sets: 0 without the row, 1 with it, on average."""
    difference = isometric(plus) - isometric(without)
    return (isometric(released) - isometric(without)) @ difference / (difference @ difference)


def lower_bound(without, plus):
    """Epsilon that the guesses prove, at the best of 40 thresholds, which a quarter of the guesses chooses."""
    some = len(without) // 4
    thresholds = np.quantile(np.concatenate([without[:some], plus[:some]]), np.linspace(0.02, 0.998, 40))

    def proven(guess_without, guess_plus, threshold):
        false, true = (guess_without > threshold).sum(), (guess_plus > threshold).sum()
        return max(
            _epsilon(false, true, len(guess_plus)),
            _epsilon(len(guess_plus) - true, len(guess_without) - false, len(guess_plus)),
        )

    best = max(thresholds, key=lambda one: proven(without[:some], plus[:some], one))
    return proven(without[some:], plus[some:], best)


def _epsilon(false, true, count):
    """log((true rate - delta) / false rate), with the true rate's lower and the false rate's upper bound."""
    error = (1 - CONFIDENCE) / 2
    low = beta.ppf(error, true, count - true + 1) if true else 0.0
    high = beta.ppf(1 - error, false + 1, count - false) if false < count else 1.0
    return math.log((low - DELTA) / high) if low > DELTA else -math.inf


def rounded(data: tuple[Any, Any], mu, seed, releases=RELEASES):
    """Many releases of the same sums, stacked."""
    sums = class_sums(*data, classes=CLASSES)
    stacked = RowSums(
        counts=np.broadcast_to(sums.counts, (releases, CLASSES)),
        sums=np.broadcast_to(sums.sums, (releases, CLASSES, SIZE)),
        second_moment=np.broadcast_to(sums.second_moment, (releases, SIZE, SIZE)),
    )
    return release_rounded(stacked, mu, np.random.default_rng(seed))


def proven_by(release, epsilon, classes=CLASSES, size=SIZE):
    without, plus = neighbours(classes, size)
    clean = class_sums(*without, classes=classes), class_sums(*plus, classes=classes)
    return lower_bound(guesses(release(without, 1), *clean), guesses(release(plus, 2), *clean)), epsilon


@pytest.mark.parametrize("epsilon", [1.0, 3.0])
def test_no_attack_proves_more_than_the_claimed_epsilon(epsilon):
    mu = mu_for(epsilon, DELTA)
    proven, claimed = proven_by(lambda data, seed: rounded(data, mu, seed), epsilon)
    assert 0.1 * claimed < proven < claimed


@pytest.mark.parametrize("epsilon", [1.0, 3.0])
def test_with_half_the_noise_the_attack_proves_more(epsilon):
    """So the test above would find noise that is too small."""
    mu = 2 * mu_for(epsilon, DELTA)
    proven, claimed = proven_by(lambda data, seed: rounded(data, mu, seed), epsilon)
    assert proven > claimed


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("factor", [1, 3])
def test_exact_noise_likewise(factor):
    """Of a row with one number, 8,000 times, because it is pure Python; a third of the noise is found with so few."""
    mu = factor * discrete_mu_for(3, DELTA)

    def release(data: tuple[Any, Any], seed: int) -> RowSums:
        source = random.Random(seed)
        made = [release_exact(*data, classes=1, mu=mu, random=source) for _ in range(8_000)]
        return RowSums(
            counts=np.stack([item.counts for item in made]),
            sums=np.stack([item.sums for item in made]),
            second_moment=np.stack([item.second_moment for item in made]),
        )

    proven, claimed = proven_by(release, 3.0, classes=1, size=1)
    assert (proven > claimed) if factor > 1 else (0.1 * claimed < proven < claimed)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("honest", "parts"), [(3, 3), (4, 1)])
def test_a_secure_sum_likewise(honest, parts):
    """With all parts of the noise, and with one of four, which has half its standard deviation."""
    parameters = Parameters(
        mode=PRIVATE,
        width=8,
        keys=0,
        classes=1,
        dimensions=1,
        grid_bits=16,
        clip_bits=0,
        count_bits=10,
        row_bits=20,
        least=honest,
        honest=honest,
        most=honest,
        degree=0,
        epsilon=3.0,
        delta=DELTA,
    )

    def release(data: tuple[Any, Any], seed: int) -> RowSums:
        source, numbers = random.Random(seed), exact_numbers(unit_rows_on_grid(data[0], 16), data[1], 1, 10)
        noise = np.array([[noise_vector(parameters, source) for _ in range(parts)] for _ in range(RELEASES)])
        made = [decode(numbers + one, parameters) for one in noise.sum(axis=1)]
        return RowSums(**{name: np.stack([vars(item)[name] for item in made]) for name in vars(made[0])})

    proven, claimed = proven_by(release, 3.0, classes=1, size=1)
    assert (proven > claimed) if parts < honest else (0.1 * claimed < proven < claimed)


def test_the_projection_has_the_size_of_the_noise():
    """The attacker's test is the best one: the two projections differ by the row's change, at most mu deviations."""
    without, plus = neighbours()
    clean = class_sums(*without, classes=CLASSES), class_sums(*plus, classes=CLASSES)
    result = guesses(rounded(without, 0.5, 1, 20_000), *clean)
    change = np.linalg.norm(isometric(clean[1]) - isometric(clean[0]))
    assert 0.99 < change <= 1
    assert np.std(result) * change == pytest.approx(1 / 0.5, rel=0.03)
    assert NoiseScale.of(0.5).counts * _ROOTS[0] == pytest.approx(2)
