"""The log of optimisers' steps: those of a round add up, and a repeated answer counts once."""

from __future__ import annotations

from pathlib import Path

from fleetdistill_lab.simulation.spec.score_log import OPTIMIZER_STEPS, STEP_NUMBER, append_steps, read_steps


def test_steps_of_a_round_add_up_and_repeated_answers_count_once(tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    for device, number, step, steps in [("a", 1, 1, 5), ("a", 1, 2, 7), ("a", 1, 1, 6), ("b", 1, 1, 2), ("a", 2, 1, 3)]:
        append_steps(log, device, number, {STEP_NUMBER: step, OPTIMIZER_STEPS: steps})
    assert read_steps(log) == {("a", 1): 6 + 7, ("b", 1): 2, ("a", 2): 3}


def test_a_run_without_training_has_no_steps(tmp_path: Path) -> None:
    assert read_steps(tmp_path / "steps.jsonl") == {}
