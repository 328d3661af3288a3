"""A device's checks of messages from the server, which may be faulty, newer than the SDK, or hostile.

Invalid values raise an error; excessive waits and intervals are clamped.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable

from fleetdistill.errors import ConfigurationError, LinkError, WireError
from fleetdistill.names import NAME_RULE, is_name
from fleetdistill.printable import printable
from fleetdistill.wire.codec import KNOWLEDGE_TYPES
from fleetdistill.wire.codes import MAX_AFTER_SECONDS
from fleetdistill.wire.compression import RAW
from fleetdistill.wire.digests import Algorithm, has_blake3
from fleetdistill.wire.payload import MAX_AXES, MAX_NAME
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2, service_pb2

__all__ = ["pause_seconds"]

MAX_CLASSES = 10_000
"""Maximum number of classes of a run: a device stores its scores as a matrix `[classes, classes]`."""
MAX_ATTEMPTS = 1 << 31
"""Maximum attempt number of an ask, so that the device can always increment it."""
MAX_TEXT = 1000
"""Maximum length of a server's text in an event, an error or a file, in characters."""
SHORTEST_BEAT_SECONDS = 0.2
SHORTEST_PAUSE_SECONDS = 0.1
_DIGEST_BYTES = 32
_ADVICE = "the server is faulty or has another version than this SDK; contact its operator"


def plain(text: str, most: int = MAX_TEXT) -> str:
    """Returns a server's text as one printable line, truncated to `most` characters before escaping."""
    return printable(text if len(text) <= most else f"{text[: most - 3]}...")


def check_terms(terms: service_pb2.CheckInResponse, run: str, max_threads: int) -> None:
    """Checks a server's reply to a check-in.

    Args:
        terms: Reply of the server.
        run: Name of the run that the device takes part in; empty for the server's only run.
        max_threads: Maximum number of threads that the app allows a run to use.

    Raises:
        WireError: A value is invalid.
        ConfigurationError: The run requires more threads than the app allows.
    """
    _check_contract(terms.contract, run)
    _check_threads(terms.contract, max_threads)
    seconds = terms.heartbeat_seconds
    if not (math.isfinite(seconds) and seconds > 0):
        raise _invalid(terms.contract, f"heartbeat_seconds {seconds:g}", "a finite number above 0")


def known_compression(
    wanted: knowledge_pb2.Compression.ValueType, offered: Collection[knowledge_pb2.Compression.ValueType]
) -> knowledge_pb2.Compression.ValueType:
    """Returns the compression for uploads: the server's choice if the device offers it, else none."""
    return wanted if wanted in offered else RAW


def upload_digest(terms: service_pb2.CheckInResponse | None) -> Algorithm:
    """Returns the algorithm of an answer's digest: BLAKE3 if the server accepts it and this process can compute it."""
    return Algorithm.BLAKE3 if terms is not None and terms.blake3 and has_blake3() else Algorithm.SHA256


def _check_contract(contract: contract_pb2.Contract, run: str) -> None:
    if not is_name(contract.run):
        raise _invalid(contract, "an invalid name", NAME_RULE)
    if run and contract.run != run:
        raise _invalid(contract, "another name", f"{run!r}, the run that the device takes part in")
    if not 2 <= len(contract.classes) <= MAX_CLASSES:
        raise _invalid(contract, f"{len(contract.classes)} classes", f"2 to {MAX_CLASSES}")
    if any(len(name) > MAX_NAME for name in (contract.method, *contract.classes)):
        raise _invalid(contract, "a method or class with a long name", f"at most {MAX_NAME} characters")
    if not all(name.isprintable() for name in contract.classes):
        raise _invalid(contract, "a class with control characters in its name", "printable names")
    if contract.knowledge_type not in KNOWLEDGE_TYPES:
        raise _invalid(contract, f"unknown knowledge type {contract.knowledge_type}", "float32, float16 or uint8")
    _check_shape(contract, "inputs", contract.input_shape)
    for column in contract.features:
        _check_shape(contract, plain(column.name, 40), column.shape)
    for name in ("initial_weights", "proxy_digest", "extractor_file"):
        if len(getattr(contract, name)) not in (0, _DIGEST_BYTES):
            raise _invalid(contract, f"{name} of {len(getattr(contract, name))} bytes", f"{_DIGEST_BYTES} or 0")


def _check_shape(contract: contract_pb2.Contract, name: str, shape: Iterable[int]) -> None:
    sizes = list(shape)
    if len(sizes) > MAX_AXES or any(size < 1 for size in sizes):
        raise _invalid(
            contract, f"{name} of shape {sizes[: MAX_AXES + 1]}", f"at most {MAX_AXES} axes, each of at least 1"
        )


def _check_threads(contract: contract_pb2.Contract, most: int) -> None:
    if not contract.threads:
        raise _invalid(contract, "threads 0", "at least 1")
    if contract.threads > most:
        raise ConfigurationError(
            f"run {contract.run!r} requires {contract.threads} threads, but this device allows {most}; all devices "
            "must use the same number for reproducible results. Raise Budgets(threads=...), "
            "or lower [run] threads on the server"
        )


def check_ask(ask: service_pb2.Ask) -> None:
    """Raises WireError for an invalid ask."""
    if not 1 <= len(ask.step) <= MAX_NAME:
        raise WireError(f"an ask's step has {len(ask.step)} characters, expected 1 to {MAX_NAME}; {_ADVICE}")
    if len(ask.payload) not in (0, _DIGEST_BYTES):
        raise WireError(
            f"an ask's payload has a digest of {len(ask.payload)} bytes, expected {_DIGEST_BYTES}; {_ADVICE}"
        )
    if ask.first_attempt > MAX_ATTEMPTS:
        raise WireError(f"an ask has first_attempt {ask.first_attempt}, expected at most {MAX_ATTEMPTS}; {_ADVICE}")


def pause_seconds(come_back: service_pb2.ComeBack, remote: bool) -> float:
    """Returns how many seconds to wait before the next call.

    Random within the server's range, at most 3,600, and at least 0.1 on network links.

    Raises:
        LinkError: The server's range is invalid.
    """
    first, last = come_back.after_seconds, come_back.before_seconds
    if not (math.isfinite(first) and math.isfinite(last) and 0 <= first <= last):
        raise LinkError(
            f"the server requested a wait of {first:g} to {last:g} seconds, expected finite numbers in ascending order "
            f"from 0; {_ADVICE}"
        )
    drawn = random.uniform(min(first, MAX_AFTER_SECONDS), min(last, MAX_AFTER_SECONDS))
    return max(drawn, SHORTEST_PAUSE_SECONDS) if remote else drawn


def heartbeat_interval(wanted: float) -> float:
    """Returns the heartbeat interval in seconds: the server's value, clamped to 0.2 to 3,600."""
    return min(max(wanted, SHORTEST_BEAT_SECONDS), MAX_AFTER_SECONDS)


def _invalid(contract: contract_pb2.Contract, found: str, expected: str) -> WireError:
    return WireError(f"run {plain(contract.run, 64)!r} has {found}, expected {expected}; {_ADVICE}")
