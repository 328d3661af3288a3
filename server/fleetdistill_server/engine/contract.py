"""Builds a run's server half and its contract, which the front checks without importing methods."""

from __future__ import annotations

import numpy as np

from fleetdistill.errors import ConfigurationError
from fleetdistill.methods import config_to_plan
from fleetdistill.training.model import fingerprint
from fleetdistill.wire.codec import Payload, encode
from fleetdistill.wire.payload import ELEMENT_TYPES
from fleetdistill.wire.schema import PartSchema, TypedShape
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.config.run_config import RunConfig
from fleetdistill_server.engine.buffering import check_buffered
from fleetdistill_server.engine.proxy_set import register_proxy
from fleetdistill_server.methods import server_class
from fleetdistill_server.methods.base import ServerMethod
from fleetdistill_server.methods.context import MethodContext, pick_torch_device
from fleetdistill_server.methods.traffic import declared_parts, features_of
from fleetdistill_server.training.hardware import Hardware
from fleetdistill_server.training.trainer import Trainer


def build_method(config: RunConfig) -> ServerMethod:
    """Builds the server half of a run, with models initialised from the run's seed."""
    settings = config.method_config()
    method = server_class(config.run.method, settings)(settings, method_context(config))
    check_buffered(config.run, method)
    return method


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
    needs, exchanges = method.requirements(), method.run_exchanges()
    context = method.context
    if needs.proxy_set and context.proxy is None:
        text = "needs a labelled proxy set, which every device downloads; set [proxy] data in run.toml"
        raise ConfigurationError(f"{config.run.method} {text}")
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
        proxy_digest=context.proxy_digest,
        proxy_samples=len(context.proxy) if context.proxy is not None else 0,
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
        least_samples=part.least_samples,
        most_rows=part.most_rows,
        rows_per_direction=part.rows_per_direction,
    )


def _named(name: str, shape: tuple[int, ...]) -> contract_pb2.NamedShape:
    named = contract_pb2.NamedShape(name=name, shape=shape)
    if isinstance(shape, TypedShape):
        named.element_type = ELEMENT_TYPES[shape.dtype]
    return named
