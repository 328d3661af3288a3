"""A device's check-in with the server: what it says of its model and data, and the server's terms."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fleetdistill.data.samples import check_fits_run, digest_of_arrays, named
from fleetdistill.device.backend import Backend
from fleetdistill.device.contact import link_error
from fleetdistill.device.identity import data_key, save_identity, save_server
from fleetdistill.device.parts import DeviceParts
from fleetdistill.device.private import check_is_private, has_released, hides_rows, remove_rows
from fleetdistill.device.secure import SecureTerms, check_secure
from fleetdistill.errors import (
    CannotAnswer,
    DamagedStateError,
    DataError,
    FleetDistillError,
    LinkError,
    NoSamplesError,
    RefusedError,
)
from fleetdistill.link.abilities import check_fits
from fleetdistill.link.terms import check_terms
from fleetdistill.state import failpoints
from fleetdistill.state.saved_profile import (
    CONTRACT,
    PROFILE,
    data_version,
    load_contract,
    load_profile,
    save_contract,
    save_profile,
)
from fleetdistill.state.sent_ledger import check_in_entry
from fleetdistill.wire.codes import Code, after_seconds, is_final
from fleetdistill.wire.compression import offered
from fleetdistill.wire.v1 import contract_pb2, service_pb2

if TYPE_CHECKING:
    from fleetdistill.compute.base import Compute


class CheckIn:
    """Checks a device in, and again when its model, its data or its consent have changed.

    Args:
        parts: What the parts of the open device share.
        backend: Keeps the compute backend, which describes model and data.
        max_threads: Maximum number of threads that a run may require.
        only_private: Whether the app allows only private runs.
        secure: The app's terms of secure sums, without which it allows no run; None for any run.

    Attributes:
        accepted: Whether the server takes the device for present, even if its reply could not be stored.
    """

    def __init__(
        self, parts: DeviceParts, backend: Backend, *, max_threads: int, only_private: bool, secure: SecureTerms | None
    ) -> None:
        self._parts = parts
        self._events = parts.events
        self._storage = parts.storage
        self._backend = backend
        self._max_threads = max_threads
        self._only_private = only_private
        self._secure = secure
        self.accepted = False
        self._terms: service_pb2.CheckInResponse | None = None
        self._columns_sent: tuple[str, ...] = ()
        self._replaced = False  # whether `replace_data` was called and its data are not read yet
        self._profile_sent = False  # whether the server has the current profile
        self._data_version_sent = False  # whether the server has the current data version
        self._replacements: list[Any] = []  # new data for the next turn, or None; the last ones count

    @property
    def terms(self) -> service_pb2.CheckInResponse | None:
        """The server's reply to the check-in; None if the device has to check in."""
        return self._terms

    def forget_terms(self) -> None:
        """Makes the device check in again, for example because a restored server has an outdated profile of it."""
        self._terms = None
        self.accepted = False

    @contextlib.contextmanager
    def as_link_errors(self) -> Iterator[None]:
        """Converts temporary refusals in the block; after the loss of the device's registration it checks in again.

        Raises:
            LinkError: The server refused a call temporarily.
            RefusedError: The server refused a call permanently.
        """
        try:
            yield
        except RefusedError as refusal:
            if refusal.code == Code.BAD_IDENTITY and "check_in" in refusal.details:
                self.forget_terms()
                text = "the server does not know this device any more: its store is new, or restored from a backup"
                raise LinkError(f"{text} ({refusal})", after_seconds(refusal.details), refusal.code) from refusal
            if is_final(refusal.code):
                raise
            raise link_error(refusal) from refusal

    def current_terms(self, on_reply: Callable[[], None]) -> service_pb2.CheckInResponse:
        """Returns the server's terms; checks in if the device has not, or if the app has narrowed `allow` since."""
        if self._terms is None or self._columns_sent != self._parts.consent.columns:
            return self.check_in(on_reply)
        return self._terms

    def check_in(self, on_reply: Callable[[], None] = lambda: None) -> service_pb2.CheckInResponse:
        """Checks the device in; uses the saved profile if there is one, so that an idle device does not load torch.

        Args:
            on_reply: Called when the server has replied, before the event.
        """
        profile = self._saved_profile()
        columns = self._parts.consent.columns
        run, made_now = self._parts.identity.run, False
        if profile is None:
            terms = self._send_check_in(None)
            profile = self._profile_of(self._with_samples(self._current_compute(terms.contract)))
            run, made_now = terms.contract.run, True
        else:
            self._check_model(profile)
            self._set_columns(profile, columns)
            _set_compressions(profile)
        terms = self._send_check_in(profile, run)
        self._parts.identity.run = terms.contract.run
        self._parts.identity.ClearField("abilities")
        failpoints.hit("device.check-in.before-save")
        self._save(profile, terms.contract)
        failpoints.hit("device.check-in.after-save")
        if self._backend.compute is not None:
            self._save_data_version(profile)
        self._profile_sent |= made_now
        self._terms = terms
        self._columns_sent = columns
        self._events.rounds = terms.contract.rounds
        device = self._parts.identity.device
        on_reply()
        text = f"{device} takes part in run {terms.contract.run!r}"
        reveals = _reveals(terms.contract)
        self._events.emit_checked_in(text, reveals, leaves_the_process=self._parts.link.remote)
        return terms

    def _send_check_in(self, profile: contract_pb2.DeviceProfile | None, run: str = "") -> service_pb2.CheckInResponse:
        identity = self._parts.identity
        terms = self._call_server(profile, run)
        check_terms(terms, identity.run, self._max_threads)
        if identity.HasField("abilities"):
            check_fits(terms.contract, identity.abilities)
        if self._only_private:
            check_is_private(terms.contract)
        check_secure(terms.contract, self._secure)
        return terms

    def _call_server(self, profile: contract_pb2.DeviceProfile | None, run: str) -> service_pb2.CheckInResponse:
        """Sends a check-in; one with a profile is recorded in the ledger first."""
        if profile is not None:
            self._storage.ledger.begin_check_in(check_in_entry(run, profile.samples, profile.ByteSize()))
        identity = self._parts.identity
        if run and identity.HasField("abilities"):  # the run that was chosen a moment ago, even if others fit now
            identity = service_pb2.Identity(run=run, device=identity.device, secret=identity.secret)
        try:
            terms = self._parts.link.check_in(identity, profile)
        except RefusedError:
            self._note_reply(run, profile)
            raise
        self.accepted |= profile is not None
        self._note_reply(run, profile)
        return terms

    def _note_reply(self, run: str, profile: contract_pb2.DeviceProfile | None) -> None:
        if profile is not None:
            self._storage.ledger.end_check_in(run)

    def _profile_of(self, compute: Compute) -> contract_pb2.DeviceProfile:
        profile = compute.profile(self._parts.consent.columns)
        _set_compressions(profile)
        if hides_rows(compute.contract):
            remove_rows(profile)
        elif digest := compute.data_digest():
            profile.data_version = data_version(data_key(self._storage), digest)
        return profile

    def _save(self, profile: contract_pb2.DeviceProfile, contract: contract_pb2.Contract) -> None:
        save_identity(self._storage, self._parts.identity)
        if self._parts.server_address:
            save_server(self._storage, self._parts.server_address)
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

    def _check_model(self, profile: contract_pb2.DeviceProfile) -> None:
        """Raises ModelError if the committed state is not of the app's model, before the device takes part with it."""
        fingerprint = self._backend.fingerprint()
        if fingerprint != profile.model_fingerprint and (contract := self._saved_contract()) is not None:
            self._backend.check_state(profile.model_fingerprint, fingerprint, contract)

    def _set_columns(self, profile: contract_pb2.DeviceProfile, columns: Sequence[str]) -> None:
        """Updates the allowed columns; saved before the call, so that withdrawn ones are not shown as allowed."""
        if list(profile.allowed_columns) != sorted(columns):
            del profile.allowed_columns[:]
            profile.allowed_columns.extend(sorted(columns))
            save_profile(self._storage, profile)

    # --- data

    def check_data(self, data: Any) -> None:
        """Raises DataError if new training data are not of the run, as far as that is known and quick to see."""
        contract = self._terms.contract if self._terms is not None else self._saved_contract()
        if contract is not None and data is not None:
            run = self._parts.identity.run
            check_fits_run(data, run, tuple(contract.input_shape), len(contract.classes))

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
            self._backend.replace_data(given[-1] if given else self._backend.data)
            self._replaced = True
            self._profile_sent = self._data_version_sent = False
            self._replacements.clear()

    def check_in_changed_data(self) -> None:
        """Checks in again if the training data have changed since the last check-in.

        Arrays are compared by their digest, so that an idle device with unchanged data does not load torch.
        """
        if self._data_version_sent:
            return
        with self._parts.lock.held():
            self._compare_data()

    def _compare_data(self) -> None:
        profile = self._saved_profile()
        digest = self._digest_of_arrays()
        if profile is None or not self._storage.is_data_version(profile.data_version, digest):
            assert self._terms is not None  # checked in by the turn
            contract = self._terms.contract
            self._update_profile(self._current_compute(contract))
            if hides_rows(contract) and has_released(self._storage, contract.run):
                self._events.emit_not_released(contract.run)
        self._data_version_sent = True

    def has_samples(self) -> bool:
        """Returns whether the app has training samples; reads the data again if it had none."""
        with self._parts.lock.held():
            compute, terms = self._backend.compute, self._terms
            if terms is None or compute is None or compute.sample_count != 0:
                return True
            self._update_profile(self._current_compute(terms.contract))
            return compute.sample_count != 0

    def _current_compute(self, contract: contract_pb2.Contract) -> Compute:
        """Returns the compute backend with the app's current data, which are read again unless it is new."""
        compute, changed = self._backend.reread(contract)
        if changed:
            self._profile_sent = False
        self._replaced = False
        return compute

    def _with_samples(self, compute: Compute) -> Compute:
        if compute.sample_count == 0:
            raise NoSamplesError()
        return compute

    def compute_for_ask(self, contract: contract_pb2.Contract) -> Compute:
        """Returns the compute backend with the committed state and the app's current data.

        Args:
            contract: Contract of the run.

        Raises:
            CannotAnswer: Data that the device used before cannot be used any more, or have no samples now.
        """
        with self._parts.lock.held():
            is_first = self._backend.compute is None
            try:
                self._with_samples(self._current_compute(contract))
            except DataError as error:
                if is_first and not isinstance(error, NoSamplesError):
                    raise
                raise CannotAnswer(str(error)) from error
            return self._prepare(contract)

    def _digest_of_arrays(self) -> bytes | None:
        with named("data"):
            return digest_of_arrays(self._backend.data)

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
        profile, saved = self._profile_of(compute), self._saved_profile()
        if profile != saved:
            if saved is not None:
                self._backend.check_state(saved.model_fingerprint, profile.model_fingerprint, compute.contract)
            self._call_server(profile, self._parts.identity.run)
            self._save(profile, compute.contract)
        self._save_data_version(profile)
        self._profile_sent = True

    # --- compute backend

    def ready_compute(self) -> Compute:
        """Returns the compute backend with the committed state, or with the run's initial weights."""
        with self._parts.lock.held():
            return self._prepare((self._terms or self.check_in()).contract)

    def compute_of_app(self) -> Compute:
        """Returns the compute backend as `ready_compute`, but without the server if there is a committed state."""
        with self._parts.lock.held():
            contract = None if self._terms or not self._backend.saved_state() else self._saved_contract()
            return self._backend.prepare(contract) if contract else self.ready_compute()

    def _prepare(self, contract: contract_pb2.Contract) -> Compute:
        self._update_profile(self._backend.make(contract))
        return self._backend.prepare(contract)

    def stored_compute(self) -> Compute | None:
        """Returns a new compute backend with the app's models from the state directory, without data or the server.

        For predictions. None before the first state.

        Raises:
            DamagedStateError: A file with the state is damaged.
            FleetDistillError: The contract is damaged or missing, and the server, which has it, cannot be asked.
        """
        saved = self._backend.saved_state()
        if saved is None:
            return None
        contract = self._saved_contract()
        if contract is None:
            return self.ready_compute()
        return self._backend.stored(contract, saved)

    def _saved_contract(self) -> contract_pb2.Contract | None:
        """Returns the contract of the run; a damaged one is put aside, and comes again with the next check-in."""
        try:
            return load_contract(self._storage)
        except DamagedStateError as error:
            self._storage.set_aside(CONTRACT, error, "the device asks the server for the run's contract again")
            return None


def _set_compressions(profile: contract_pb2.DeviceProfile) -> None:
    """Updates the supported compressions: a library may have been added or removed since the profile was saved."""
    del profile.compressions[:]
    profile.compressions.extend(offered())


def _reveals(contract: contract_pb2.Contract) -> str:
    """Returns what answers reveal of single samples, by this SDK's knowledge of the method; empty if that is little."""
    from fleetdistill.methods import config_of_contract  # loads methods, which an idle device does not need

    try:
        return str(config_of_contract(contract).reveals())
    except FleetDistillError:  # a worker may run a method that this SDK does not know
        return ""
