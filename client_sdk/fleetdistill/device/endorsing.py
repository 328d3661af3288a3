"""Who vouches for the keys with which the devices of a secure sum sign: a roster's key, or the run's CA.

Both give an endorsement of a device's Ed25519 key, bytes that the other devices check.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fleetdistill.checked import check_type
from fleetdistill.errors import ConfigurationError, SumRefusedError, WireError
from fleetdistill.link.credentials import AUTHORITIES, DEVICE_FOLDER, IDENTITY, split
from fleetdistill.state.files import Files

if TYPE_CHECKING:
    from fleetdistill.state.secure_sessions import SecureSession

__all__ = ["Signer"]

_KEY_BYTES, _SIGNATURE_BYTES = 32, 64


@dataclass(frozen=True, kw_only=True)
class Signer:
    """The device's signing key, and who vouches for it.

    `fleetdistill.secure.member.endorse` makes an endorsement, where devices are provisioned.

    Attributes:
        key: Secret Ed25519 key of the device, 32 bytes; the app keeps it as its other secrets.
        endorsement: Signature of the roster's key over the device's id and public key, 64 bytes.
        roster_key: Public Ed25519 key of the roster, 32 bytes, which the app is built with. Its secret half must not be
            the server's: whoever has it can invent devices.

    Raises:
        ConfigurationError: A value has the wrong type or length.
    """

    key: bytes
    endorsement: bytes
    roster_key: bytes

    def __post_init__(self) -> None:
        for name, size in {"key": _KEY_BYTES, "endorsement": _SIGNATURE_BYTES, "roster_key": _KEY_BYTES}.items():
            value = getattr(self, name)
            check_type(name, value, bytes, f"{size} bytes")
            if len(value) != size:
                raise ConfigurationError(f"{name} has {len(value)} bytes, expected {size}")


class Endorsing(Protocol):
    """Vouches for this device's key, and checks what vouches for another's."""

    def identity(self, session: SecureSession) -> bytes:
        """Returns the device's secret Ed25519 key in a sum, 32 bytes."""

    def endorsement(self, public_key: bytes) -> bytes:
        """Returns the endorsement of this device's public key, 32 bytes."""

    def check(self, run: str, device: str, public_key: bytes, endorsement: bytes) -> None:
        """Raises SumRefusedError unless an endorsement is that of a device's public key, for any run or for this."""


def endorsing_of(keys: int, signer: Signer | None, files: Files, now: Callable[[], float]) -> Endorsing | None:
    """Returns what vouches for the keys of a sum; None with unsigned keys.

    Args:
        keys: Who vouches, a value of `config.KEYS`.
        signer: The device's key on the roster, which a sum with such keys needs.
        files: The state directory, with the device's certificate.
        now: Returns Unix seconds.

    Raises:
        SumRefusedError: The device has no certificate.
    """
    from fleetdistill.methods.classstats_secure.config import CERTIFICATES, KEYS, UNSIGNED

    if keys == KEYS[UNSIGNED]:
        return None
    if keys == KEYS[CERTIFICATES]:
        return ByCertificate(files, now)
    assert signer is not None  # checked with the terms
    return ByRoster(signer)


class ByRoster:
    """The app's roster key has endorsed the device's lasting key."""

    def __init__(self, signer: Signer) -> None:
        self._signer = signer

    def identity(self, session: SecureSession) -> bytes:
        return self._signer.key

    def endorsement(self, public_key: bytes) -> bytes:
        return self._signer.endorsement

    def check(self, run: str, device: str, public_key: bytes, endorsement: bytes) -> None:
        from fleetdistill.secure.member import is_endorsed

        if not is_endorsed(self._signer.roster_key, device, public_key, endorsement):
            raise SumRefusedError(f"the key of device {device!r} is not endorsed by the roster's key")


class ByCertificate:
    """The key of the device's certificate signs a key that exists for one sum.

    The Ed25519 key follows from the sum's root: nothing else has to be kept, a crash does not change it, and it is
    erased with the sum. A key that lasts would add nothing, because the certificate says whose it is.
    """

    def __init__(self, files: Files, now: Callable[[], float]) -> None:
        identity, authorities = (files.load(f"{DEVICE_FOLDER}/{name}") for name in (IDENTITY, AUTHORITIES))
        self._key, self._chain = split(identity or b"")
        self._authorities, self._now = authorities or b"", now
        if not (self._chain and self._authorities):
            raise SumRefusedError("the sum needs certificates, and this device is not enrolled: it has none")

    def identity(self, session: SecureSession) -> bytes:
        from fleetdistill.secure.primitives import hkdf, tag

        return hkdf(session.root, session.sid, tag("identity key"))

    def endorsement(self, public_key: bytes) -> bytes:
        from fleetdistill.secure.certificate import certify

        try:
            return certify(self._key, self._chain, public_key)
        except WireError as error:
            raise SumRefusedError(str(error)) from error

    def check(self, run: str, device: str, public_key: bytes, endorsement: bytes) -> None:
        from fleetdistill.secure.certificate import check_certified

        try:
            check_certified(self._authorities, run, device, public_key, endorsement, self._now())
        except WireError as error:
            raise SumRefusedError(f"the certificate of device {device!r} cannot be used: {error}") from error
