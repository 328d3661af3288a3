"""What a simulated device is told: when it is scored, and on which labels a hostile one trains."""

from __future__ import annotations

import numpy as np
import pytest

from fleetdistill_lab.simulation.spec.device import DeviceSpec
from fleetdistill_lab.simulation.spec.hostile import ATTACKS, flip


@pytest.mark.parametrize(("every", "scored"), [(0, []), (1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (9, [5])])
def test_a_device_is_scored_at_intervals_and_at_the_end(every: int, scored: list[int]) -> None:
    spec = DeviceSpec(
        name="d",
        model="m",
        seed=0,
        classes=2,
        data_file="d",
        test_file="t",
        state_dir="s",
        run="r",
        score_every=every,
        last_round=5,
    )
    assert [number for number in range(1, 6) if spec.is_scored(number)] == scored


@pytest.mark.parametrize("attack", ["", *ATTACKS])
def test_labels_are_flipped_by_two_attacks_alone(attack: str) -> None:
    labels = np.array([0, 1, 2, 9])
    flipped = [9, 8, 7, 0] if attack in ("flips", "declares") else [0, 1, 2, 9]
    assert flip(attack, labels, 10).tolist() == flipped
