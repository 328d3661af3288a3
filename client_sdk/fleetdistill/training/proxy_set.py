"""The proxy set: a small labelled data set that the server and every device of a run have, in the same order.

The operator registers it. The contract contains the SHA-256 digest of its payload, and each device downloads it once by
that digest. A change of name, licence, order, inputs or labels therefore makes a different proxy set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fleetdistill.errors import DataError, WireError
from fleetdistill.knowledge import Kind, ProxySet
from fleetdistill.training.local_training import TensorData, as_tensor_data

PART = "proxy"
"""Name of the only part of a proxy set's payload."""


def proxy_data(proxy: ProxySet, input_shape: Sequence[int], classes: int) -> TensorData:
    """Returns a proxy set's samples in order, after checking them against the run.

    Args:
        proxy: The registered or downloaded proxy set.
        input_shape: Shape of one input of the run.
        classes: Number of classes C of the run.

    Raises:
        DataError: The set is empty, has another shape or a non-finite input, or a label is outside `[0, C)`.
    """
    if not len(proxy.labels):
        raise DataError(f"proxy set {proxy.name!r} is empty; add at least one sample, if possible one of each class")
    try:
        data = as_tensor_data((np.array(proxy.inputs), np.array(proxy.labels)), classes)
    except DataError as error:
        raise DataError(f"proxy set {proxy.name!r}: {error}") from error
    if list(data.inputs.shape[1:]) != list(input_shape):
        shape = list(data.inputs.shape[1:])
        raise DataError(f"proxy set {proxy.name!r} has inputs of shape {shape}, but the run has {list(input_shape)}")
    return data


def proxy_of(parts: Mapping[str, Kind]) -> ProxySet:
    """Returns the proxy set of a payload's parts. Raises WireError if there is none."""
    result = parts.get(PART)
    if not isinstance(result, ProxySet):
        raise WireError(f"part {PART!r} is {type(result).__name__}, expected a ProxySet")
    return result
