"""Parameters of secure sums of both modes."""

from __future__ import annotations

from fleetdistill.secure.session import LIMITED, PRIVATE, Parameters

PRIVATE_SUM = Parameters(
    mode=PRIVATE,
    width=8,
    keys=0,
    classes=10,
    dimensions=64,
    grid_bits=16,
    clip_bits=0,
    count_bits=10,
    row_bits=20,
    least=14,
    honest=14,
    most=20,
    degree=0,
    epsilon=1.0,
    delta=1e-5,
)
LIMITED_SUM = Parameters(
    mode=LIMITED,
    width=8,
    keys=0,
    classes=2,
    dimensions=3,
    grid_bits=8,
    clip_bits=5,
    count_bits=0,
    row_bits=20,
    least=3,
    honest=0,
    most=20,
    degree=0,
)
