"""Builds a run's server half and its contract, which the front checks without importing methods.

Reads the proxy set that the contract names ([proxy] in run.toml), and checks the files that the contract refers to when
the run's engine starts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fleetdistill.errors import ConfigurationError, DamagedError, DataError, RunError
from fleetdistill.knowledge import ProxySet
from fleetdistill.link.credentials import AUTHORITIES
from fleetdistill.methods import config_to_plan
from fleetdistill.training.model import fingerprint
from fleetdistill.training.proxy_set import PART, proxy_data
from fleetdistill.wire.codec import Payload, encode
from fleetdistill.wire.kind import PartSchema
from fleetdistill.wire.payload import ELEMENT_TYPES
from fleetdistill.wire.schema import TypedShape
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.config.labelled_file import read_labelled
from fleetdistill_server.config.run_config import ProxySection, RunConfig
from fleetdistill_server.engine.buffering import check_buffered
from fleetdistill_server.methods import server_class
from fleetdistill_server.methods.base import MethodContext, ServerMethod, pick_torch_device
from fleetdistill_server.methods.traffic import declared_parts, features_of
from fleetdistill_server.store.store import Store
from fleetdistill_server.training.hardware import Hardware
from fleetdistill_server.training.trainer import Trainer

if TYPE_CHECKING:
    from fleetdistill.training.local_training import TensorData

__all__ = ["build_method"]

logger = logging.getLogger("fleetdistill.server.proxy")


def build_method(config: RunConfig) -> ServerMethod:
    """Builds the server half of a run, with models initialised from the run's seed."""
    settings = config.method_config()
    method = server_class(config.run.method)(settings, method_context(config))
    check_buffered(config.run, method)
    return method


def pace_warning(config: RunConfig) -> str:
    """Returns a sentence about a run in which devices work without a pause; empty for all other runs."""
    run = config.run
    waits_for_changes = server_class(run.method).is_due is not ServerMethod.is_due
    if run.rounds or run.min_round_seconds or waits_for_changes:
        return ""
    return (
        f"run {run.name!r} has no end, and {run.method} trains in every round, so its devices work without a pause; "
        "set [run] min_round_seconds to the time between two rounds, such as 3600"
    )


def method_context(config: RunConfig) -> MethodContext:
    """Builds the context of a run's server half.

    Raises:
        ConfigurationError: The proxy set or the torch device cannot be used.
    """
    proxy, proxy_payload = register_proxy(config)
    device = pick_torch_device(config.server.torch_device)
    return MethodContext(
        classes=len(config.contract.class_names()),
        input_shape=tuple(config.contract.input_shape),
        models=config.model,
        torch_device=device,
        seed=config.run.seed,
        knowledge_type=config.contract.knowledge_type,
        proxy=proxy,
        proxy_payload=proxy_payload,
        evaluation_file=config.evaluation.data,
        trusted_rows=config.evaluation.trusted_rows,
        run=config.run.name,
        class_names=tuple(config.contract.class_names()),
        authorities_file=str(Path(config.server.pki) / AUTHORITIES) if config.server.pki else "",
        trainer=Trainer(Hardware.of(device, config.engine)),
    )


def initial_payload(method: ServerMethod) -> Payload | None:
    """Returns the initial weights that a new server half distributes to all devices; None if it distributes none."""
    start = method.initial()
    return None if start is None else encode({"initial": start})


def extractor_payload(method: ServerMethod) -> Payload | None:
    """Returns the extractor file that devices without PyTorch download; None if the method has no such file."""
    file = method.extractor_file()
    return None if file is None else encode({"extractor": file})


def make_contract(
    config: RunConfig, method: ServerMethod
) -> tuple[contract_pb2.Contract, Payload | None, Payload | None]:
    """Builds a run's contract.

    Returns:
        The contract, the initial weights and the extractor file; the last two are None if the method does not have
        them.

    Raises:
        ConfigurationError: The method requires a proxy set, but the run does not have one.
    """
    initial = initial_payload(method)
    extractor = extractor_payload(method)
    needs = method.requirements()
    exchanges = method.run_exchanges()
    context = method.context
    on_server = method.needs(method.config).server_proxy_set
    if (needs.proxy_set or on_server) and context.proxy is None:
        text = "on the server" if on_server else "which every device downloads"
        raise ConfigurationError(
            f"{config.run.method} needs a labelled proxy set, {text}; set [proxy] data in run.toml"
        )
    downloaded = None if on_server else context.proxy
    contract = contract_pb2.Contract(
        run=config.run.name,
        method=config.run.method,
        config=encode({"config": config_to_plan(method.config)}).parts.parts[0].plan,
        classes=config.contract.class_names(),
        input_shape=config.contract.input_shape,
        features=[contract_pb2.NamedShape(name=name, shape=shape) for name, shape in features_of(exchanges).items()],
        knowledge_type=ELEMENT_TYPES[np.dtype(config.contract.knowledge_type)],
        requirements=needs,
        extractor_fingerprint=fingerprint(context.extractor()) if needs.same_extractor else "",
        model_fingerprint=fingerprint(context.device_model()) if needs.same_architecture else "",
        initial_weights=initial.sha256 if initial else b"",
        proxy_digest=context.proxy_digest if downloaded is not None else b"",
        proxy_samples=len(downloaded) if downloaded is not None else 0,
        rounds=config.run.rounds,
        seed=config.run.seed,
        threads=config.run.threads,
        max_upload_bytes=config.server.max_upload_bytes,
        max_samples=config.contract.max_samples,
        extractor_file=extractor.sha256 if extractor else b"",
        uploads=[_part_shapes(name, part) for name, part in declared_parts(exchanges).items()],
    )
    return contract, initial, extractor


def _part_shapes(name: str, part: PartSchema) -> contract_pb2.PartShapes:
    return contract_pb2.PartShapes(
        part=name,
        tensors=[_named(path, shape) for path, shape in part.declared.items()],
        min_samples=part.min_samples,
        max_rows=part.max_rows,
        rows_per_direction=part.rows_per_direction,
    )


def _named(name: str, shape: tuple[int, ...]) -> contract_pb2.NamedShape:
    named = contract_pb2.NamedShape(name=name, shape=shape)
    if isinstance(shape, TypedShape):
        named.element_type = ELEMENT_TYPES[shape.dtype]
    return named


def check_proxy(run: str, contract: contract_pb2.Contract, method: ServerMethod) -> None:
    """Raises RunError if the devices' proxy set has changed since the run's start; knowledge refers to its rows."""
    if method.needs(method.config).server_proxy_set:
        return
    began, now = contract.proxy_digest, method.context.proxy_digest
    if began != now:
        raise RunError(
            f"[proxy] data: run {run!r} began with a proxy set with digest "
            f"{began.hex()[:12] or 'none'}, but the current file has digest {now.hex()[:12] or 'none'}; "
            "restore the original file, or choose another run name"
        )


def check_readable(store: Store, contract: contract_pb2.Contract, method: ServerMethod) -> None:
    """Verifies the payloads that every new device downloads, and restores damaged ones."""
    if method.context.proxy_payload is not None:
        store.blobs.put(method.context.proxy_payload)  # replaces a damaged file
    if contract.initial_weights:
        _ensure_readable(store, contract.initial_weights, lambda: initial_payload(method))
    if contract.extractor_file:
        _ensure_readable(store, contract.extractor_file, lambda: extractor_payload(method))


def _ensure_readable(store: Store, sha256: bytes, make: Callable[[], Payload | None]) -> None:
    """Recreates and stores a payload if the stored file is damaged; this can take seconds."""
    try:
        store.blobs.open(sha256, verify=True)
    except DamagedError:
        made = make()
        if made is None or made.sha256 != sha256:
            raise
        store.blobs.forget_verified()
        store.blobs.put(made)


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
    proxy = _read_proxy(config.proxy)
    classes = len(config.contract.class_names())
    try:
        data = proxy_data(proxy, config.contract.input_shape, classes)
    except DataError as error:
        raise ConfigurationError(f"[proxy] data: {error}") from error
    missing = sorted(set(range(classes)) - set(data.labels.tolist()))
    if missing:
        logger.warning("proxy set %r has no samples of classes %s", proxy.name, ", ".join(map(str, missing)))
    return data, encode({PART: proxy})


def _read_proxy(section: ProxySection) -> ProxySet:
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
