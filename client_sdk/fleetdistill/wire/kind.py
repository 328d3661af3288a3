"""The base of all kinds of parts: what a kind says of itself, so that nothing else knows it by name."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar, Protocol, Self

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from fleetdistill.errors import WireError
from fleetdistill.wire.schema import Shapes, Tensors
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2

Array = NDArray[Any]

KINDS: dict[str, type[Kind]] = {}
"""Every kind by its name; a class enters itself. `fleetdistill.knowledge` has those of this package."""


class Kind:
    """A kind of part: a frozen dataclass whose fields are those of its message in `knowledge.proto`.

    Attributes:
        wire_name: Field of the message `Part` that holds it.
        possible_columns: Columns that a part can contain, which the app must allow; None if it never leaves a device.
        wire_type: Number type of its floats on the wire; None for the run's knowledge type.
        exact: Names of fields whose floats travel in float64.
        quantized_features: Whether its named tensors are feature columns, which a run of uint8 sends in channel steps.
        rows_are_samples: Whether each of its rows is about one of the device's own samples.
        description: What it says about a device, for tables; `{columns}` stands for the columns about samples.
    """

    wire_name: ClassVar[str]
    possible_columns: ClassVar[tuple[str, ...] | None] = None
    wire_type: ClassVar[np.dtype[Any] | None] = np.dtype(np.float32)
    exact: ClassVar[frozenset[str]] = frozenset()
    quantized_features: ClassVar[bool] = False
    rows_are_samples: ClassVar[bool] = False
    description: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        if "wire_name" in cls.__dict__:
            KINDS[cls.wire_name] = cls

    def columns(self) -> tuple[str, ...]:
        """Returns the columns that this part contains, a subset of `possible_columns`."""
        return self.possible_columns or ()

    @classmethod
    def expected(cls, part: knowledge_pb2.Part, contract: contract_pb2.Contract, wanted: Collection[str]) -> Tensors:
        """What the tensors of a sent part must be, by path within the part; any other one is refused.

        Args:
            part: What was sent.
            contract: What it must fit.
            wanted: Paths of the feature columns that the ask wants; empty for all of the contract's.

        Raises:
            RefusedError: A tensor is missing, or a field that is no tensor does not fit.
        """
        return {}

    @classmethod
    def check_data(
        cls, part: knowledge_pb2.Part, contract: contract_pb2.Contract, data: PartData, samples: int | None
    ) -> None:
        """Checks what takes several tensors to see, once all data of the part are there.

        Args:
            part: What was sent; its tensors are as `expected` wants them.
            contract: What it must fit.
            data: The arrays.
            samples: How many the device has declared; None where it has declared nothing.

        Raises:
            RefusedError: The tensors do not fit each other or the contract.
        """


class OwnForm(Kind):
    """A kind whose message the mapping by field names does not serve."""

    def fill(self, message: Message, path: str) -> None:
        """Writes it into an empty message. Raises WireError for a value that fits no field."""
        raise NotImplementedError

    @classmethod
    def read(cls, message: Message) -> Self:
        """Reads it from a message. Raises WireError for one that is none."""
        raise NotImplementedError


Parts = Mapping[str, Kind]
"""Part name to part."""


class PartData(Protocol):
    """The arrays of a part, by path within it."""

    def __contains__(self, name: str) -> bool:
        """Whether there is such a tensor."""

    def array(self, name: str, row: int | None = None) -> Array:
        """A tensor, or one row of it; read only then."""


def kind_of(part: knowledge_pb2.Part) -> type[Kind]:
    """The kind of a part. Raises WireError if it has none that is known."""
    name = part.WhichOneof("kind")
    if name not in KINDS:
        raise WireError(f"part {part.name!r} is of no known kind")
    return KINDS[name]


def declared_of(part: knowledge_pb2.Part, contract: contract_pb2.Contract) -> contract_pb2.PartShapes:
    """What the contract declares for a part; an empty message where it declares nothing."""
    return next((one for one in contract.uploads if one.part == part.name), contract_pb2.PartShapes())


def declared_shapes(part: knowledge_pb2.Part, contract: contract_pb2.Contract) -> Shapes:
    """Shapes that the contract declares for the tensors of a part."""
    return {one.name: tuple(one.shape) for one in declared_of(part, contract).tensors}


@contextlib.contextmanager
def field_errors(path: str, value: object) -> Iterator[None]:
    """Protobuf's refusals of a value, in our words."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise WireError(f"{path}: {value!r} does not fit its field: {error}") from error
