"""One message of each kind of knowledge."""

from __future__ import annotations

import numpy as np
from support.wire_samples import (
    f32,
    make_knowledge,
)

from fleetdistill import knowledge as k

FLOAT16, FLOAT32 = np.float16, np.float32
MODEL = k.ModelParameters(
    parameters={"conv.weight": np.arange(6, dtype=FLOAT32).reshape(1, 2, 3), "bias": f32([0.5])},
    buffers={"count": np.array(7, np.int64), "mean": np.zeros((0, 4), FLOAT32)},
    scope="extractor",
)
ONE_OF_EACH: dict[str, k.Kind] = {
    "model_parameters": MODEL,
    "sample_knowledge": make_knowledge(3),
    "refined_knowledge": k.RefinedKnowledge(
        valid=True, sample_ids=np.arange(2), values=np.full((2, 3), 1 / 3, FLOAT32), scale=k.PROBABILITIES
    ),
    "proxy_knowledge": k.ProxyKnowledge(valid=True, proxy_digest=b"p" * 32, embeddings=np.ones((2, 5), FLOAT32)),
    "proxy_set": k.ProxySet(
        name="digits-proxy",
        licence="CC0-1.0",
        inputs=np.ones((2, 1, 8, 8), FLOAT32),
        labels=np.int32([0, 2]),  # type: ignore[arg-type]
    ),
    "weighted_predictions": k.WeightedPredictions(noise_seed=2**64 - 1, values=np.ones((2, 3), FLOAT32)),
    "shared_statistics": k.SharedStatistics(
        labels=[2, 0],
        counts=np.int32([5, 9]),  # type: ignore[arg-type]
        means=np.ones((2, 4), FLOAT16),
        directions=np.int8([[-127, 0, 5, 127]]),  # type: ignore[arg-type]
        steps=np.full(1, 0.5, FLOAT16),
        variances=np.zeros(4, FLOAT16),
        df=np.array(12, np.int32),
    ),
    "class_space": k.ClassSpace(
        labels=[0, 2],
        counts=np.int32([9, 5]),  # type: ignore[arg-type]
        directions=np.ones((4, 1), FLOAT16),
        origin=np.zeros(1, FLOAT16),
        centres=np.full((2, 1), -0.5, FLOAT16),
        df=np.array(2**40, np.int64),
        shrinkage=np.array(0.1, np.float64),
        outside=np.array(1e300, np.float64),
        leverage=0.3,
    ),
    "linear_head": k.LinearHead(
        labels=[0, 2],
        counts=np.int32([9, 5]),  # type: ignore[arg-type]
        mean=np.full(4, 0.25, FLOAT16),
        weights=np.full((2, 5), -2.0, FLOAT16),
    ),
    "head_gradient": k.HeadGradient(gradient=np.full((3, 5), 0.5, FLOAT16), scale=2.0**-3, loss=12.5, rows=40),
    "class_sums": k.ClassSums(
        counts=f32([-3.5, 9.0]),
        sums=np.full((2, 3), -0.25, FLOAT32),
        second_moment=np.arange(6, dtype=FLOAT32),
        mu=0.2680511232,
        discrete=True,
    ),
    "named_tensors": k.NamedTensors(
        tensors={"prototypes": np.ones((2, 3), FLOAT32), "counts": np.array([4, 2**40])},
        reveals=["features", "counts"],
    ),
    "secure_message": k.SecureMessage(
        parameters=bytes(range(44)),
        nonce=bytes(32),
        entries=[k.SecureEntry(index=7, device="phone", keys=bytes(100), endorsement=b"", signature=bytes(64))],
        roster=bytes(range(32)),
        devices=5,
        members=b"\x1d",
        keys=np.arange(100, dtype=np.uint8),
        boxes=np.zeros((2, 80), np.uint8),
        shares=np.ones((3, 32), np.uint8),
        gradient=np.arange(14, dtype=np.uint8),
    ),
    "network_file": k.NetworkFile(onnx=np.arange(256, dtype=np.uint8)),
    "distillation_gradient": k.DistillationGradient(
        gradients={"w": f32([[-0.0, np.inf, np.nan]])}, batch_size=32, loss=0.1
    ),
    "generator": k.Generator(parameters=MODEL, noise_size=100),
    "discriminator": k.Discriminator(parameters=MODEL, shares_extractor=True),
    "plan": k.Plan(values={"cut": 2, "rate": 0.1, "guard": False, "text": "é", "layers": [3, -1], "none": []}),
    "metrics": k.Metrics(
        metrics=[
            k.Metric(
                name="accuracy", split="test", sum=3.0, count=4, by_class=[k.ClassCount(label=1, sum=1.0, count=2)]
            )
        ]
    ),
}
