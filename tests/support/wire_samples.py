"""Small contracts, payloads and chunks that the tests of codec, ingest, store and device API share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import google_crc32c
import numpy as np

from fleetdistill.knowledge import Array, Metric, Metrics, SampleKnowledge
from fleetdistill.wire.codec import ArraySource, Payload, encode
from fleetdistill.wire.digests import Algorithm, digest
from fleetdistill.wire.payload import ELEMENT_TYPES, slots
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2, service_pb2, tensor_pb2

CLASSES = 3
CUT_SHAPE = (2, 2)
EXPECTS = {"knowledge": "sample_knowledge"}
COLUMNS = ("features", "logits", "labels")


def f32(values: Any) -> Array:
    """A float32 array."""
    return np.array(values, np.float32)


def i32(values: Any) -> Array:
    """An int32 array, the type of labels."""
    return np.array(values, np.int32)


def i64(values: Any) -> Array:
    """An int64 array, the type of sample ids."""
    return np.array(values, np.int64)


def make_contract(**changes: Any) -> contract_pb2.Contract:
    """A contract of three classes and one feature column `cut` of shape [2, 2], in float32."""
    settings: dict[str, Any] = {
        "run": "digits",
        "method": "feddkc",
        "classes": [str(label) for label in range(CLASSES)],
        "input_shape": [1, 8, 8],
        "features": [contract_pb2.NamedShape(name="cut", shape=CUT_SHAPE)],
        "knowledge_type": tensor_pb2.ELEMENT_TYPE_FLOAT32,
        "requirements": contract_pb2.Requirements(same_extractor=True, columns=COLUMNS),
        "extractor_fingerprint": "e" * 64,
        "rounds": 3,
        "threads": 1,
        "max_upload_bytes": 1 << 20,
    }
    return contract_pb2.Contract(**{**settings, **changes})


def make_profile(**changes: Any) -> contract_pb2.DeviceProfile:
    """A device that fits `make_contract()`."""
    settings: dict[str, Any] = {
        "model_name": "small",
        "samples": 1 << 22,  # no test sends as many rows
        "classes": CLASSES,
        "input_shape": [1, 8, 8],
        "features": [contract_pb2.NamedShape(name="cut", shape=CUT_SHAPE)],
        "knowledge_types": [tensor_pb2.ELEMENT_TYPE_FLOAT32, tensor_pb2.ELEMENT_TYPE_FLOAT16],
        "allowed_columns": COLUMNS,
        "extractor_fingerprint": "e" * 64,
    }
    return contract_pb2.DeviceProfile(**{**settings, **changes})


def make_knowledge(rows: int = 4, **changes: Any) -> SampleKnowledge:
    """Knowledge about `rows` samples that fits `make_contract()`."""
    columns: dict[str, Any] = {
        "sample_ids": np.arange(rows, dtype=np.int64) * 10,
        "features": {"cut": np.arange(rows * 4, dtype=np.float32).reshape(rows, *CUT_SHAPE) / 8},
        "logits": np.arange(rows * CLASSES, dtype=np.float32).reshape(rows, CLASSES) / 4,
        "labels": np.arange(rows, dtype=np.int32) % CLASSES,
    }
    return SampleKnowledge(**{**columns, **changes})


def make_metrics(correct: float = 3, count: int = 4, name: str = "accuracy") -> Metrics:
    """One figure."""
    return Metrics(metrics=[Metric(name=name, split="test", sum=correct, count=count)])


def make_payload(rows: int = 4, **changes: Any) -> Payload:
    """A payload with one part `knowledge`."""
    return encode({"knowledge": make_knowledge(rows, **changes)})


def raw_payload(arrays: Mapping[str, Array]) -> Payload:
    """Arrays as buffers of a part `raw`, in exactly their own types; `encode` would narrow float64."""
    parts = knowledge_pb2.Parts()
    part = parts.parts.add(name="raw")
    part.model_parameters.SetInParent()
    for name, array in arrays.items():
        tensor = part.model_parameters.buffers.add(name=name).tensor
        tensor.element_type = ELEMENT_TYPES[array.dtype]
        tensor.shape.extend(array.shape)
        tensor.encoding = tensor_pb2.ENCODING_RAW
    result = slots(parts)
    source = ArraySource(result, list(arrays.values()))
    return Payload(parts, result, source, digest(parts, iter([source.read(0, result[-1].stop if result else 0)])))


def data_of(payload: Payload) -> bytes:
    """All tensor bytes."""
    return payload.source.read(0, payload.data_bytes)


def make_chunk(offset: int, data: bytes) -> knowledge_pb2.Chunk:
    """A chunk with the right checksum."""
    return knowledge_pb2.Chunk(offset=offset, data=data, crc32c=google_crc32c.value(data))


def cut_at(data: bytes, places: Iterable[int]) -> Iterator[knowledge_pb2.Chunk]:
    """Chunks of a payload's data, cut at these byte positions."""
    for start, stop in pairwise(sorted({0, len(data), *places})):
        yield make_chunk(start, data[start:stop])


def in_pieces(payload: Payload, size: int) -> list[knowledge_pb2.Chunk]:
    """Chunks of a payload that end at every multiple of `size` bytes."""
    return list(cut_at(data_of(payload), range(0, payload.data_bytes, size)))


def make_identity(device: str = "d1", secret: bytes = b"", run: str = "digits") -> service_pb2.Identity:
    """Who calls."""
    return service_pb2.Identity(run=run, device=device, secret=secret)


def with_blake3(payload: Payload) -> Payload:
    """The payload with both digests, as a download can have them."""
    return replace(payload, blake3=digest(payload.parts, [data_of(payload)], Algorithm.BLAKE3))


def by_blake3(payload: Payload) -> Payload:
    """The payload as an upload that its BLAKE3 identifies."""
    return replace(with_blake3(payload), sha256=b"")
