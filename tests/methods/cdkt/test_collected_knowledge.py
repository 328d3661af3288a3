"""The mean of what devices send about the proxy set, of answers to this round and to earlier ones."""

from __future__ import annotations

import numpy as np
import pytest
from methods.cdkt.cdkt_fleet import CLASSES, made_up, make_proxy

from fleetdistill.methods.cdkt.config import CDKTConfig
from fleetdistill.wire.codec import encode
from fleetdistill_server.methods.cdkt import CollectedKnowledge
from fleetdistill_server.methods.cohort import DeviceAnswer


@pytest.mark.parametrize(("aggregation", "weights"), [("uniform", (1, 0.25)), ("samples", (3, 0.5))])
def test_an_answer_to_an_earlier_round_counts_for_less(aggregation: str, weights: tuple[float, float]) -> None:
    """Device a has 3 samples; b has 2, and its answer a factor of 0.25."""
    config = CDKTConfig(aggregation=aggregation, outcome_space="logits", robust="off").for_classes(CLASSES)
    collected = CollectedKnowledge(config, make_proxy().labels)
    uploads = {device: made_up(seed) for seed, device in enumerate("ab")}
    for device, samples, decay in (("a", 3, 1.0), ("b", 2, 0.25)):
        answer = DeviceAnswer(device, samples, encode({"knowledge": uploads[device]}))
        answer.staleness, answer.decay = round(1 - decay), decay
        collected.add(answer)
    first, second = weights
    sent = [(upload.logits, upload.embeddings) for upload in uploads.values()]
    for mean, own, other in zip(collected.means(), *sent, strict=True):
        expected = (first * own + second * other) / (first + second)
        np.testing.assert_allclose(mean.numpy(), expected, atol=1e-6)
