"""What a device can do, from which the server chooses its run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleetdistill.errors import ConfigurationError
from fleetdistill.link.terms import MAX_CLASSES
from fleetdistill.wire.payload import MAX_AXES
from fleetdistill.wire.v1 import contract_pb2, service_pb2

_MAX_CHARACTERS = 128


@dataclass(frozen=True)
class Abilities:
    """What a device can do, instead of the name of a run: the server names the one open run that it fits.

    Args:
        classes: Number of classes C, 1 to 10,000, or the names of the classes in the order of the labels, which must
            equal the run's.
        input_shape: Shape of one input, without the batch: sizes of at least 1.
        model: Name of the device's model or of its extractor, as `[model] device` or `extractor` of the run.toml. A
            run that accepts any model fits every name. Default: every run fits.

    Raises:
        ConfigurationError: A value is invalid.
    """

    classes: int | Sequence[str]
    input_shape: Sequence[int]
    model: str = ""

    def __post_init__(self) -> None:
        self._check_classes()
        sizes = self.input_shape
        valid = isinstance(sizes, Sequence) and not isinstance(sizes, str) and 1 <= len(sizes) <= MAX_AXES
        if not valid or not all(_is_count(size) for size in sizes):
            text = f"1 to {MAX_AXES} whole numbers of at least 1, such as (1, 28, 28)"
            raise ConfigurationError(f"Abilities(input_shape=...) is {sizes!r}, must be {text}")
        if not isinstance(self.model, str) or len(self.model) > _MAX_CHARACTERS:
            raise ConfigurationError(
                f"Abilities(model=...) is {self.model!r:.200}, must be text of at most {_MAX_CHARACTERS} characters"
            )

    def _check_classes(self) -> None:
        result = self.classes
        count = len(self.names) or self.classes
        named = isinstance(result, Sequence) and not isinstance(result, str)
        valid = all(isinstance(name, str) and 1 <= len(name) <= _MAX_CHARACTERS for name in self.names)
        if not (named or _is_count(result)) or not valid or not _is_count(count) or int(str(count)) > MAX_CLASSES:
            text = f"a number of classes from 1 to {MAX_CLASSES:,}, or their names"
            raise ConfigurationError(f"Abilities(classes=...) is {result!r:.200}, must be {text}")

    @property
    def names(self) -> Sequence[str]:
        """Names of the classes; empty if only their number is given."""
        return () if isinstance(self.classes, (int, str)) or not isinstance(self.classes, Sequence) else self.classes

    def message(self) -> service_pb2.Abilities:
        """Returns the abilities as a message."""
        result = service_pb2.Abilities(input_shape=list(self.input_shape), model=self.model)
        result.classes = len(self.names) if self.names else int(str(self.classes))
        result.class_names.extend(self.names)
        return result


def check_fits(contract: contract_pb2.Contract, abilities: service_pb2.Abilities) -> None:
    """Raises ConfigurationError if the run that the server named does not fit."""
    wrong = differences(contract, abilities)
    if wrong:
        raise ConfigurationError(
            f"the server offers run {contract.run!r}, which does not fit Abilities(...): {'; '.join(wrong)}; "
            "correct them, or set Server(run=...) to the name of a run"
        )


def differences(contract: contract_pb2.Contract, abilities: service_pb2.Abilities) -> list[str]:
    """Returns how a run's classes and input shape differ from a device's, one sentence each."""
    result = []
    if abilities.classes != len(contract.classes):
        result.append(f"the device has {abilities.classes} classes, the run {len(contract.classes)}")
    elif abilities.class_names and list(abilities.class_names) != list(contract.classes):
        pairs = zip(abilities.class_names, contract.classes, strict=True)
        at, (device, run) = next((at, pair) for at, pair in enumerate(pairs) if pair[0] != pair[1])
        result.append(f"class {at} is {device[:64]!r} on the device, {run[:64]!r} in the run")
    if list(abilities.input_shape) != list(contract.input_shape):
        has, wants = list(abilities.input_shape), list(contract.input_shape)
        result.append(f"the device has input shape {has}, the run {wants}")
    return result


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
