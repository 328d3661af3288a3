"""What a device checks of a server's words before it acts on them: a server may be broken, newer, or hostile.

Figures that cannot be meant raise an error with a sentence; what would be too much of a good thing is bounded here.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable

from fleetdistill.errors import ConfigurationError, LinkError, WireError
from fleetdistill.names import NAME_RULE, is_name
from fleetdistill.printable import printable
from fleetdistill.wire.codec import KNOWLEDGE_TYPES
from fleetdistill.wire.codes import LONGEST_AFTER_SECONDS
from fleetdistill.wire.compression import RAW
from fleetdistill.wire.payload import MAX_AXES, MAX_NAME
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2, service_pb2

MAX_CLASSES = 10_000
"""Most classes of a run: a device keeps its scores as a table of classes by classes."""
MAX_ATTEMPTS = 1 << 31
"""Highest attempt that a device answers with, so that there is always a next one."""
MAX_TEXT = 1000
"""Most characters of a server's text that go into an event, an error or a file."""
SHORTEST_BEAT_SECONDS = 0.2
SHORTEST_PAUSE_SECONDS = 0.1
_DIGEST_BYTES = 32
_BLAME = "the server is broken, or of another version than this SDK; its operator has to mend it"


def plain(text: str, most: int = MAX_TEXT) -> str:
    """A server's text as one printable line of its first `most` characters."""
    return printable(text if len(text) <= most else f"{text[: most - 3]}...")


def check_terms(terms: service_pb2.CheckInResponse, run: str, max_threads: int) -> None:
    """Checks a server's answer to a check-in.

    Args:
        terms: The answer.
        run: Name of the run that the device takes part in; empty for the server's only one.
        max_threads: Most threads that the app lets a run compute with.

    Raises:
        WireError: A value cannot be meant.
        ConfigurationError: The run wants more threads than the app allows.
    """
    _check_contract(terms.contract, run)
    _check_threads(terms.contract, max_threads)
    seconds = terms.heartbeat_seconds
    if not (math.isfinite(seconds) and seconds > 0):
        raise _nonsense(terms.contract, f"heartbeat_seconds {seconds:g}", "a finite number above 0")


def known_compression(
    wanted: knowledge_pb2.Compression.ValueType, offered: Collection[knowledge_pb2.Compression.ValueType]
) -> knowledge_pb2.Compression.ValueType:
    """How to pack uploads: as the server wants it where the device has offered that, else not at all."""
    return wanted if wanted in offered else RAW


def _check_contract(contract: contract_pb2.Contract, run: str) -> None:
    if not is_name(contract.run):
        raise _nonsense(contract, "its name", NAME_RULE)
    if run and contract.run != run:
        raise _nonsense(contract, "its name", f"{run!r}, the run that the device takes part in")
    if not 2 <= len(contract.classes) <= MAX_CLASSES:
        raise _nonsense(contract, f"{len(contract.classes)} classes", f"2 to {MAX_CLASSES}")
    if any(len(name) > MAX_NAME for name in (contract.method, *contract.classes)):
        raise _nonsense(contract, "the name of its method or of a class", f"at most {MAX_NAME} characters")
    if contract.knowledge_type not in KNOWLEDGE_TYPES:
        raise _nonsense(contract, f"knowledge type {contract.knowledge_type}", "float32, float16 or uint8")
    _check_shape(contract, "inputs", contract.input_shape)
    for column in contract.features:
        _check_shape(contract, plain(column.name, 40), column.shape)
    for name in ("initial_weights", "proxy_digest", "extractor_file"):
        if len(getattr(contract, name)) not in (0, _DIGEST_BYTES):
            raise _nonsense(contract, f"{name} of {len(getattr(contract, name))} bytes", f"{_DIGEST_BYTES}, or none")


def _check_shape(contract: contract_pb2.Contract, name: str, shape: Iterable[int]) -> None:
    sizes = list(shape)
    if len(sizes) > MAX_AXES or any(size < 1 for size in sizes):
        raise _nonsense(
            contract, f"{name} of shape {sizes[: MAX_AXES + 1]}", f"sizes of at least 1, at most {MAX_AXES}"
        )


def _check_threads(contract: contract_pb2.Contract, most: int) -> None:
    if not contract.threads:
        raise _nonsense(contract, "threads 0", "at least 1")
    if contract.threads > most:
        raise ConfigurationError(
            f"run {contract.run!r} computes with {contract.threads} threads, this device allows {most}: results are "
            "equal at equal counts only. Allow more with Device(max_threads=...), or lower [run] threads on the server"
        )


def check_ask(ask: service_pb2.Ask) -> None:
    """Raises WireError for an ask that cannot be meant."""
    if not 1 <= len(ask.step) <= MAX_NAME:
        raise WireError(f"an ask's step has {len(ask.step)} characters, expected 1 to {MAX_NAME}; {_BLAME}")
    if len(ask.payload) not in (0, _DIGEST_BYTES):
        raise WireError(
            f"an ask's payload has a digest of {len(ask.payload)} bytes, expected {_DIGEST_BYTES}; {_BLAME}"
        )
    if ask.first_attempt > MAX_ATTEMPTS:
        raise WireError(f"an ask wants attempt {ask.first_attempt}, expected at most {MAX_ATTEMPTS}; {_BLAME}")


def pause_of(come_back: service_pb2.ComeBack, remote: bool) -> float:
    """Seconds to stay away: a moment in the server's range, at most an hour; over a network never none at all.

    Raises:
        LinkError: The range is none.
    """
    first, last = come_back.after_seconds, come_back.before_seconds
    if not (math.isfinite(first) and math.isfinite(last) and 0 <= first <= last):
        raise LinkError(
            f"the server says to come back in {first:g} to {last:g} seconds, expected finite numbers in order; {_BLAME}"
        )
    drawn = random.uniform(min(first, LONGEST_AFTER_SECONDS), min(last, LONGEST_AFTER_SECONDS))
    return max(drawn, SHORTEST_PAUSE_SECONDS) if remote else drawn


def beat_seconds(wanted: float) -> float:
    """Seconds from one heartbeat to the next: what the server wants, within bounds."""
    return min(max(wanted, SHORTEST_BEAT_SECONDS), LONGEST_AFTER_SECONDS)


def _nonsense(contract: contract_pb2.Contract, found: str, expected: str) -> WireError:
    return WireError(f"run {plain(contract.run, 64)!r} has {found}, expected {expected}; {_BLAME}")
