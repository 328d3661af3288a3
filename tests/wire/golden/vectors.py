"""Test vectors of the wire format for clients in other languages: writes protos/vectors.json from today's codec.

    python tests/wire/golden/vectors.py

docs/reference/wire-format.md describes the entries. `tests/wire/test_vectors.py` compares the file with the codec.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from google.protobuf import text_format
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from fleetdistill.errors import RefusedError
from fleetdistill.knowledge import (
    Kind,
    Metric,
    Metrics,
    ModelParameters,
    ProxyKnowledge,
    RefinedKnowledge,
    SampleKnowledge,
)
from fleetdistill.training.model import fingerprint
from fleetdistill.wire.codec import KNOWLEDGE_TYPES, Payload, encode
from fleetdistill.wire.codes import Code, rich_status
from fleetdistill.wire.digests import Algorithm, digest
from fleetdistill.wire.payload import dequantize, pieces, quantize
from fleetdistill.wire.v1 import contract_pb2, enrolment_pb2, knowledge_pb2, service_pb2

FILE = Path(__file__).parents[3] / "protos/vectors.json"
_SECRET, _DIGEST = bytes(range(32)), bytes(range(32, 64))


def vectors() -> dict[str, list[dict[str, Any]]]:
    """The content of the file."""
    return {
        "crc32c": [{"data": data.hex(), "crc32c": google_crc32c.value(data)} for data in (b"123456789", bytes(32))],
        "payloads": [_payload(*given) for given in _payloads()],
        "quantised": [_quantised([[0, -1.5, 3], [10, -1.5, 2.5], [5, -1.5, 0.25]])],
        "compressed": [_compressed(np.zeros(256, "<f4").tobytes())],
        "fingerprints": list(_fingerprints()),
        "tokens": [_token()],
        "errors": [
            _error(Code.TOO_MANY, "too many uploads", after_seconds="12.5"),
            _error(
                Code.BAD_IDENTITY,
                "the server has no check-in of device 'd1' with this secret; it must check in again",
                check_in="again",
            ),
        ],
        "messages": [_message(message) for message in _messages()],
    }


def _payloads() -> Iterator[tuple[str, dict[str, Kind], str, int]]:
    weight, bias = np.arange(12, dtype="f4").reshape(3, 4) / 4, np.zeros(3, "f4")
    metrics = Metrics(metrics=[Metric(name="accuracy", split="test", sum=7, count=8)])
    parameters = ModelParameters(
        parameters={"weight": weight, "bias": bias}, buffers={"num_batches_tracked": np.array(5, np.int64)}
    )
    yield "no parts", {}, "float32", 1 << 20
    yield "parameters and metrics", {"parameters": parameters, "metrics": metrics}, "float32", 16
    own = SampleKnowledge(
        sample_ids=np.array([3, 0]),
        features={"cut": np.array([[1.0, -2.0, 0.5], [0.0, 65504.0, -0.25]])},
        logits=np.array([[0.125, 2.0], [-1.0, 3.5]]),
        labels=np.array([1, 0], np.int32),
    )
    yield "own samples, float16", {"knowledge": own}, "float16", 1 << 20
    yield "own samples, uint8", {"knowledge": own}, "uint8", 1 << 20
    yield "no refined knowledge", {"knowledge": RefinedKnowledge(valid=False)}, "float16", 1 << 20
    refined = RefinedKnowledge(valid=True, sample_ids=np.array([0, 3]), values=np.array([[1.0, 0.5], [0.25, -8.0]]))
    yield "refined knowledge", {"knowledge": refined}, "float16", 1 << 20
    proxy = ProxyKnowledge(valid=True, proxy_digest=_DIGEST, logits=np.array([[1.0, 2.0, 3.0]]))
    yield "proxy knowledge", {"knowledge": proxy}, "float32", 1 << 20


def _payload(name: str, parts: dict[str, Kind], knowledge_type: str, chunk_bytes: int) -> dict[str, Any]:
    payload = encode(parts, np.dtype(knowledge_type))
    return {
        "name": name,
        "knowledge_type": knowledge_type,
        "parts": payload.parts.SerializeToString(deterministic=True).hex(),
        "text": text_format.MessageToString(payload.parts),
        "tensors": [
            {"path": slot.path, "type": slot.dtype.name, "shape": slot.shape, "values": _values(payload, slot)}
            for slot in payload.slots
        ],
        "data": payload.source.read(0, payload.data_bytes).hex(),
        "sha256": payload.sha256.hex(),
        "blake3": digest(payload.parts, pieces(payload.source, 0, payload.data_bytes), Algorithm.BLAKE3).hex(),
        "header": payload.header().SerializeToString(deterministic=True).hex(),
        "chunk_bytes": chunk_bytes,
        "chunks": list(_chunks(payload, chunk_bytes)),
    }


def _values(payload: Payload, slot: Any) -> Any:
    data = payload.source.read(slot.start, slot.nbytes)
    return np.frombuffer(data, slot.dtype).reshape(slot.shape).tolist()


def _chunks(payload: Payload, size: int) -> Iterator[dict[str, int]]:
    for start in range(0, payload.data_bytes, size):
        (data,) = pieces(payload.source, start, min(start + size, payload.data_bytes))
        yield {"offset": start, "length": len(data), "crc32c": google_crc32c.value(data)}


def _quantised(numbers: list[list[float]]) -> dict[str, Any]:
    elements, step, minimum = quantize(np.array(numbers, "f4"))
    decoded = dequantize(elements, step, minimum)
    arrays = {"elements": elements, "step": step, "minimum": minimum, "decoded": decoded}
    return {"numbers": numbers} | {name: array.tolist() for name, array in arrays.items()}


def _compressed(data: bytes) -> dict[str, str]:
    import zstandard

    packed = zstandard.ZstdCompressor(level=1).compress(data)
    chunk = knowledge_pb2.Chunk(
        data=packed, crc32c=google_crc32c.value(packed), compression=knowledge_pb2.COMPRESSION_ZSTD
    )
    return {"chunk": chunk.SerializeToString().hex(), "data": data.hex()}


def _fingerprints() -> Iterator[dict[str, Any]]:
    from torch import nn

    for module in (nn.Linear(4, 3), nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))):
        entries = sorted(
            [name, list(one.shape), str(one.dtype).removeprefix("torch."), _role(one)]
            for name, one in module.state_dict(keep_vars=True).items()
        )
        text = json.dumps({"cuts": [], "entries": entries}, separators=(",", ":"))
        yield {"entries": entries, "cuts": [], "json": text, "sha256": fingerprint(module)}


def _role(tensor: Any) -> str:
    from torch import nn

    return "parameter" if isinstance(tensor, nn.Parameter) else "buffer"


def _token() -> dict[str, Any]:
    token = enrolment_pb2.EnrolmentToken(secret=_SECRET, ca=b"\x30\x82DER", port=50052)
    text = "fd1-" + base64.urlsafe_b64encode(token.SerializeToString()).decode().rstrip("=")
    return {"token": text, "secret": token.secret.hex(), "ca": token.ca.hex(), "port": token.port}


def _error(code: Code, text: str, **metadata: str) -> dict[str, Any]:
    status = rich_status(RefusedError(code, text, metadata))
    return {
        "details": status.SerializeToString(deterministic=True).hex(),
        "status": status.code,
        "text": text,
        "code": str(code),
        "metadata": metadata,
    }


def error_of(details: bytes) -> tuple[int, str, str, dict[str, str]]:
    """Status, text, code and metadata in the value of `grpc-status-details-bin`."""
    status, info = status_pb2.Status.FromString(details), error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return status.code, status.message, info.reason, dict(info.metadata)


def _messages() -> Iterator[Message]:
    identity = service_pb2.Identity(run="digits", device="d1", secret=_SECRET)
    name = service_pb2.UploadName(round=3, step_number=1, attempt=2, payload=_DIGEST)
    profile = contract_pb2.DeviceProfile(
        model_name="linear",
        samples=40,
        classes=3,
        input_shape=[4],
        knowledge_types=KNOWLEDGE_TYPES[:2],
        allowed_columns=["parameters"],
    )
    yield service_pb2.CheckInRequest(identity=identity, profile=profile)
    yield service_pb2.NextAskRequest(identity=identity, wait_seconds=20)
    yield service_pb2.NextAskResponse(come_back=service_pb2.ComeBack(after_seconds=0, before_seconds=0.5))
    ask = service_pb2.Ask(
        round=3, step_number=1, step="train", payload=_DIGEST, payload_bytes=60, seed=2**63 + 1, deadline_seconds=600
    )
    yield service_pb2.NextAskResponse(ask=ask)
    yield service_pb2.DownloadRequest(identity=identity, sha256=_DIGEST, first_byte=48)
    yield service_pb2.UploadStatusRequest(identity=identity, name=name)
    payload = encode({"parameters": ModelParameters(parameters={"bias": np.array([1.0, -1.0], "f4")})})
    header = service_pb2.UploadHeader(identity=identity, name=name, payload=payload.header(), samples=40)
    data = payload.source.read(0, payload.data_bytes)
    yield service_pb2.UploadRequest(header=header)
    chunk = knowledge_pb2.Chunk(data=data, crc32c=google_crc32c.value(data))
    yield service_pb2.UploadRequest(chunk=chunk)
    receipt = service_pb2.Receipt(id="ab12", name=name, sha256=payload.sha256, data_bytes=8, received_at_ms=1)
    yield service_pb2.UploadResponse(receipt=receipt)
    yield service_pb2.DeclineRequest(identity=identity, round=3, step_number=1, reason="step 'x' is unknown")


def _message(message: Message) -> dict[str, str]:
    return {
        "type": message.DESCRIPTOR.full_name,
        "text": text_format.MessageToString(message),
        "bytes": message.SerializeToString(deterministic=True).hex(),
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(vectors(), indent=1) + "\n", encoding="utf-8")
