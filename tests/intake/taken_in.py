"""Sends payloads through the checks of uploads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from support.wire_samples import (
    EXPECTS,
    in_pieces,
    make_contract,
)

from fleetdistill.errors import RefusedError
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.payload import CHUNK_BYTES, ELEMENT_TYPES, slots
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2
from fleetdistill_server.intake.ingest import Ingest
from fleetdistill_server.store.memory_blobs import MemoryBlobs

FLOAT32 = np.float32


def take_in(
    payload: Payload,
    *,
    contract: contract_pb2.Contract | None = None,
    expects: dict[str, str] | None = None,
    header: knowledge_pb2.PayloadHeader | None = None,
    chunks: Iterable[knowledge_pb2.Chunk] | None = None,
    samples: int | None = None,
) -> Ingest:
    """Sends a payload of device d1 through the checks, whole."""
    header = header or payload.header()
    ingest = Ingest("d1", header, declaring(contract or make_contract(), header), expects or EXPECTS, samples)
    ingest.start(MemoryBlobs().stage("key", header.parts))
    for chunk in in_pieces(payload, CHUNK_BYTES) if chunks is None else chunks:
        ingest.feed(chunk)
    ingest.finish()
    return ingest


def declaring(contract: contract_pb2.Contract, header: knowledge_pb2.PayloadHeader) -> contract_pb2.Contract:
    """The contract, with every tensor of the header's parameter-like parts declared as it is."""
    declared = contract_pb2.Contract.FromString(contract.SerializeToString())
    for part in header.parts.parts:
        if part.WhichOneof("kind") in ("model_parameters", "distillation_gradient", "generator", "discriminator"):
            shapes = declared.uploads.add(part=part.name)
            for slot in slots(knowledge_pb2.Parts(parts=[part])):
                name, element_type = slot.path.removeprefix(f"{part.name}/"), ELEMENT_TYPES[slot.dtype]
                shapes.tensors.add(name=name, shape=slot.shape, element_type=element_type)
    return declared


def refusal(payload: Payload, **how: Any) -> RefusedError:
    """The refusal that a payload gets."""
    with pytest.raises(RefusedError) as error:
        take_in(payload, **how)
    assert error.value.details["device"] == "d1"
    return error.value


def said(error: RefusedError) -> tuple[str, str]:
    """Code and sentence."""
    return error.code, str(error)
