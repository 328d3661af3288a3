"""What the tensors of an upload must be: the schema of each part's kind, with the numbers that the contract has."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import prod

from fleetdistill import knowledge  # which makes the kinds known  # noqa: F401
from fleetdistill.wire import payload as wire
from fleetdistill.wire.kind import Array, kind_of
from fleetdistill.wire.payload import DTYPES, Slot
from fleetdistill.wire.schema import TensorSchema, on_the_wire
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2
from fleetdistill_server.store.blobs import Staging


def rules_of(
    part: knowledge_pb2.Part, contract: contract_pb2.Contract, wanted: Collection[str] = ()
) -> dict[str, TensorSchema]:
    """What each tensor of a part must be, by path; a required tensor that is missing is refused here.

    Args:
        part: What was sent.
        contract: What it must fit.
        wanted: Paths of the feature columns that the ask wants; empty for all of the contract's.

    Raises:
        RefusedError: A tensor that the contract requires is missing, or a field that is no tensor does not fit.
    """
    kind = kind_of(part)
    tensors = on_the_wire(kind, kind.expected(part, contract, wanted), DTYPES[contract.knowledge_type])
    return {f"{part.name}/{path}": rule for path, rule in tensors.items()}


def check_data(
    part: knowledge_pb2.Part,
    contract: contract_pb2.Contract,
    slots: Mapping[str, Slot],
    staging: Staging,
    samples: int | None,
) -> None:
    """Checks of a whole part what takes several tensors to see.

    Args:
        part: What was sent.
        contract: What it must fit.
        slots: The tensors of the payload by path.
        staging: Their data.
        samples: How many the device has declared; None where it has declared nothing.

    Raises:
        RefusedError: The tensors do not fit each other or the contract.
    """
    kind_of(part).check_data(part, contract, _StagedData(part.name, slots, staging), samples)


class _StagedData:
    """The arrays of one part, as `fleetdistill.wire.kind.PartData`."""

    def __init__(self, part: str, slots: Mapping[str, Slot], staging: Staging) -> None:
        self._part, self._slots, self._staging = part, slots, staging

    def __contains__(self, name: str) -> bool:
        return f"{self._part}/{name}" in self._slots

    def array(self, name: str, row: int | None = None) -> Array:
        slot = self._slots[f"{self._part}/{name}"]
        return wire.array_of(slot if row is None else _row_of(slot, row), self._staging)


def _row_of(slot: Slot, row: int) -> Slot:
    """One row of a tensor, as a tensor of its own."""
    size = prod(slot.shape[1:]) * slot.dtype.itemsize
    return replace(slot, shape=slot.shape[1:], start=slot.start + row * size)
