"""Reads and checks the proxy set that the operator configures as [proxy] in run.toml."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from fleetdistill.errors import ConfigurationError, DataError
from fleetdistill.knowledge import ProxySet
from fleetdistill.training.proxy_set import PART, proxy_data
from fleetdistill.wire.codec import Payload, encode
from fleetdistill_server.config.labelled_file import read_labelled
from fleetdistill_server.config.run_config import ProxySection, RunConfig

if TYPE_CHECKING:
    from fleetdistill.training.local_training import TensorData

logger = logging.getLogger("fleetdistill.server.proxy")


def register_proxy(config: RunConfig) -> tuple[TensorData | None, Payload | None]:
    """Reads a run's proxy set.

    Returns:
        The proxy set as tensors for the server half and as the payload that devices fetch; None and None if the run
        has no proxy set.

    Raises:
        ConfigurationError: The file is missing or damaged, or its samples do not fit the run.
    """
    if not config.proxy.data:
        return None, None
    proxy = _read(config.proxy)
    classes = len(config.contract.class_names())
    try:
        data = proxy_data(proxy, config.contract.input_shape, classes)
    except DataError as error:
        raise ConfigurationError(f"[proxy] data: {error}") from error
    missing = sorted(set(range(classes)) - set(data.labels.tolist()))
    if missing:
        logger.warning("proxy set %r has no samples of classes %s", proxy.name, ", ".join(map(str, missing)))
    return data, encode({PART: proxy})


def _read(section: ProxySection) -> ProxySet:
    try:
        inputs, labels = read_labelled(section.data)
    except DataError as error:
        raise ConfigurationError(f"[proxy] data: {error}") from error
    if labels.dtype.kind not in "iu" or labels.ndim != 1 or inputs.dtype.kind != "f":
        raise ConfigurationError(
            f"[proxy] data: inputs are {inputs.dtype} and labels are {labels.dtype} of shape {list(labels.shape)}; "
            "expected floating-point inputs [P, ...] and integer labels [P]"
        )
    inputs, labels = np.ascontiguousarray(inputs, np.float32), labels.astype(np.int32)
    return ProxySet(name=section.name, licence=section.licence, inputs=inputs, labels=labels)
