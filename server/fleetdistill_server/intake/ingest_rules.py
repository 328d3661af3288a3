"""Derives the rules for an upload's tensors from the schemas of its parts' kinds and the contract."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fleetdistill import knowledge  # registers the kinds  # noqa: F401
from fleetdistill.wire import payload as wire
from fleetdistill.wire.kind import Array, kind_of, on_the_wire
from fleetdistill.wire.payload import DTYPES, DataSource, Slot
from fleetdistill.wire.schema import TensorSchema
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2


def rules_of(
    part: knowledge_pb2.Part, contract: contract_pb2.Contract, wanted: Collection[str] = ()
) -> dict[str, TensorSchema]:
    """Returns the schema of each tensor of a part by path.

    Args:
        part: The uploaded part.
        contract: The run's contract.
        wanted: Paths of the feature columns that the ask expects; empty for all columns of the contract.

    Raises:
        RefusedError: A tensor that the contract requires is missing, or another field does not fit.
    """
    kind = kind_of(part)
    tensors = on_the_wire(kind, kind.expected(part, contract, wanted), DTYPES[contract.knowledge_type])
    return {f"{part.name}/{path}": rule for path, rule in tensors.items()}


def check_data(
    part: knowledge_pb2.Part,
    contract: contract_pb2.Contract,
    slots: Mapping[str, Slot],
    source: DataSource,
    samples: int | None,
) -> None:
    """Runs the checks of a part that involve several tensors.

    Args:
        part: The uploaded part.
        contract: The run's contract.
        slots: The payload's tensors by path.
        source: The tensors' data.
        samples: Number of samples that the device declared; None if it declared none.

    Raises:
        RefusedError: The tensors do not fit each other or the contract.
    """
    kind_of(part).check_data(part, contract, _StagedData(part.name, slots, source), samples)


class _StagedData:
    """Implements `fleetdistill.wire.kind.PartData` on top of staged data."""

    def __init__(self, part: str, slots: Mapping[str, Slot], source: DataSource) -> None:
        self._part = part
        self._slots = slots
        self._source = source

    def __contains__(self, name: str) -> bool:
        return f"{self._part}/{name}" in self._slots

    def array(self, name: str) -> Array:
        return wire.array_of(self._slots[f"{self._part}/{name}"], self._source)
