"""DaFKD's settings."""

from __future__ import annotations

from typing import Any

import pytest

from fleetdistill.errors import ConfigurationError
from fleetdistill.methods.dafkd.config import DaFKDConfig


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"generator_level": "feature", "sharing": False}, "feature-level generator needs sharing"),
        ({"discriminator_location": "cloud"}, "unknown discriminator_location 'cloud', expected one of server, device"),
        ({"upload_model": False}, "upload_model=false needs device-side importance and ensemble_space='probs'"),
        (
            {"upload_model": False, "discriminator_location": "device", "ensemble_space": "logits"},
            "upload_model=false needs device-side importance and ensemble_space='probs'",
        ),
        ({"discriminator_location": "device", "ensemble_space": "logits"}, "set ensemble_space = 'probs'"),
        ({"sync": "later"}, "unknown sync 'later', expected one of lagged, exact"),
        ({"generator_level": "pixel"}, "unknown generator_level"),
        ({"generator_loss": "hinge"}, "unknown generator_loss"),
        ({"aggregation": "median"}, "unknown aggregation"),
        ({"generator": "os:system"}, "unknown generator 'os:system'"),
        ({"noise_dim": 0}, "noise_dim must be >= 1 and < 4097, got 0"),
        ({"kd_samples": 100_001}, "kd_samples must be >= 1 and < 100001, got 100001"),
        ({"kd_samples": 0}, "kd_samples must be >= 1"),
        ({"kd_start_round": 0}, "kd_start_round must be >= 1"),
        ({"kd_epochs": -1}, "kd_epochs must be >= 0"),
        ({"kd_lr": 0.0}, "kd_lr must be > 0"),
        ({"temperature": 0.0}, "temperature must be > 0"),
        ({"lambda_adv": -1.0}, "lambda_adv must be >= 0"),
        ({"lambda_adv": float("nan")}, "lambda_adv must be >= 0"),
        ({"lambda_adv": float("inf")}, "lambda_adv must be >= 0"),
        ({"gan_stop_round": -1}, "gan_stop_round must be >= 0"),
        ({"participation_ratio": 0.0}, r"participation_ratio must be in \(0, 1\]"),
        ({"optimizer": "lion"}, "unknown optimizer 'lion'"),
    ],
)
def test_a_setting_out_of_range_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        DaFKDConfig(**settings)


def test_paper_switches_every_deviation_off() -> None:
    ours, paper = DaFKDConfig().for_classes(10), DaFKDConfig.from_settings({"paper": True}).for_classes(10)
    assert (paper.generator_loss, paper.kd_start_round, paper.maturity_guard) == ("minimax", 1, False)
    assert (paper.freeze_batch_norm, paper.local_epochs, paper.kd_lr) == (False, 20, 0.01)
    assert (paper.weight_decay, paper.adversarial_weight_decay) == (1e-3, 1e-3)
    assert (ours.generator_loss, ours.kd_start_round, ours.maturity_guard) == ("nonsaturating", 3, True)
    assert paper.for_classes(10) == paper


def test_the_defaults_follow_the_level() -> None:
    assert (DaFKDConfig().for_classes(9).generator, DaFKDConfig().for_classes(9).label_condition) == (
        "dafkd_generator",
        False,
    )
    feature = DaFKDConfig(generator_level="feature").for_classes(9)
    assert (feature.generator, feature.label_condition) == ("feature_generator", True)
