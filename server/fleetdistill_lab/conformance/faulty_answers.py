"""Answers that violate one rule each, for which a server must return a final error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from fleetdistill.knowledge import ModelParameters
from fleetdistill.wire.codec import Payload, encode
from fleetdistill.wire.codes import Code
from fleetdistill.wire.payload import CHUNK_BYTES
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2, tensor_pb2
from fleetdistill_lab.conformance.player import SAMPLES, Player, chunk, chunks_of, payload_of

Sends = Callable[[Player, ModelParameters, contract_pb2.Contract], object]


def _send(player: Player, payload: Payload, **changes: Any) -> None:
    player.upload(payload.header(), chunks_of(payload), **changes)


def _with_header(change: Callable[[knowledge_pb2.PayloadHeader], None]) -> Sends:
    def send(player: Player, model: ModelParameters, contract: contract_pb2.Contract) -> None:
        payload = payload_of(model)
        header = payload.header()
        change(header)
        player.upload(header, chunks_of(payload))

    return send


def _with_model(change: Callable[[dict[str, Any]], object]) -> Sends:
    def send(player: Player, model: ModelParameters, contract: contract_pb2.Contract) -> None:
        parameters = dict(model.parameters)
        change(parameters)
        _send(player, payload_of(replace(model, parameters=parameters)))

    return send


def _with_chunk(make: Callable[[Payload], knowledge_pb2.Chunk]) -> Sends:
    def send(player: Player, model: ModelParameters, contract: contract_pb2.Contract) -> None:
        payload = payload_of(model)
        player.upload(payload.header(), [make(payload)])

    return send


def _first(parameters: Mapping[str, Any]) -> str:
    return next(iter(parameters))


def _tensor(header: knowledge_pb2.PayloadHeader) -> tensor_pb2.Tensor:
    return header.parts.parts[0].model_parameters.parameters[0].tensor


def _change_type(header: knowledge_pb2.PayloadHeader) -> None:
    _tensor(header).element_type = tensor_pb2.ELEMENT_TYPE_INT32  # of the same size


def _no_encoding(header: knowledge_pb2.PayloadHeader) -> None:
    _tensor(header).encoding = tensor_pb2.ENCODING_UNSPECIFIED


def _inline_data(header: knowledge_pb2.PayloadHeader) -> None:
    _tensor(header).data = b"1234"


def _one_byte_more(header: knowledge_pb2.PayloadHeader) -> None:
    header.data_bytes += 1


def _short_digest(header: knowledge_pb2.PayloadHeader) -> None:
    header.sha256 = header.sha256[:-1]


def _missing_tensor(parameters: dict[str, Any]) -> None:
    del parameters[_first(parameters)]


def _other_shape(parameters: dict[str, Any]) -> None:
    name = _first(parameters)
    parameters[name] = np.zeros((*parameters[name].shape, 2), np.float32)


def _nan(parameters: dict[str, Any]) -> None:
    name = _first(parameters)
    parameters[name] = np.full_like(parameters[name], np.nan)


def _no_parts(player: Player, model: ModelParameters, contract: contract_pb2.Contract) -> None:
    _send(player, encode({}))


def _another_part(player: Player, model: ModelParameters, contract: contract_pb2.Contract) -> None:
    _send(player, encode({"parameters": model, "another": model}))


def _no_samples(player: Player, model: ModelParameters, contract: contract_pb2.Contract) -> None:
    _send(player, payload_of(model), samples=0)


def _more_samples(player: Player, model: ModelParameters, contract: contract_pb2.Contract) -> None:
    _send(player, payload_of(model), samples=SAMPLES + 1)


def _too_large(player: Player, model: ModelParameters, contract: contract_pb2.Contract) -> None:
    header = payload_of(model).header()
    tensor = _tensor(header)
    before = 4 * int(np.prod(tensor.shape))
    del tensor.shape[:]
    tensor.shape.append(contract.max_upload_bytes // 4 + 1)
    header.data_bytes += 4 * tensor.shape[0] - before
    player.upload(header, [])


def _unknown_compression(payload: Payload) -> knowledge_pb2.Chunk:
    result = chunks_of(payload)[0]
    result.compression = 99  # type: ignore[assignment]
    return result


FAULTY_ANSWERS: Mapping[str, tuple[Sends, Code]] = MappingProxyType(
    {
        "parts.missing": (_no_parts, Code.BAD_MESSAGE),
        "parts.extra": (_another_part, Code.BAD_MESSAGE),
        "tensor.missing": (_with_model(_missing_tensor), Code.BAD_TENSOR),
        "tensor.extra": (_with_model(lambda one: one.update(another=np.zeros(1, np.float32))), Code.BAD_TENSOR),
        "tensor.shape": (_with_model(_other_shape), Code.BAD_TENSOR),
        "tensor.type": (_with_header(_change_type), Code.BAD_TENSOR),
        "tensor.data": (_with_header(_inline_data), Code.BAD_MESSAGE),
        "tensor.encoding": (_with_header(_no_encoding), Code.BAD_MESSAGE),
        "value.finite": (_with_model(_nan), Code.BAD_VALUE),
        "header.data_bytes": (_with_header(_one_byte_more), Code.BAD_MESSAGE),
        "header.sha256": (_with_header(_short_digest), Code.BAD_MESSAGE),
        "header.limit": (_too_large, Code.TOO_LARGE),
        "samples.zero": (_no_samples, Code.BAD_VALUE),
        "samples.more": (_more_samples, Code.BAD_VALUE),
        "chunks.empty": (_with_chunk(lambda _: chunk(0, b"")), Code.BAD_MESSAGE),
        "chunks.limit": (_with_chunk(lambda _: chunk(0, bytes(CHUNK_BYTES + 1))), Code.BAD_MESSAGE),
        "chunks.beyond": (_with_chunk(lambda one: chunk(one.data_bytes, b"1234")), Code.BAD_MESSAGE),
        "chunks.compression": (_with_chunk(_unknown_compression), Code.BAD_MESSAGE),
    }
)
"""By rule: a function that sends such an answer, and the code of the error."""
