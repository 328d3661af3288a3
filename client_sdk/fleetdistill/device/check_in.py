"""A device's check-in with the server, and the preparation of the device's compute backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetdistill.data.samples import digest_of_arrays, named
from fleetdistill.device.events import Events
from fleetdistill.device.identity import data_key, save_identity
from fleetdistill.device.private import check_is_private, guarantee_of, hide_rows
from fleetdistill.device.session import Session
from fleetdistill.errors import (
    CannotAnswer,
    DamagedStateError,
    DataError,
    FleetDistillError,
    NoSamplesError,
    RefusedError,
    StateError,
)
from fleetdistill.link.abilities import check_fits
from fleetdistill.link.base import Link
from fleetdistill.link.credentials import is_enrolled
from fleetdistill.link.downloads import Downloads
from fleetdistill.link.terms import check_terms
from fleetdistill.spans import NO_SPANS, Spans
from fleetdistill.state import failpoints
from fleetdistill.state.data_version import data_version
from fleetdistill.state.saved_profile import (
    CONTRACT,
    PROFILE,
    load_contract,
    load_profile,
    save_contract,
    save_profile,
)
from fleetdistill.state.sent_ledger import check_in_entry
from fleetdistill.state.state_check import STATES, damaged_states
from fleetdistill.wire.codec import Payload, decode
from fleetdistill.wire.compression import offered
from fleetdistill.wire.v1 import contract_pb2, service_pb2

if TYPE_CHECKING:
    from fleetdistill.compute.base import Compute

MakeForData = Callable[[contract_pb2.Contract, Any], "Compute"]
"""Function that makes a compute backend from the run's contract and the app's data."""


class CheckIn:
    """Checks a device in, and provides the compute backend that the check-in describes.

    Args:
        session: State of the open device.
        events: Emits events to the app.
        make_compute: Makes the compute backend when it is first needed.
        make_predicting: Makes a compute backend without data from the run's contract, for `stored_compute`.
        data: The app's training data, as in `Device(data=...)`.
        max_threads: Maximum number of threads that a run may require.
        only_private: Whether the app allows only private runs.
        downloads: Stores the run's payloads.
    """

    def __init__(
        self,
        session: Session,
        events: Events,
        *,
        make_compute: MakeForData,
        make_predicting: Callable[[contract_pb2.Contract], Compute],
        data: Any,
        max_threads: int,
        only_private: bool,
        downloads: Downloads,
    ) -> None:
        self._session = session
        self._events = events
        self._storage = session.storage
        self._make = make_compute
        self._make_predicting = make_predicting
        self._data = data
        self._max_threads = max_threads
        self._columns_sent: tuple[str, ...] = ()
        self._only_private, self._downloads = only_private, downloads
        self._replaced = False  # whether `replace_data` was called and its data are not read yet
        self._profile_sent = False  # whether the server has the current profile
        self._data_version_sent = False  # whether the server has the current data version
        self._replacements: list[Any] = []  # new data for the next turn, or None; the last ones count

    @property
    def is_due(self) -> bool:
        """Whether the device must check in, because it has not, or because the app has narrowed `allow` since."""
        return self._session.terms is None or self._columns_sent != self._session.consent.columns

    def check_in(self, on_reply: Callable[[], None] = lambda: None) -> service_pb2.CheckInResponse:
        """Checks the device in; uses the saved profile if there is one, so that an idle device does not load torch.

        Args:
            on_reply: Called when the server has replied, before the event.
        """
        profile = self._saved_profile()
        columns = self._session.consent.columns
        run, made_now = self._session.identity.run, False
        if profile is None:
            terms = self._send_check_in(None)
            profile = self._profile_of(self._with_samples(self._current_compute(terms.contract)))
            run, made_now = terms.contract.run, True
        else:
            self._set_columns(profile, columns)
            _set_compressions(profile)
        terms = self._send_check_in(profile, run)
        self._session.identity.run = terms.contract.run
        self._session.identity.ClearField("abilities")
        failpoints.hit("device.check-in.before-save")
        self._save(profile, terms.contract)
        failpoints.hit("device.check-in.after-save")
        if self._session.compute is not None:
            self._save_data_version(profile)
        self._profile_sent |= made_now
        self._session.terms, self._columns_sent = terms, columns
        self._events.rounds = terms.contract.rounds
        device = self._session.identity.device
        on_reply()
        text = f"{device} takes part in run {terms.contract.run!r}"
        reveals = _reveals(terms.contract)
        self._events.emit_checked_in(text, reveals, leaves_the_process=self._session.link.remote)
        return terms

    def _send_check_in(self, profile: contract_pb2.DeviceProfile | None, run: str = "") -> service_pb2.CheckInResponse:
        identity = self._session.identity
        terms = self._call_server(profile, run)
        check_terms(terms, identity.run, self._max_threads)
        if identity.HasField("abilities"):
            check_fits(terms.contract, identity.abilities)
        if self._only_private:
            check_is_private(terms.contract)
        return terms

    def _call_server(self, profile: contract_pb2.DeviceProfile | None, run: str) -> service_pb2.CheckInResponse:
        """Sends a check-in; one with a profile is recorded in the ledger first."""
        if profile is not None:
            self._storage.ledger.begin_check_in(check_in_entry(run, profile.samples, profile.ByteSize()))
        identity = self._session.identity
        if run and identity.HasField("abilities"):  # the run that was chosen a moment ago, even if others fit now
            identity = service_pb2.Identity(run=run, device=identity.device, secret=identity.secret)
        try:
            terms = self._session.link.check_in(identity, profile)
        except RefusedError:
            self._note_reply(run, profile)
            raise
        self._note_reply(run, profile)
        return terms

    def _note_reply(self, run: str, profile: contract_pb2.DeviceProfile | None) -> None:
        if profile is not None:
            self._storage.ledger.end_check_in(run)

    def _profile_of(self, compute: Compute) -> contract_pb2.DeviceProfile:
        profile = compute.profile(self._session.consent.columns)
        _set_compressions(profile)
        if guarantee_of(compute.contract) is not None:
            hide_rows(profile)
        elif digest := compute.data_digest():
            profile.data_version = data_version(data_key(self._storage), digest)
        return profile

    def _save(self, profile: contract_pb2.DeviceProfile, contract: contract_pb2.Contract) -> None:
        save_identity(self._storage, self._session.identity)
        save_profile(self._storage, profile)
        # A simulated device does not predict without its server.
        if self._storage.has_directory and self._saved_contract() != contract:
            save_contract(self._storage, contract)

    def _saved_profile(self) -> contract_pb2.DeviceProfile | None:
        """Returns the last accepted profile, or None; a damaged one is put aside, and the caller makes a new one."""
        try:
            return load_profile(self._storage)
        except DamagedStateError as error:
            self._storage.set_aside(PROFILE, error, "the device describes its model and data again")
            return None

    def _set_columns(self, profile: contract_pb2.DeviceProfile, columns: Sequence[str]) -> None:
        """Updates the allowed columns; saved before the call, so that withdrawn ones are not shown as allowed."""
        if list(profile.allowed_columns) != sorted(columns):
            del profile.allowed_columns[:]
            profile.allowed_columns.extend(sorted(columns))
            save_profile(self._storage, profile)

    # --- data

    def replace_data(self, data: Any) -> None:
        """Stores new training data, or None to read the present ones again, for the next turn.

        Not for the current turn, because it may use the previous data.
        """
        self._storage.clear_data_version()  # first, so that a device that crashes here checks in with the new data
        self._replacements.append(data)

    def take_replaced_data(self) -> None:
        """Replaces the training data if there are new ones; they are read and checked in once no answer is pending."""
        if self._replacements:
            given = [data for data in self._replacements if data is not None]
            self._data, self._replaced = given[-1] if given else self._data, True
            self._profile_sent = self._data_version_sent = False
            self._replacements.clear()
            compute = self._session.compute
            if compute is not None and compute.sample_count is None:
                self._session.compute = self._session.computed = None

    def check_in_changed_data(self) -> None:
        """Checks in again if the training data have changed since the last check-in.

        Arrays are compared by their digest, so that an idle device with unchanged data does not load torch.
        """
        if self._data_version_sent:
            return
        with self._session.guard.held():
            self._compare_data()

    def _compare_data(self) -> None:
        profile = self._saved_profile()
        digest = self._digest_of_arrays()
        if profile is None or not self._storage.is_data_version(profile.data_version, digest):
            assert self._session.terms is not None  # checked in by `Device.step`
            self._update_profile(self._current_compute(self._session.terms.contract))
        self._data_version_sent = True

    def has_samples(self) -> bool:
        """Returns whether the app has training samples; reads the data again if it had none."""
        with self._session.guard.held():
            compute, terms = self._session.compute, self._session.terms
            if terms is None or compute is None or compute.sample_count != 0:
                return True
            self._update_profile(self._current_compute(terms.contract))
            return compute.sample_count != 0

    def _current_compute(self, contract: contract_pb2.Contract) -> Compute:
        """Returns the compute backend with the app's current data, which are read again unless it is new."""
        known = self._session.compute
        compute = self.make_compute(contract)
        if compute is known and compute.sample_count is not None and compute.reread_data(self._data):
            self._profile_sent = False
        self._replaced = False
        return compute

    def _with_samples(self, compute: Compute) -> Compute:
        if compute.sample_count == 0:
            raise NoSamplesError()
        return compute

    def compute_for_ask(self) -> Compute:
        """Returns the compute backend with the committed state and the app's current data.

        Raises:
            CannotAnswer: Data that the device used before cannot be used any more, or have no samples now.
        """
        with self._session.guard.held():
            is_first = self._session.compute is None
            contract = (self._session.terms or self.check_in()).contract
            try:
                self._with_samples(self._current_compute(contract))
            except DataError as error:
                if is_first and not isinstance(error, NoSamplesError):
                    raise
                raise CannotAnswer(str(error)) from error
            return self._prepared_compute()

    def _digest_of_arrays(self) -> bytes | None:
        with named("data"):
            return digest_of_arrays(self._data)

    def _save_data_version(self, profile: contract_pb2.DeviceProfile) -> None:
        if not self._replacements:  # otherwise the stored version must stay cleared until the new data are in use
            self._storage.save_data_version(profile.data_version, self._digest_of_arrays())
        self._data_version_sent = True

    def _update_profile(self, compute: Compute) -> None:
        """Checks in again if the app's model or data have changed since the last check-in.

        Does nothing while an answer is in the outbox, which may declare more samples than the new data have, nor
        without samples.
        """
        if (
            self._profile_sent
            or self._replaced
            or compute.sample_count == 0
            or self._storage.outbox.pending() is not None
        ):
            return
        profile = self._profile_of(compute)
        if profile != self._saved_profile():
            self._call_server(profile, self._session.identity.run)
            self._save(profile, compute.contract)
        self._save_data_version(profile)
        self._profile_sent = True

    # --- compute backend

    def make_compute(self, contract: contract_pb2.Contract) -> Compute:
        """Returns the compute backend; makes one without state if there is none."""
        if self._session.compute is None:
            import fleetdistill.knowledge  # noqa: F401  (registers the kinds of parts, which an idle device does not need)

            self._session.compute = self._make(contract, self._data)
        return self._session.compute

    def ready_compute(self) -> Compute:
        """Returns the compute backend with the committed state, or with the run's initial weights."""
        with self._session.guard.held():
            return self._prepared_compute()

    def _prepared_compute(self) -> Compute:
        contract = (self._session.terms or self.check_in()).contract
        compute = self.make_compute(contract)
        self._update_profile(compute)
        for sha256 in _kept_payloads(compute, contract):
            if not compute.has_payload(sha256):
                compute.take_payload(sha256, decode(self._kept_payload(sha256, contract)))
        if not compute.has_state:
            self._restore(compute, contract)
        return compute

    def stored_compute(self) -> Compute | None:
        """Returns a new compute backend with the app's models from the state directory, without data or the server.

        For predictions. None before the first state.

        Raises:
            DamagedStateError: A file with the state is damaged.
            FleetDistillError: The contract is damaged or missing, and the server, which has it, cannot be asked.
        """
        saved = self._storage.load("state.safetensors")
        if saved is None:
            return None
        contract = self._saved_contract()
        if contract is None:
            return self.ready_compute()
        import fleetdistill.knowledge  # noqa: F401  (as in `make_compute`)

        compute = self._make_predicting(contract)
        for sha256 in _kept_payloads(compute, contract):
            payload = self._downloads.stored(sha256)
            if payload is not None:
                compute.take_payload(sha256, decode(payload))
        self._restore_saved(compute, saved)
        return compute

    def _saved_contract(self) -> contract_pb2.Contract | None:
        """Returns the contract of the run; a damaged one is put aside, and comes again with the next check-in."""
        try:
            return load_contract(self._storage)
        except DamagedStateError as error:
            self._storage.set_aside(CONTRACT, error, "the device asks the server for the run's contract again")
            return None

    def _restore(self, compute: Compute, contract: contract_pb2.Contract) -> None:
        saved = self._storage.load("state.safetensors")
        if saved is not None:
            self._restore_saved(compute, saved)
            return
        if contract.initial_weights and contract.initial_weights in compute.wanted_payloads():
            compute.load_initial(decode(self.download(contract.initial_weights)))
        # Saved before the first answer: if the answer is dropped, the device returns to this state.
        failpoints.hit("device.first-state.before-save")
        self._storage.save("delivered.safetensors", compute.delivered_state())
        self._storage.save("state.safetensors", compute.state())
        failpoints.hit("device.first-state.after-save")
        compute.has_state = True

    def _restore_saved(self, compute: Compute, saved: bytes) -> None:
        try:
            compute.restore(saved, self._storage.load("delivered.safetensors"))
        except StateError as error:
            raise self._damaged_state(error) from error

    def _damaged_state(self, error: StateError) -> DamagedStateError:
        """Returns the error that names the damaged file; `state.safetensors` if the worker's format is unknown."""
        found = damaged_states(self._storage) or {STATES[0]: str(error).removeprefix("the saved state is damaged: ")}
        name, reason = next(iter(found.items()))
        path = self._storage.directory / name
        return DamagedStateError(
            path,
            f"{path} is damaged: {reason}. Restore it from a backup; or move {' and '.join(STATES)} away to start from "
            "the run's initial weights",
            reason,
        )

    # --- payloads

    def download(self, sha256: bytes) -> Payload:
        """Returns a payload of the run; deletes stored payloads that the compute backend does not use."""
        assert self._session.terms is not None
        assert self._session.compute is not None
        keep = _kept_payloads(self._session.compute, self._session.terms.contract)
        return self._downloads.fetch(self._session.link, self._session.identity, sha256, keep)

    def _kept_payload(self, sha256: bytes, contract: contract_pb2.Contract) -> Payload:
        """Returns a payload that the compute backend uses, from the state directory or else from the server."""
        stored = self._downloads.stored(sha256)
        if stored is not None:
            return stored
        payload = self.download(sha256)
        kind = "proxy" if sha256 == contract.proxy_digest else "extractor"
        what = "proxy set" if kind == "proxy" else "extractor file"
        values = {"digest": sha256.hex(), "bytes": payload.data_bytes}
        text = f"downloaded the run's {what} {sha256.hex()[:12]}, {payload.data_bytes} bytes"
        self._events.emit(kind, 0, text, values)
        return payload


def open_link(server: str, token: str | Path | None, directory: Path, device_id: str, spans: Spans = NO_SPANS) -> Link:
    """Returns a link with TLS if the device is enrolled or has a token, else plain text. Never downgrades from TLS."""
    from fleetdistill.link.grpc_link import GrpcLink

    if token is None and not is_enrolled(directory):
        return GrpcLink(server, spans=spans)
    from fleetdistill.link.enrolment import Enrolment

    return GrpcLink(server, Enrolment(server, directory, device_id, token), spans=spans)


def _set_compressions(profile: contract_pb2.DeviceProfile) -> None:
    """Updates the supported compressions: a library may have been added or removed since the profile was saved."""
    del profile.compressions[:]
    profile.compressions.extend(offered())


def _reveals(contract: contract_pb2.Contract) -> str:
    """Returns what answers reveal of single samples, by this SDK's knowledge of the method; empty if that is little."""
    from fleetdistill.methods import config_of_contract  # the front imports this package and must not load methods

    try:
        return str(config_of_contract(contract).reveals())
    except FleetDistillError:  # a worker may run a method that this SDK does not know
        return ""


def _kept_payloads(compute: Compute, contract: contract_pb2.Contract) -> list[bytes]:
    """Returns the digests of the payloads to keep: all wanted ones except the initial weights, which are used once."""
    return [one for one in compute.wanted_payloads() if one != contract.initial_weights]
