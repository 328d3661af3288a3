"""The guard of own statistics with a refined head."""

from __future__ import annotations

import numpy as np
import pytest

from fleetdistill.methods.classstats.class_space import class_prior, coordinates, leave_one_out, logits
from fleetdistill.methods.classstats.exchange import class_variants, local_variant
from fleetdistill.methods.classstats.refined_head import balanced_prior, choose_temperature, left_out_logits
from fleetdistill.methods.classstats.shared_statistics import merge, moments_of
from fleetdistill.training.figures import likelihood
from fleetdistill_server.methods.classstats.refinement import mean_of_rows, space_of_head, usual_objective

CLASSES, SIZE = 4, 6


def refined_fleet(seed: int, away: float):
    """Space of a head of two devices, and the first one's rows; the second one's rows lie `away` from them."""
    generator = np.random.default_rng(seed)
    centres = 1.2 * generator.standard_normal((CLASSES, SIZE))
    labels, others = np.repeat(np.arange(CLASSES), [6, 8, 5, 9]), np.repeat(np.arange(CLASSES), 10)
    rows = generator.standard_normal((len(labels), SIZE)) + centres[labels]
    rest = generator.standard_normal((len(others), SIZE)) + centres[others]
    rest += away * generator.standard_normal((CLASSES, SIZE))[others]
    own = moments_of(rows, labels)
    merged = merge([own, moments_of(rest, others)])
    objective = usual_objective(merged, mean_of_rows(merged), 0.2)
    return space_of_head(objective, objective.start(), merged.df, 0.2), rows, labels, own


def left_out_answers(space, rows, labels, own):
    """Personal logits of the left-out rows: the head's and the own statistics'."""
    prior, known = class_prior(labels, CLASSES), range(CLASSES)
    found = left_out_logits(space, logits(space, coordinates(space, rows), CLASSES), labels, known)
    temperature = choose_temperature(space, found, labels, prior)
    local = local_variant(own, rows, labels, CLASSES)
    assert local is not None
    alone = leave_one_out(local.space, coordinates(local.space, rows), labels, known, CLASSES)
    return (
        found / temperature + np.log(balanced_prior(space, temperature, prior)),
        alone / local.temperature + np.log(prior),
    )


@pytest.mark.parametrize("away", [0.0, 1.0, 4.0])
@pytest.mark.parametrize("seed", range(4))
def test_the_likelier_answer_is_kept(seed: int, away: float) -> None:
    fleet = refined_fleet(seed, away)
    space, rows, labels, own = fleet
    head, alone = (likelihood(answer, labels) for answer in left_out_answers(*fleet))
    result = class_variants(space, rows, labels, range(CLASSES), CLASSES, own)
    assert result.own_kept is (alone > head)
    assert result.personal.log_likelihood == pytest.approx(max(alone, head))


@pytest.mark.parametrize(("seed", "hits"), [(8, (24, 23)), (11, (21, 22))])
def test_hits_of_the_head_do_not_decide(seed: int, hits: tuple[int, int]) -> None:
    fleet = refined_fleet(seed, 1.0)
    space, rows, labels, own = fleet
    answers = left_out_answers(*fleet)
    assert tuple((answer.argmax(axis=1) == labels).sum() for answer in answers) == hits
    assert class_variants(space, rows, labels, range(CLASSES), CLASSES, own).own_kept is (hits[0] > hits[1])
