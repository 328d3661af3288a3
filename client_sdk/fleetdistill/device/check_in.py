"""A device introduces itself to the server, and readies its compute backend: payloads of the run, and its state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from fleetdistill.device.events import Events
from fleetdistill.device.identity import save_identity
from fleetdistill.device.session import Session
from fleetdistill.link.base import Link
from fleetdistill.link.credentials import is_enrolled
from fleetdistill.link.downloads import Downloads
from fleetdistill.link.terms import check_terms
from fleetdistill.state import failpoints
from fleetdistill.state.data_version import data_version, digest_of_given
from fleetdistill.wire.codec import Payload, decode
from fleetdistill.wire.compression import offered
from fleetdistill.wire.v1 import contract_pb2, service_pb2

if TYPE_CHECKING:
    from fleetdistill.device.compute import Compute

MakeForData = Callable[[contract_pb2.Contract, Any], "Compute"]
"""Makes a compute backend of the run's contract and the app's data."""


class CheckIn:
    """A device's check-in, and the compute backend that it describes.

    Args:
        session: The device.
        events: Events for the app.
        make_compute: Makes the compute backend when it is needed.
        data: The app's rows, as `Device(data=...)` takes them.
        allow: Columns that may leave the device.
        max_threads: Most threads that a run may compute with.
        downloads: Where payloads of the run are kept.
    """

    def __init__(
        self,
        session: Session,
        events: Events,
        *,
        make_compute: MakeForData,
        data: Any,
        allow: Sequence[str],
        max_threads: int,
        downloads: Downloads,
    ) -> None:
        self._session, self._events, self._storage = session, events, session.storage
        self._make, self._data = make_compute, data
        self._allow, self._max_threads = tuple(allow), max_threads
        self._downloads = downloads
        self._declared = False  # whether the server knows the profile
        self._rows_known = False  # whether the server knows the version of the app's rows

    def check_in(self) -> service_pb2.CheckInResponse:
        """Introduces the device; the profile of last time serves, so that an idle device needs no torch."""
        profile = _profile_in(self._storage.load("profile.bin"))
        if profile is None:
            terms = self._greet(None)
            profile = self._profile_of(self.make_compute(terms.contract))
        else:
            del profile.allowed_columns[:]
            profile.allowed_columns.extend(self._allow)
            _set_compressions(profile)
        terms = self._greet(profile)
        self._session.identity.run = terms.contract.run
        failpoints.hit("device.check-in.before-save")
        self._save(profile)
        failpoints.hit("device.check-in.after-save")
        if self._session.compute is not None:
            self._note_rows(profile)
        self._session.terms = terms
        device = self._session.identity.device
        self._events.emit("checked-in", 0, f"{device} takes part in run {terms.contract.run!r}")
        return terms

    def _greet(self, profile: contract_pb2.DeviceProfile | None) -> service_pb2.CheckInResponse:
        terms = self._session.link.check_in(self._session.identity, profile)
        check_terms(terms, self._session.identity.run, self._max_threads)
        return terms

    def _profile_of(self, compute: Compute) -> contract_pb2.DeviceProfile:
        # Not above: it loads methods, and the front, which imports this package, must know none.
        from fleetdistill.device.compute import NamesRows

        profile = compute.profile(self._allow)
        _set_compressions(profile)
        if isinstance(compute, NamesRows):
            profile.data_version = data_version(self._session.identity.secret, compute.data_digest())
        return profile

    def _save(self, profile: contract_pb2.DeviceProfile) -> None:
        save_identity(self._storage, self._session.identity)
        self._storage.save("profile.bin", profile.SerializeToString())

    # --- rows

    def replace_data(self, data: Any) -> None:
        """The app has other rows: the next check-in is about them, and the compute backend is made anew."""
        self._storage.forget_rows()  # first: an app that dies now checks in with its rows after its restart
        self._data, self._session.compute, self._session.computed = data, None, None
        self._declared = self._rows_known = False

    def declare_other_rows(self) -> None:
        """Checks in again where the app's rows are not those of the last check-in.

        Arrays are compared by their digest, so that an idle device whose rows are the same needs no torch.
        """
        if self._rows_known:
            return
        with self._session.guard.held():
            self._compare_rows()

    def _compare_rows(self) -> None:
        profile = _profile_in(self._storage.load("profile.bin"))
        if profile is None or not self._storage.names_rows(profile.data_version, digest_of_given(self._data)):
            assert self._session.terms is not None  # checked in by `Device.step`
            self._declare(self.make_compute(self._session.terms.contract))
        self._rows_known = True

    def _note_rows(self, profile: contract_pb2.DeviceProfile) -> None:
        self._storage.note_rows(profile.data_version, digest_of_given(self._data))
        self._rows_known = True

    def _declare(self, compute: Compute) -> None:
        """Checks in again where the app's model or data changed since the last time.

        Not while an answer waits that was made of the data of before: it may have more samples than there are now.
        """
        if self._declared or self._storage.outbox.pending() is not None:
            return
        profile = self._profile_of(compute)
        if profile.SerializeToString() != self._storage.load("profile.bin"):
            self._session.link.check_in(self._session.identity, profile)
            self._save(profile)
        self._note_rows(profile)
        self._declared = True

    # --- compute backend

    def make_compute(self, contract: contract_pb2.Contract) -> Compute:
        """The compute backend as it is, or a new one without state."""
        if self._session.compute is None:
            self._session.compute = self._make(contract, self._data)
        return self._session.compute

    def ready_compute(self) -> Compute:
        """The compute backend with the device's state: the committed one, or the run's initial weights."""
        with self._session.guard.held():
            return self._prepared_compute()

    def _prepared_compute(self) -> Compute:
        contract = (self._session.terms or self.check_in()).contract
        compute = self.make_compute(contract)
        self._declare(compute)
        for sha256 in _kept_payloads(compute, contract):
            if not compute.has_payload(sha256):
                compute.take_payload(sha256, decode(self._kept_payload(sha256, contract)))
        if not compute.has_state:
            self._restore(compute, contract)
        return compute

    def _restore(self, compute: Compute, contract: contract_pb2.Contract) -> None:
        saved = self._storage.load("state.safetensors")
        if saved is not None:
            compute.restore(saved, self._storage.load("delivered.safetensors"))
            return
        if contract.initial_weights and contract.initial_weights in compute.wanted_payloads():
            compute.load_initial(decode(self.download(contract.initial_weights)))
        # Kept from the start: a first answer that is dropped leads back here, and the app may keep its first model.
        failpoints.hit("device.first-state.before-save")
        self._storage.save("delivered.safetensors", compute.delivered_state())
        self._storage.save("state.safetensors", compute.state())
        failpoints.hit("device.first-state.after-save")
        compute.has_state = True

    # --- payloads

    def download(self, sha256: bytes) -> Payload:
        """A payload of the run; what is kept besides is what the compute backend works with."""
        assert self._session.terms is not None
        assert self._session.compute is not None
        keep = _kept_payloads(self._session.compute, self._session.terms.contract)
        return self._downloads.fetch(self._session.link, self._session.identity, sha256, keep)

    def _kept_payload(self, sha256: bytes, contract: contract_pb2.Contract) -> Payload:
        """A payload that the compute backend works with: the one that is kept here, or fetched, once."""
        kept = self._downloads.held(sha256)
        if kept is not None:
            return kept
        payload = self.download(sha256)
        kind = "proxy" if sha256 == contract.proxy_digest else "extractor"
        what = "proxy set" if kind == "proxy" else "extractor file"
        values = {"digest": sha256.hex(), "bytes": payload.data_bytes}
        self._events.emit(kind, 0, f"fetched the run's {what} {sha256.hex()[:12]}, {payload.data_bytes} bytes", values)
        return payload


def open_link(server: str, token: str | Path | None, directory: Path, device_id: str) -> Link:
    """TLS for a device that is enrolled or has a token; plain text is never fallen back to."""
    from fleetdistill.link.grpc_link import GrpcLink

    if token is None and not is_enrolled(directory):
        return GrpcLink(server)
    from fleetdistill.link.enrolment import Enrolment

    return GrpcLink(server, Enrolment(server, directory, device_id, token))


def _set_compressions(profile: contract_pb2.DeviceProfile) -> None:
    """What this process can unpack; a library may have come or gone since a profile was saved."""
    del profile.compressions[:]
    profile.compressions.extend(offered())


def _profile_in(saved: bytes | None) -> contract_pb2.DeviceProfile | None:
    """The saved profile; a damaged one counts as none, it is made anew."""
    try:
        return contract_pb2.DeviceProfile.FromString(saved) if saved is not None else None
    except DecodeError:
        return None


def _kept_payloads(compute: Compute, contract: contract_pb2.Contract) -> list[bytes]:
    """What the compute backend works with for as long as it lives; the initial weights are used once."""
    return [one for one in compute.wanted_payloads() if one != contract.initial_weights]
