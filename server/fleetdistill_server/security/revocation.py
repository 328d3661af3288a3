"""Who loses access: devices and people whom an operator revokes, and who else is shut out at the end of a CA rotation.

A revoked device no longer takes part in any run.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from fleetdistill.errors import ConfigurationError
from fleetdistill.link.credentials import AUTHORITIES, IDENTITY, split
from fleetdistill.names import NAME_RULE, did_you_mean, is_name
from fleetdistill_server.security.certificates import Holder, Role, holder_of
from fleetdistill_server.security.pki import Authority
from fleetdistill_server.store.store import Store

_MAX_REASON = 512
_LISTED = 50


@dataclass(frozen=True)
class Revoked:
    """Result of a revocation.

    Attributes:
        changed: False if the device or person was already revoked.
        known: Whether a device of this id has enrolled or checked in, or the PKI has an identity of this person.
    """

    changed: bool
    known: bool


def has_person(pki: Path, role: str, name: str) -> bool:
    """Returns whether the PKI contains an identity of a person; `pki issue --out` puts it elsewhere."""
    return (pki / f"{role}-{name}" / IDENTITY).exists()


def check_known_device(store: Store, device: str) -> None:
    """Raises ConfigurationError if a device has never enrolled or checked in, and is not revoked yet."""
    _check_id(device)
    if store.credentials.has_device(device) or store.credentials.is_revoked(f"{Role.DEVICE}:{device}"):
        return
    meant = did_you_mean(device, store.credentials.device_ids())
    raise ConfigurationError(
        f"device {device!r} has never enrolled or checked in{meant or ';'} `fleetdistill devices` lists those that "
        "checked in. To revoke an id in advance, permanently, confirm it with --yes"
    )


def check_known_person(store: Store, pki: Path, role: str, name: str, place: str) -> None:
    """Raises ConfigurationError if the PKI contains no identity of a person who is not revoked yet.

    Args:
        store: The server's store.
        pki: Directory of the PKI.
        role: `operator` or `viewer`.
        name: Name of the person.
        place: What to call the PKI.
    """
    _check_person(role, name)
    if has_person(pki, role, name) or store.credentials.is_revoked(f"{role}:{name}"):
        return
    other = Role.VIEWER if role == Role.OPERATOR else Role.OPERATOR
    people = [path.parent.name.removeprefix(f"{role}-") for path in pki.glob(f"{role}-*/{IDENTITY}")]
    meant = f", but of {other} {name!r}." if has_person(pki, other, name) else did_you_mean(name, people)
    raise ConfigurationError(
        f"{place} contains no identity of {role} {name!r}{meant or '.'} To revoke a name in advance, or one whose "
        "identity was issued with --out, permanently, confirm it with --yes"
    )


def check_not_revoked(store: Store, role: str, name: str) -> None:
    """Raises ConfigurationError if a device or person was revoked, which cannot be undone."""
    if store.credentials.is_revoked(f"{role}:{name}"):
        raise ConfigurationError(f"{role} {name!r} was revoked, which is permanent; use another name")


def revoke_person(store: Store, role: str, name: str, reason: str) -> bool:
    """Revokes an operator or viewer permanently. Returns False if that role and name was already revoked.

    Raises:
        ConfigurationError: The role is not operator or viewer, or the name is invalid.
    """
    _check_person(role, name)
    return store.credentials.revoke(f"{role}:{name}", reason[:_MAX_REASON])


def revoke_device(store: Store, device: str, reason: str) -> Revoked:
    """Revokes a device permanently and closes its open asks.

    Args:
        store: The server's store.
        device: Id of the device; it need not have checked in yet.
        reason: Reason for the revocation; only the first 512 characters are stored.

    Raises:
        ConfigurationError: `device` is not a valid device id.
    """
    _check_id(device)
    with store.transaction():
        known = store.credentials.has_device(device)
        if not store.credentials.revoke(f"{Role.DEVICE}:{device}", reason[:_MAX_REASON]):
            return Revoked(False, known)
        for run in store.runs.names():
            if store.devices.get(run, device) is not None:
                store.devices.mark_absent(run, device, "device revoked")
                text = f"device {device} was revoked: {reason[:_MAX_REASON] or 'no reason given'}"
                store.history.add_event(run, "revoked", text, device=device)
    return Revoked(True, known)


@dataclass(frozen=True)
class ShutOut:
    """Who has a valid certificate of the old CA and none of the new one.

    Attributes:
        devices: Ids of devices that have not renewed their certificates.
        people: Operators and viewers whose identities are in the PKI's directory, as `role name`.
        tokens: Number of open enrolment tokens, which contain the old CA.
    """

    devices: list[str]
    people: list[str]
    tokens: int

    @property
    def names(self) -> list[str]:
        """Everyone who is shut out."""
        return [*self.people, *(f"device {device}" for device in self.devices)]

    def lines(self) -> Iterator[str]:
        """Yields sentences for the operator."""
        for what, names in (("devices", self.devices), ("people", self.people)):
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            listed = f": {', '.join(names[:_LISTED])}{more}" if names else ""
            yield f"{what} with a certificate of the old CA only, who will be shut out: {len(names) or 'none'}{listed}"
        yield "people whose identities were written elsewhere with --out are not known here"
        yield f"open enrolment tokens of the old CA, which will be revoked: {self.tokens or 'none'}"


def check_rotation(pki: Path) -> None:
    """Raises ConfigurationError if no CA rotation is in progress."""
    if not Authority(pki).is_rotating:
        raise ConfigurationError(f"{pki} has only one CA; there is no old CA to remove")


def shut_out(pki: Path, store: Store | None) -> ShutOut:
    """Returns who is shut out at the end of a CA rotation, without those who are revoked or whose certificate expired.

    Args:
        pki: Directory of the PKI.
        store: The server's store, which has the devices' certificates; None if there is none.
    """
    signing = Authority(pki)
    authority = x509.load_der_x509_certificate(signing.der)
    devices = [] if store is None else sorted(_old_devices(store, authority))
    tokens = 0 if store is None else store.credentials.count_open_tokens(signing.created_at)
    identities = [
        (holder, pem)
        for holder, pem in _identities(pki)
        if store is None or not store.credentials.is_revoked(*holder.subjects)
    ]
    old, new = set[str](), set[str]()
    for holder, pem in identities:
        (new if _is_signed(pem, authority) else old).add(f"{holder.role} {holder.name}")
    return ShutOut(devices, sorted(old - new), tokens)


def is_last_operator(pki: Path, store: Store, name: str) -> bool:
    """Returns whether an operator is the only one in the PKI's directory with a valid certificate."""
    accepted = accepted_authorities(pki)
    known = {
        holder.name for holder, pem in _identities(pki) if holder.role is Role.OPERATOR and is_accepted(pem, accepted)
    }
    valid = {item for item in known if not store.credentials.is_revoked(f"{Role.OPERATOR}:{item}", "")}
    return valid == {name}


def _check_id(device: str) -> None:
    if not is_name(device):
        raise ConfigurationError(f"device id is {device[:70]!r}, must be {NAME_RULE}")


def _check_person(role: str, name: str) -> None:
    if role not in (Role.OPERATOR, Role.VIEWER):
        raise ConfigurationError(f"role is {role[:70]!r}, must be operator or viewer")
    if not is_name(name):
        raise ConfigurationError(f"name is {name[:70]!r}, must be {NAME_RULE}")


def _old_devices(store: Store, authority: x509.Certificate) -> Iterator[str]:
    certificates = store.credentials.newest_certificates()
    revoked = {revocation.subject for revocation in store.credentials.revocations()}
    for certificate in certificates:
        subjects = {f"{Role.DEVICE}:{certificate.device}", f"serial:{certificate.serial}"}
        is_valid = certificate.expires_at > time.time() and not subjects & revoked
        if is_valid and not _is_signed(certificate.pem, authority):
            yield certificate.device


def _identities(pki: Path) -> Iterable[tuple[Holder, bytes]]:
    """Yields the people whose identities are in the PKI's directory, with their valid certificates."""
    for path in sorted(pki.glob(f"*/{IDENTITY}")):
        try:
            pem = split(path.read_bytes())[1]
        except OSError:
            continue  # of another user
        holder = holder_of(pem)
        if holder is not None and holder.expires_at > time.time():
            yield holder, pem


def accepted_authorities(pki: Path) -> list[x509.Certificate]:
    """Returns the certificates of the CAs that a PKI accepts; none if they cannot be read."""
    try:
        return x509.load_pem_x509_certificates((pki / AUTHORITIES).read_bytes())
    except (OSError, ValueError):
        return []


def is_accepted(pem: bytes, accepted: Sequence[x509.Certificate]) -> bool:
    """Returns whether one of these CAs has signed a certificate."""
    return any(_is_signed(pem, authority) for authority in accepted)


def of_forgotten_ca(pki: Path, store: Store) -> set[str]:
    """Returns the devices that a server would admit but for the CA of their newest certificate, told by its name.

    Revoked devices do not count, nor do devices whose runs are all over or have forgotten them.
    """
    accepted = {authority.subject.rfc4514_string() for authority in accepted_authorities(pki)}
    newest = [holder_of(certificate.pem) for certificate in store.credentials.newest_certificates() if accepted]
    devices = {holder.name for holder in newest if holder is not None and holder.issuer not in accepted}
    revoked = {revocation.subject for revocation in store.credentials.revocations()} if devices else set()
    gone = store.devices.without_work(devices)
    return {device for device in devices - gone if f"{Role.DEVICE}:{device}" not in revoked}


def is_of_old_ca(pki: Path, identity: Path) -> bool:
    """Returns whether an identity's certificate is not of the PKI's current CA."""
    authority = x509.load_der_x509_certificate(Authority(pki).der)
    return not _is_signed(split(identity.read_bytes())[1], authority)


def _is_signed(pem: bytes, authority: x509.Certificate) -> bool:
    try:
        x509.load_pem_x509_certificate(pem).verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
