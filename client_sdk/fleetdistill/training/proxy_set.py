"""The proxy set: a small labelled data set that the server and every device of a run hold, in one fixed order.

The operator registers it, its payload's SHA-256 stands in the contract, and a device fetches it once by that digest. So
name, licence, order, inputs and labels are one version: a changed byte is another proxy set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fleetdistill.errors import DataError, WireError
from fleetdistill.knowledge import Kind, ProxySet
from fleetdistill.training.local_training import TensorData, as_tensor_data

PART = "proxy"
"""Name of the only part of the payload that carries a proxy set."""


def proxy_data(proxy: ProxySet, input_shape: Sequence[int], classes: int) -> TensorData:
    """The samples of a proxy set, in their order, checked against the run.

    Args:
        proxy: What was registered or fetched.
        input_shape: Shape of one input of the run.
        classes: C of the run.

    Raises:
        DataError: It is empty, of another shape, not finite, or a label is outside `[0, C)`.
    """
    if not len(proxy.labels):
        raise DataError(f"proxy set {proxy.name!r} is empty; it needs at least one sample, better one of each class")
    try:
        data = as_tensor_data((np.array(proxy.inputs), np.array(proxy.labels)), classes)
    except DataError as error:
        raise DataError(f"proxy set {proxy.name!r}: {error}") from error
    if list(data.inputs.shape[1:]) != list(input_shape):
        shape = list(data.inputs.shape[1:])
        raise DataError(f"proxy set {proxy.name!r} has inputs of shape {shape}, the run has {list(input_shape)}")
    return data


def proxy_of(parts: Mapping[str, Kind]) -> ProxySet:
    """The proxy set in a payload's parts. Raises WireError if there is none."""
    found = parts.get(PART)
    if not isinstance(found, ProxySet):
        raise WireError(f"part {PART!r} is {type(found).__name__}, expected a ProxySet")
    return found
