"""Blob storage in an S3-compatible object store, for several fronts and an engine on other hosts.

An object has the content and the name of the file that `file_blobs.py` would store. A payload is received into a
staging file of this machine; its upload to the object store takes the place of the durable rename. A payload that is
read is first downloaded into the store's directory.

    PREFIX/ab/ab....safetensors    a payload or checkpoint, by its digest
    PREFIX/quarantine/             objects that do not match their digest

Keys and the address of the object store come from the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
AWS_ENDPOINT_URL and the other variables of the AWS tools.

Only `store.py` imports this module, and only for a store with `[server] blobs`, because it needs the extra `s3`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import s3fs
from botocore.exceptions import BotoCoreError

from fleetdistill.errors import ConfigurationError, StoreError, StoreUnavailableError
from fleetdistill.printable import printable
from fleetdistill.state.durable import rename_durably
from fleetdistill.wire.codec import Payload
from fleetdistill_server.store.blobs import StoredBlob, disk_errors
from fleetdistill_server.store.file_blobs import HELD_NAME, SUFFIX, FileBlobs

logging.getLogger("botocore").setLevel(logging.WARNING)  # at INFO it reports where each client found its keys
logging.getLogger("aiobotocore").setLevel(logging.WARNING)
_RENEW_SECONDS = 900.0
"""Age at which a payload that is stored again is uploaded again, so that sweeps keep it."""
_KEPT_SECONDS, _IN_USE_SECONDS = 3600.0, 60.0
"""Seconds for which an unused local copy is kept, and a copy of an object that was deleted."""
_Lock = Callable[[], "contextlib.AbstractContextManager[bool] | None"]


class ObjectBlobs(FileBlobs):
    """Payloads and checkpoints as objects, with local copies of those in use. Implements `Blobs`.

    Args:
        directory: Directory for staging files and copies; each host has its own.
        url: `s3://bucket/prefix`.
        lock: Returns the lock among all hosts for deleting payloads; None for a lock among this host's processes.
    """

    def __init__(self, directory: Path, url: str, lock: _Lock = lambda: None) -> None:
        super().__init__(directory)
        self._objects = _object_store(os.getpid(), os.environ.get("AWS_ENDPOINT_URL", ""))
        self._root = url.removeprefix("s3://")
        self._lock = lock

    def check(self) -> None:
        """See `Blobs.check`; an object store that is away is not an error, because calls are repeated later."""
        bucket = self._root.partition("/")[0]
        with contextlib.suppress(StoreError), object_errors("looking for the bucket"):
            try:
                self._objects.call_s3("head_bucket", Bucket=bucket)
            except FileNotFoundError:
                text = f"there is no bucket {bucket!r} in the object store; create it or correct the name"
                raise ConfigurationError(f"[server] blobs: {text}") from None

    def open(self, sha256: bytes, *, verify: bool = False) -> Payload:
        self._fetch(sha256)
        return super().open(sha256, verify=verify)

    def get_state(self, sha256: bytes) -> bytes:
        self._fetch(sha256)
        return super().get_state(sha256)

    def has(self, sha256: bytes) -> bool:
        return self.age_seconds(sha256) < math.inf

    def age_seconds(self, sha256: bytes) -> float:
        key = self._key_of(sha256)
        with object_errors(f"reading the age of {key}"), contextlib.suppress(FileNotFoundError):
            return _age(self._objects.info(key))
        return math.inf

    def held(self) -> list[StoredBlob]:
        return list(self._list_names().values())

    def drop(self, sha256: bytes) -> None:
        super().drop(sha256)
        self._delete(self._key_of(sha256))

    def quarantine(self, sha256: bytes) -> None:
        super().drop(sha256)
        source = self._key_of(sha256)
        with object_errors(f"quarantining {sha256.hex()}"), contextlib.suppress(FileNotFoundError):
            self._objects.copy(source, f"{self._root}/quarantine/{sha256.hex()}-{time.time_ns()}{SUFFIX}")
            self._objects.rm_file(source)

    def drop_quarantined(self, digests: Collection[bytes]) -> None:
        names = {sha256.hex() for sha256 in digests}
        with object_errors("listing the quarantine"):
            result = self._objects.find(f"{self._root}/quarantine")
        for key in result:
            if key.rpartition("/")[2].partition("-")[0] in names:
                self._delete(key)

    def trim(self) -> None:
        held = self._list_names()
        for path in self._directory.glob(f"??/*{SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):  # another process of this host trims too
                unused = time.time() - path.stat().st_mtime
                if unused > (_KEPT_SECONDS if path.stem in held else _IN_USE_SECONDS):
                    path.unlink()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[bool]:
        with self._lock() or super().exclusive() as free:
            yield free

    def _publish(self, complete: Path, sha256: bytes) -> None:
        with object_errors(f"uploading {sha256.hex()}"):
            self._objects.put_file(str(complete), self._key_of(sha256))
        complete.unlink(missing_ok=True)

    def _renewed(self, sha256: bytes) -> bool:
        return self.age_seconds(sha256) < _RENEW_SECONDS

    def _fetch(self, sha256: bytes) -> None:
        """Downloads a blob unless a copy is here; leaves a missing one to the reading that follows."""
        path = self.path_of(sha256)
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)  # keeps it in use
            return
        partial = self.staging_path(f"get-{sha256.hex()}-{os.getpid()}-{threading.get_ident()}")
        with object_errors(f"downloading {sha256.hex()}"), contextlib.suppress(FileNotFoundError):
            try:
                self._objects.get_file(self._key_of(sha256), str(partial))
                path.parent.mkdir(exist_ok=True)
                rename_durably(partial, path)
            finally:
                partial.unlink(missing_ok=True)

    def _key_of(self, sha256: bytes) -> str:
        name = sha256.hex()
        return f"{self._root}/{name[:2]}/{name}{SUFFIX}"

    def _delete(self, key: str) -> None:
        with object_errors(f"deleting {key}"), contextlib.suppress(FileNotFoundError):
            self._objects.rm_file(key)

    def _list_names(self) -> dict[str, StoredBlob]:
        """Returns the objects of payloads and checkpoints by their digests in hex."""
        held = {}
        with object_errors("listing the payloads"), contextlib.suppress(FileNotFoundError):
            for key, info in self._objects.find(self._root, detail=True).items():
                name = key.rpartition("/")[2]
                if HELD_NAME.fullmatch(name):
                    digest = name.removesuffix(SUFFIX)
                    held[digest] = StoredBlob(bytes.fromhex(digest), info["size"], _age(info))
        return held


@lru_cache(maxsize=1)
def _object_store(process: int, address: str) -> s3fs.S3FileSystem:
    """Returns a process's client for an address. Listings are not cached, because other hosts change them."""
    return s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)


def _age(info: dict[str, Any]) -> float:
    modified = info["LastModified"]
    if not isinstance(modified, datetime):
        raise ValueError("an object has no time of its last change")
    return time.time() - modified.timestamp()


@contextlib.contextmanager
def object_errors(doing: str) -> Iterator[None]:
    """Converts errors of the object store to StoreError. The message begins with `doing`.

    Raises:
        StoreUnavailableError: The object store cannot be reached.
        StoreError: It refused the call, or its reply is invalid or redirects without end.
    """
    try:
        with disk_errors(doing):
            yield
    except BotoCoreError as error:
        raise StoreUnavailableError(f"{doing}: {error}") from error
    except (ValueError, KeyError, RecursionError) as error:  # of botocore and s3fs for a reply that is none of S3
        text = "it redirects without end" if isinstance(error, RecursionError) else printable(str(error))[:300]
        raise StoreError(f"{doing}: the reply of the object store is invalid: {text}") from error
