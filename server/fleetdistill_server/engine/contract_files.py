"""Checks the files that a run's contract refers to when its engine starts, and restores damaged ones."""

from __future__ import annotations

from collections.abc import Callable

from fleetdistill.errors import DamagedError, RunError
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.engine.contract import extractor_payload, initial_payload
from fleetdistill_server.methods.base import ServerMethod
from fleetdistill_server.store.store import Store


def check_proxy(run: str, contract: contract_pb2.Contract, method: ServerMethod) -> None:
    """Raises RunError if the proxy set has changed since the run's start; all knowledge refers to its rows."""
    began, now = contract.proxy_digest, method.context.proxy_digest
    if began != now:
        raise RunError(
            f"[proxy] data: run {run!r} began with a proxy set with digest "
            f"{began.hex()[:12] or 'none'}, but the current file has digest {now.hex()[:12] or 'none'}; "
            "restore the original file, or choose another run name"
        )


def check_readable(store: Store, contract: contract_pb2.Contract, method: ServerMethod) -> None:
    """Verifies the payloads that every new device downloads, and restores damaged ones."""
    if method.context.proxy_payload is not None:
        store.blobs.put(method.context.proxy_payload)  # replaces a damaged file
    if contract.initial_weights:
        _ensure_readable(store, contract.initial_weights, lambda: initial_payload(method))
    if contract.extractor_file:
        _ensure_readable(store, contract.extractor_file, lambda: extractor_payload(method))


def _ensure_readable(store: Store, sha256: bytes, make: Callable[[], Payload | None]) -> None:
    """Recreates and stores a payload if the stored file is damaged; this can take seconds."""
    try:
        store.blobs.open(sha256, verify=True)
    except DamagedError:
        made = make()
        if made is None or made.sha256 != sha256:
            raise
        store.blobs.forget_verified()
        store.blobs.put(made)
