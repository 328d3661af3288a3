"""Base class of all kinds of parts; each kind declares its conditions and wire form."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, Self

import numpy as np
from google.protobuf.message import Message

from fleetdistill.errors import WireError
from fleetdistill.wire.schema import Shapes, Tensors, TensorSchema
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2

Array = np.ndarray[Any, np.dtype[Any]]

COLUMNS = ("class_statistics", "counts", "metrics", "features", "logits", "labels", "parameters", "gradients")
"""All columns that an app can allow to leave the device."""
DEFAULT_COLUMNS = ("class_statistics", "counts", "metrics")
"""Columns allowed by default: those of class statistics, the recommended method."""

KINDS: dict[str, type[Kind]] = {}
"""All kinds by name. Subclasses register themselves; `fleetdistill.knowledge` defines those of this package."""


def allow_line(columns: Collection[str]) -> str:
    """Returns the remedy in errors: the argument of `Device` that allows these columns, without unknown names."""
    names = ", ".join(f'"{item}"' for item in COLUMNS if item in columns)
    return f"to allow it, set Device(allow=[{names}])"


class Kind:
    """A kind of part: a frozen dataclass whose fields are those of its message in `knowledge.proto`.

    Attributes:
        wire_name: Name of its field in the message `Part`.
        possible_columns: Columns that a part can contain, which the app must allow; None if it never leaves a device.
        wire_type: Element type of its floats on the wire; None for the run's knowledge type.
        exact: Names of fields whose floats are sent as float64.
        quantized_features: Whether its named tensors are feature columns, which a run of uint8 quantizes by channel.
        rows_are_samples: Whether each row belongs to one of the device's samples.
        description: What a part reveals about a device, for tables; `{columns}` is replaced by its sample columns.
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
        """Returns the expected tensors of a part by path within it; other tensors are rejected.

        Args:
            part: The part that was sent.
            contract: The run's contract.
            wanted: Paths of the feature columns, or of a model's tensors, that the ask requires; empty for all of the
                contract's.

        Raises:
            RefusedError: A tensor is missing, or a field that is not a tensor is invalid.
        """
        return {}

    @classmethod
    def check_data(
        cls, part: knowledge_pb2.Part, contract: contract_pb2.Contract, data: PartData, samples: int | None
    ) -> None:
        """Checks conditions between several tensors, after all data of the part has been received.

        Args:
            part: The part that was sent; its tensors have passed the checks of `expected`.
            contract: The run's contract.
            data: The part's arrays.
            samples: Number of samples that the device declared; None if it declared none.

        Raises:
            RefusedError: The tensors are inconsistent with each other or with the contract.
        """


class OwnForm(Kind):
    """A kind with its own conversion to and from its message, instead of the mapping by field names."""

    def fill(self, message: Message, path: str) -> None:
        """Writes the part to an empty message. Raises WireError for a value that does not fit its field."""
        raise NotImplementedError

    @classmethod
    def read(cls, message: Message) -> Self:
        """Reads the part from a message. Raises WireError for an invalid message."""
        raise NotImplementedError


Parts = Mapping[str, Kind]
"""Parts by name."""


class PartData(Protocol):
    """The arrays of a part, by path within the part."""

    def __contains__(self, name: str) -> bool:
        """Returns whether the part has a tensor at this path."""

    def array(self, name: str) -> Array:
        """Reads a tensor."""


def kind_of(part: knowledge_pb2.Part) -> type[Kind]:
    """Returns the kind of a part. Raises WireError for a missing or unknown kind."""
    name = part.WhichOneof("kind")
    if name not in KINDS:
        raise WireError(f"part {part.name!r} has an unknown kind")
    return KINDS[name]


def declared_of(part: knowledge_pb2.Part, contract: contract_pb2.Contract) -> contract_pb2.PartShapes:
    """Returns the contract's declaration for a part; an empty message if there is none."""
    return next((upload for upload in contract.uploads if upload.part == part.name), contract_pb2.PartShapes())


def declared_shapes(part: knowledge_pb2.Part, contract: contract_pb2.Contract) -> Shapes:
    """Returns the shapes that the contract declares for a part's tensors, by name."""
    return {tensor.name: tuple(tensor.shape) for tensor in declared_of(part, contract).tensors}


@contextlib.contextmanager
def field_errors(path: str, value: object) -> Iterator[None]:
    """Converts protobuf's exceptions for a value to WireError."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise field_error(path, value, error) from error


def field_error(path: str, value: object, error: Exception) -> WireError:
    """Returns the error for a value that protobuf has rejected with `error`."""
    return WireError(f"{path}: {value!r} does not fit its field: {error}")


@dataclass(frozen=True, kw_only=True)
class PartSchema:
    """Schema of a part of a message: its tensors with their sizes, and the contract's conditions.

    Attributes:
        kind: Kind of the part.
        tensors: Schemas of its tensors, by path.
        columns: Columns of the device that the part contains, as names of `fleetdistill.COLUMNS`.
        features: Feature columns that the part contains or is computed from: shape of one sample by cut.
        declared: Shapes that the contract declares for the part's tensors.
        min_samples: Smallest number of samples of a class in the part.
        max_rows: Largest number of directions.
        rows_per_direction: Smallest number of samples, or degrees of freedom, per direction.
        sent: Whether the settings send the part. Contracts also declare parts that only other settings send.
    """

    kind: type[Kind]
    tensors: Tensors = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    features: Shapes = field(default_factory=dict)
    declared: Shapes = field(default_factory=dict)
    min_samples: int = 0
    max_rows: int = 0
    rows_per_direction: int = 0
    sent: bool = True

    def when(self, sent: bool) -> PartSchema:
        """Returns the schema with another value of `sent`."""
        return replace(self, sent=sent)

    def on_the_wire(self, knowledge_type: np.dtype | type | str) -> dict[str, TensorSchema]:
        """Returns the tensors that encode the part in a run with the given knowledge type, by path."""
        return on_the_wire(self.kind, self.tensors, knowledge_type)

    def nbytes(self, knowledge_type: np.dtype | type | str) -> int:
        """Returns the part's tensor bytes in a run of a knowledge type."""
        return sum(item.nbytes for item in self.on_the_wire(knowledge_type).values())


def on_the_wire(kind: type[Kind], tensors: Tensors, knowledge_type: np.dtype | type | str) -> dict[str, TensorSchema]:
    """Returns the tensors that encode a part in a run with the given knowledge type, by path."""
    floats = np.dtype(knowledge_type) if kind.wire_type is None else kind.wire_type
    return {f"{path}{end}": one for path, schema in tensors.items() for end, one in schema.on_the_wire(floats).items()}
