"""What a device does in a secure sum: it checks every list of the server, and answers each step at most once.

The server learns the sum over the devices that finish, and no device's part of it. Not yet reviewed by a cryptographer:
docs/how-to/sum-securely.md says what that means.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fleetdistill.checked import check_type
from fleetdistill.device.endorsing import Endorsing, Signer, endorsing_of
from fleetdistill.device.events import Events
from fleetdistill.errors import ConfigurationError, PeerError, PrivacyBudgetError, SumRefusedError, WireError
from fleetdistill.names import is_name
from fleetdistill.state.files import Files
from fleetdistill.state.privacy_ledger import PrivacyBudget, PrivacyLedger, fingerprint
from fleetdistill.state.secure_sessions import SecureSession, SecureSessions, Steps

if TYPE_CHECKING:
    from fleetdistill.knowledge import HeadGradient, PrivateRows, SecureMessage
    from fleetdistill.methods.base import Answer, Ask
    from fleetdistill.methods.classstats_secure.config import SumSettings
    from fleetdistill.privacy.accountant import Guarantee
    from fleetdistill.secure.member import Member
    from fleetdistill.secure.session import Parameters
    from fleetdistill.wire.v1 import contract_pb2

__all__ = ["ANY_TERMS", "SecureSums", "SecureTerms"]

FORGET_AFTER_SECONDS = 7 * 86_400.0
"""A sum that has not ended by then is forgotten: its root and its input are erased."""
_MAX_CLIPPED = 0.01
"""Largest share of a device's numbers that may be clipped without an event."""
_UNREVIEWED = "secure sums are not yet reviewed by a cryptographer"
_NONCE_BYTES = _DIGEST_BYTES = 32
_KEYS = ("unsigned", "certificates", "roster")
"""Who may vouch for keys, each protecting against more than the one before."""


@dataclass(frozen=True, kw_only=True)
class SecureTerms:
    """On which terms a device takes part in secure sums. With them, it sends class statistics only masked.

    Not yet reviewed by a cryptographer: an error in the protocol could show the server one device's part of a sum.

        Device(secure=SecureTerms(min_devices=10), ...)

    Attributes:
        min_devices: Fewest devices in a sum, at least 3.
        colluders: Fewest devices that the sum must allow to send no noise or to work with the server, at least 0.
        signer: The device's key on a roster, for sums with keys `roster`, in which the server cannot invent devices.
        keys: The least that must vouch for the devices' keys: `unsigned`, the server's word; `certificates`, the
            certificates of the run's CA; or `roster`. None: `roster` with a signer, else `unsigned`. The device takes
            part in sums with this or more, if it has what they need: a certificate, or a signer.
        without_noise: Whether the device also takes part in sums without noise, of classstats_summed: they hide its
            part, but the sum has no privacy guarantee for a row.

    Raises:
        ConfigurationError: A value is out of range.
    """

    min_devices: int = 4
    colluders: int = 0
    signer: Signer | None = None
    keys: str | None = None
    without_noise: bool = False

    def __post_init__(self) -> None:
        for name, lowest in {"min_devices": 3, "colluders": 0}.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
                raise ConfigurationError(f"{name} must be a whole number of at least {lowest}, got {value!r}")
        if self.signer is not None:
            check_type("signer", self.signer, Signer, "a fleetdistill.Signer")
        check_type("without_noise", self.without_noise, bool, "true or false")
        if self.keys is not None and self.keys not in _KEYS:
            raise ConfigurationError(f"keys must be one of {', '.join(_KEYS)}, got {self.keys!r}")
        if self.keys == _KEYS[-1] and self.signer is None:
            raise ConfigurationError("keys is 'roster', which needs a signer: SecureTerms(signer=...)")

    @property
    def accepted_keys(self) -> tuple[str, ...]:
        """The values of the run's setting `keys` that satisfy `keys`, from the least on."""
        least = self.keys or _KEYS[0 if self.signer is None else -1]
        return _KEYS[_KEYS.index(least) :]


ANY_TERMS = SecureTerms(min_devices=3, without_noise=True)
"""Terms of a device whose app sets none; it may then take part in other runs, too."""


def check_secure(contract: contract_pb2.Contract, terms: SecureTerms | None) -> None:
    """Checks that a run has the secure sums that the app requires, and the device what they need.

    Raises:
        ConfigurationError: The run has no secure sums or no noise, and the terms require them; or a package is missing.
    """
    from fleetdistill.methods import config_of_contract

    config = config_of_contract(contract)
    if config.sums_securely:
        import fleetdistill.secure.primitives  # needs the package cryptography  # noqa: F401

        if reason := _reason_against(config, terms or ANY_TERMS):
            raise ConfigurationError(f"this device cannot take part in run {contract.run!r}: {reason}")
    elif terms is not None:
        raise ConfigurationError(
            f"run {contract.run!r} has no secure sums, but Device(secure=...) is set: this device takes part in secure "
            "sums only; ask the operator for a run of method classstats_secure, or leave the argument out"
        )


def _reason_against(config: SumSettings, terms: SecureTerms) -> str:
    """Returns why a device with these terms would refuse each sum of a run, with a remedy; empty if it would not."""
    if reason := _keys_refused(config.keys, terms):
        return reason
    built_with = "" if terms.signer is None else terms.signer.roster_key.hex()
    if config.roster_key and built_with != config.roster_key:
        return (
            f"its roster_key is {config.roster_key[:8]}, and this app was built with {built_with[:8]}; ask the "
            "operator for a run with the app's, or update the app"
        )
    if config.guarantee is None and not terms.without_noise:
        return "its sums have no noise; ask the operator for method classstats_secure, or set without_noise"
    if 0 < config.min_in_sum < terms.min_devices:
        return (
            f"its sums have at least {config.min_in_sum} devices, SecureTerms require {terms.min_devices}; ask the "
            "operator for a larger min_in_sum, or lower min_devices"
        )
    return ""


def _keys_refused(keys: str, terms: SecureTerms) -> str:
    """Returns why sums with these keys are refused; empty if they are not."""
    if keys not in terms.accepted_keys:
        accepted = " or ".join(map(repr, terms.accepted_keys))
        return (
            f"this device takes part in sums with keys = {accepted}, this one has {keys!r}; change keys in run.toml, "
            "or in SecureTerms"
        )
    if keys == _KEYS[-1] and terms.signer is None:
        return "the sum needs keys of a roster, and this device has no SecureTerms(signer=...)"
    return ""


class SecureSums:
    """Answers the steps of secure sums.

    Args:
        files: The state directory, with the open sum and the privacy ledger.
        device: Id of the device.
        terms: The app's terms.
        budget: The app's privacy budget; None for the run's epsilon and delta.
        events: Emits events to the app.
        now: Returns Unix seconds.

    Raises:
        ConfigurationError: The signer's endorsement is of another device, key or roster.
    """

    def __init__(
        self,
        files: Files,
        device: str,
        terms: SecureTerms,
        budget: PrivacyBudget | None,
        events: Events,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._files = files
        self._sessions = SecureSessions(files)
        self._device = device
        self._terms = terms
        self._budget = budget
        self._events = events
        self._now = now
        if terms.signer is not None:
            _check_signer(terms.signer, device)

    def forget_expired(self) -> None:
        """Ends a sum that began more than seven days ago."""
        session = self._sessions.open()
        if session is not None and self._now() - session.began > FORGET_AFTER_SECONDS:
            self._sessions.end(session, "expired")

    def _learn(self, ask: Ask) -> None:
        """Ends the open sum if the class space's plan says that it contains this device."""
        from fleetdistill.knowledge import Plan

        session = self._sessions.open()
        counted = ask.part("plan", Plan).values.get("counted") is True
        if counted and session is not None and self._sessions.steps(session).has_input:
            self._sessions.end(session, "counted")

    def answer(self, answer: Answer, ask: Ask, contract: contract_pb2.Contract, config: SumSettings) -> Answer:
        """Returns the answer to a step of a sum.

        Args:
            answer: Of the method; that of the first step has the rows.
            ask: The ask.
            contract: The run's contract.
            config: The method's configuration in the contract.

        Raises:
            SumRefusedError: The device refuses the step.
            PrivacyBudgetError: The sum would exceed the privacy budget.
            WireError: The server's message is not valid.
            StateError: The state directory is damaged.
        """
        from fleetdistill.knowledge import PrivateRows, SecureMessage
        from fleetdistill.methods.classstats.exchange import REFINE
        from fleetdistill.methods.classstats_secure.exchange import INPUT, KEYS, SHARES, STEPS
        from fleetdistill.wire.codec import encode

        self.forget_expired()
        if ask.step == REFINE:
            return self._refine(answer, ask, config)
        if ask.step not in STEPS:
            self._learn(ask)
            return replace(answer, samples=1)
        message = ask.part("session", SecureMessage)
        if ask.step == KEYS:
            rows = answer.parts.get("statistics")
            if not isinstance(rows, PrivateRows):
                raise ConfigurationError("the method gives no rows for a secure sum; nothing is sent")
            session = self._join(message, ask, rows, contract, config)
        else:
            session = self._current(ask)
        steps = self._sessions.steps(session)
        asked = encode({"session": message}).sha256.hex()
        self._check_step(ask.step, asked, session, steps, signed=config.signs_keys)
        parts, lists = self._part(ask.step, message, session, steps)
        sent = encode(parts).sha256.hex()
        if ask.step == SHARES:
            self._check_colluders(message.devices, session, config)
        if ask.step not in steps.digests and ask.step == INPUT and config.guarantee is not None:
            self._charge(session, config.guarantee)
        self._record(steps, ask.step, asked, sent, **lists)
        return replace(answer, parts=parts, samples=1)

    def _record(self, steps: Steps, step: str, asked: str, sent: str, **lists: Any) -> None:
        """Records an answered step with its digests. Raises SumRefusedError if it was answered otherwise before."""
        if step not in steps.digests:
            self._sessions.record(steps.after(step, asked, sent, **lists))
        elif steps.digests[step] != (asked, sent):
            raise SumRefusedError("this device cannot repeat its answer to a step of the sum")

    # --- the first step: consent, noise, ledger

    def _join(
        self,
        message: SecureMessage,
        ask: Ask,
        rows: PrivateRows,
        contract: contract_pb2.Contract,
        config: SumSettings,
    ) -> SecureSession:
        """Returns the session of a sum; freezes its input if it is new."""
        from fleetdistill.secure.session import Parameters, session_id

        if len(message.nonce) != _NONCE_BYTES:
            raise WireError(f"the nonce of a secure sum has {len(message.nonce)} bytes, expected {_NONCE_BYTES}")
        parameters = Parameters.unpack(message.parameters)
        self._check_terms(parameters, rows, config)
        sid = session_id(
            contract.run, ask.round, 1, message.nonce, contract_digest(contract, config), message.parameters
        )
        session = self._sessions.open()
        if session is None or session.sid != sid:
            if self._sessions.outcome_of(sid) is not None:
                raise SumRefusedError("this sum has ended for this device")
            if session is not None and session.run == contract.run and ask.round <= session.round:
                # Only a later round says that the round of the open sum has ended without it.
                raise SumRefusedError(
                    "this device is in a sum of this round or of a later one, and joins no second one"
                )
            if config.guarantee is None:
                self._check_first(contract.run)
            else:
                self._check_budget(sid, config.guarantee)
            session = self._freeze(sid, parameters, ask.round, rows, contract.run, config)
        return session

    def _check_terms(self, parameters: Parameters, rows: PrivateRows, config: SumSettings) -> None:
        from fleetdistill.methods.classstats_secure.config import ClassStatsSecureConfig

        terms = self._terms
        expected = config.parameters(rows.classes, rows.rows.shape[1], least=parameters.least, honest=parameters.honest)
        if parameters != expected:
            raise SumRefusedError("the parameters of the sum are not those of the run")
        if parameters.least < (fewest := max(terms.min_devices, config.min_in_sum)):
            raise SumRefusedError(
                f"this device takes part in sums of at least {fewest} devices, this one may have {parameters.least}; "
                "raise min_in_sum"
            )
        if isinstance(config, ClassStatsSecureConfig):
            _check_honest(parameters, max(terms.colluders, config.colluders_of(parameters.least)))
        else:
            _check_rows(len(rows.labels), parameters)
        if reason := _keys_refused(config.keys, terms):
            raise SumRefusedError(reason)
        self._endorsing(parameters)

    def _check_colluders(self, devices: int, session: SecureSession, config: SumSettings) -> None:
        """Checks the run's number of devices that may add no noise, which depends on how many take part."""
        from fleetdistill.methods.classstats_secure.config import ClassStatsSecureConfig
        from fleetdistill.secure.session import Parameters

        parameters = Parameters.unpack(session.parameters)
        if isinstance(config, ClassStatsSecureConfig):
            _check_honest(parameters, max(self._terms.colluders, config.colluders_of(devices)))

    def _freeze(
        self, sid: bytes, parameters: Parameters, round: int, rows: PrivateRows, run: str, config: SumSettings
    ) -> SecureSession:
        """Draws the noise and stores the input, durably; it may not leave before `_charge`."""
        from fleetdistill.methods.classstats_secure.encoding import rows_in_steps
        from fleetdistill.secure.primitives import to_bytes, wrap

        steps_nf, clipped = rows_in_steps(rows.rows, parameters)
        if clipped > _MAX_CLIPPED * steps_nf.size:
            largest = 2**parameters.clip_bits
            text = f"{clipped / steps_nf.size:.1%} of the features are beyond {largest}, and count as {largest}"
            self._events.emit("features-clipped", round, f"round {round}: {text}; use an extractor with smaller ones")
        content = fingerprint(
            u.tobytes() + int(c).to_bytes(8, "little") for u, c in zip(steps_nf, rows.labels, strict=True)
        )
        width = parameters.width
        session = SecureSession(
            sid=sid,
            run=run,
            round=round,
            root=secrets.token_bytes(32),
            numbers=to_bytes(wrap(_input_of(steps_nf, rows, parameters, config), width), width),
            parameters=parameters.pack(),
            rows=content,
            has_noise=config.guarantee is not None,
            is_signed=config.signs_keys,
            began=self._now(),
        )
        self._sessions.begin(session)
        return session

    def _check_first(self, run: str) -> None:
        """Checks that no sum without noise of a run contains this device: the difference of two would be its part.

        Raises:
            SumRefusedError: One does, or may.
        """
        earlier = self._sessions.unfinished()
        may_be = (
            earlier is not None
            and earlier.run == run
            and self._sessions.steps(earlier).may_be_finished(is_signed=earlier.is_signed)
        )
        if may_be or self._sessions.is_in_sum(run):
            raise SumRefusedError(
                "this device is in a sum of this run, or may be; without noise, a second one could show its part"
            )

    def _check_budget(self, sid: bytes, wanted: Guarantee) -> None:
        """Refuses a new sum that would exceed the privacy budget; the open one stays. Raises PrivacyBudgetError."""
        if not _is_charged(ledger := PrivacyLedger(self._files), sid):
            ledger.check(wanted.mu, True, self._most(wanted))

    def _charge(self, session: SecureSession, wanted: Guarantee) -> None:
        """Records a sum in the privacy ledger, unless it is there, before the masked input leaves.

        Raises:
            PrivacyBudgetError: The sum would exceed the budget, of which another has taken a part since the first step.
        """
        ledger, most = PrivacyLedger(self._files), self._most(wanted)
        if _is_charged(ledger, session.sid):
            return
        try:
            recorded = ledger.record(
                run=session.run,
                round=session.round,
                mu=wanted.mu,
                exact=True,
                rows=session.rows,
                most=most,
                time=self._now(),
                sum=session.sid.hex(),
            )
        except PrivacyBudgetError:
            self._sessions.end(session, "no budget")
            raise
        self._events.emit_released(session.round, wanted, recorded.epsilon, most)

    def _most(self, wanted: Guarantee) -> PrivacyBudget:
        return self._budget or PrivacyBudget(wanted.epsilon, wanted.delta)

    def _endorsing(self, parameters: Parameters) -> Endorsing | None:
        return endorsing_of(parameters.keys, self._terms.signer, self._files, self._now)

    # --- later steps

    def _refine(self, answer: Answer, ask: Ask, config: SumSettings) -> Answer:
        """Returns the device's sums of the gradient under masks that only all devices of its sum can take away."""
        from fleetdistill.knowledge import HeadGradient
        from fleetdistill.methods.classstats.exchange import REFINE
        from fleetdistill.methods.classstats_secure.config import ClassStatsSummedConfig
        from fleetdistill.wire.codec import encode

        gradient = answer.parts.get("gradient")
        if not (isinstance(config, ClassStatsSummedConfig) and config.refines and isinstance(gradient, HeadGradient)):
            raise SumRefusedError("the run has no secure sums of gradients")
        session = self._current(ask)
        steps = self._sessions.steps(session)
        if not steps.gave_shares:
            raise SumRefusedError("this device has not finished the sum of its class statistics")
        label = encode({name: ask.parts[name] for name in ("head", "plan")}).sha256  # all devices must have the same
        earlier = {name: asked for name, (asked, _) in steps.digests.items() if name.startswith(REFINE)}
        step = next((name for name, asked in earlier.items() if asked == label.hex()), f"{REFINE} {len(earlier)}")
        if step not in earlier and len(earlier) == config.refine_steps:
            raise SumRefusedError(f"this device has summed gradients {len(earlier)} times, as often as the run says")
        parts = _Part(session, steps, self._device, self._endorsing).gradient(gradient, label)
        self._record(steps, step, label.hex(), encode(parts).sha256.hex())
        return replace(answer, parts=parts, samples=1)

    def _current(self, ask: Ask) -> SecureSession:
        session = self._sessions.open()
        if session is None or session.round != ask.round:
            raise SumRefusedError("this device has no open sum of this round")
        return session

    def _check_step(self, step: str, asked: str, session: SecureSession, steps: Steps, *, signed: bool) -> None:
        """Checks that a step is the next one, or the same ask again; otherwise the sum ends for this device."""
        from fleetdistill.methods.classstats_secure.exchange import CHECK, STEPS

        if step in steps.digests:
            if steps.digests[step][0] != asked:
                self._sessions.end(session, "conflict")
                text = "this sum was answered with another list"
                where = f"round {session.round}, step {step!r}"
                self._events.emit("secure-conflict", session.round, f"{where}: {text} ({_UNREVIEWED})")
                raise SumRefusedError(text)
            return
        order = [name for name in STEPS if signed or name != CHECK]
        if step not in order or order.index(step) != len(steps.digests):
            raise SumRefusedError("the steps of a sum go forward only, one by one")

    def _part(
        self, step: str, message: SecureMessage, session: SecureSession, steps: Steps
    ) -> tuple[Mapping[str, SecureMessage], Mapping[str, Any]]:
        """Returns the answer to a step, and the lists of its ask that later steps need."""
        from fleetdistill.methods.classstats_secure.exchange import CHECK, INPUT, KEYS, SHARES, UNMASK, unusable

        part = _Part(session, steps, self._device, self._endorsing)
        makers = {
            KEYS: part.keys,
            SHARES: part.shares,
            INPUT: part.masked_input,
            CHECK: part.signature,
            UNMASK: part.unmask,
        }
        try:
            return makers[step](message)
        except PeerError as error:
            raise SumRefusedError(unusable(part.device_at(error.index), str(error))) from error


def _check_honest(parameters: Parameters, colluders: int) -> None:
    if parameters.honest > parameters.least - colluders:
        raise SumRefusedError(
            f"the sum counts on the noise of {parameters.honest} of {parameters.least} devices; this device "
            f"requires that {colluders} may add none"
        )


def _check_rows(rows: int, parameters: Parameters) -> None:
    if rows > parameters.max_rows:
        raise SumRefusedError(
            f"the sum takes at most {parameters.max_rows} rows of one device; raise max_rows, or lower max_in_sum"
        )


def _check_signer(signer: Signer, device: str) -> None:
    from fleetdistill.secure.member import is_endorsed
    from fleetdistill.secure.primitives import verification_key

    if not is_endorsed(signer.roster_key, device, verification_key(signer.key), signer.endorsement):
        raise ConfigurationError(
            f"the signer's endorsement does not fit: its roster_key has not endorsed its key for device {device!r}; "
            "endorse this key under this id, with the roster whose public key the app has"
        )


def _is_charged(ledger: PrivacyLedger, sid: bytes) -> bool:
    return any(release.sum == sid.hex() for release in ledger.releases)


def _input_of(steps_nf: np.ndarray, rows: PrivateRows, parameters: Parameters, config: SumSettings) -> np.ndarray:
    """Returns the device's numbers in the sum, `[numbers]` int64: with its noise, or limited to few directions."""
    from fleetdistill.methods.classstats_secure.config import ClassStatsSummedConfig
    from fleetdistill.methods.classstats_secure.encoding import exact_numbers, limited_numbers
    from fleetdistill.methods.classstats_secure.noise import noise_vector

    if isinstance(config, ClassStatsSummedConfig):
        return limited_numbers(
            steps_nf,
            rows.labels,
            rows.classes,
            parameters.grid_bits,
            min_samples=config.min_samples,
            rank=config.rank,
            rows_per_direction=config.rows_per_direction,
        )
    return exact_numbers(steps_nf, rows.labels, rows.classes, parameters.count_bits) + noise_vector(parameters)


class _Part:
    """A device's answers in one sum, functions of its session, of the earlier lists and of one message."""

    def __init__(
        self,
        session: SecureSession,
        steps: Steps,
        device: str,
        endorsing_of_sum: Callable[[Parameters], Endorsing | None],
    ) -> None:
        from fleetdistill.secure.member import Member
        from fleetdistill.secure.primitives import from_bytes
        from fleetdistill.secure.session import Parameters

        self._session, self._steps, self._device = session, steps, device
        self._parameters = Parameters.unpack(session.parameters)
        width = self._parameters.width
        self._endorsing = endorsing_of_sum(self._parameters)
        identity = None if self._endorsing is None else self._endorsing.identity(session)
        self._member: Member = Member(
            session.root, from_bytes(session.numbers, width), session.sid, width, identity=identity
        )

    def device_at(self, index: int) -> str:
        """Returns the id of a device of the sum."""
        return self._steps.entries[index][0] if index in self._steps.entries else str(index)

    def keys(self, message: SecureMessage) -> tuple[Mapping[str, SecureMessage], Mapping[str, Any]]:
        """Step 1: public keys, the commitment and the endorsement, which a renewed certificate does not change."""
        entry, endorsement = self._member.keys_entry(self._device), self._steps.endorsement
        if self._endorsing is not None and not endorsement:
            endorsement = self._endorsing.endorsement(entry[100:132])
            # All others would refuse a wrong one, and there would be no sum.
            self._endorsing.check(self._session.run, self._device, entry[100:132], endorsement)
        return _reply("keys", entry + endorsement), {"endorsement": endorsement}

    def shares(self, message: SecureMessage) -> tuple[Mapping[str, SecureMessage], Mapping[str, Any]]:
        """Step 2: checks the keys of all devices, or of all neighbours, and seals a pair of shares for each of them."""
        from fleetdistill.secure.session import Roster, is_complete, session_threshold

        devices, parameters = message.devices, self._parameters
        self._check_count("keys", devices)
        if devices > parameters.most:
            raise SumRefusedError(f"the sum has {devices} devices, at most {parameters.most} are allowed")
        if not all(is_name(entry.device) for entry in message.entries):
            raise WireError("a device of the sum has no valid id")
        self._check_near(message)
        roster = Roster(
            self._session.sid,
            tuple(entry.device for entry in message.entries),
            tuple(entry.keys for entry in message.entries),
        )
        if is_complete(devices, parameters.degree):
            if roster.digest != message.roster:
                raise SumRefusedError("the digest of the server's list is wrong")
            if parameters.least < (needed := session_threshold(devices, 0)):
                raise SumRefusedError(
                    f"{parameters.least} of {devices} devices are enough for the sum; it must be {needed}"
                )
        elif 3 * parameters.least < 2 * devices:
            raise SumRefusedError(
                f"{parameters.least} of {devices} devices are enough for the sum; in a ring it must be two thirds"
            )
        if self._endorsing is not None:
            self._check_signed(message, self._endorsing)
        entries = {entry.index: (entry.device, entry.keys) for entry in message.entries}
        lists: dict[str, Any] = {"devices": devices, "entries": entries, "roster": message.roster}
        self._steps = replace(self._steps, **lists)
        boxes = self._member.boxes(self._index, self._others, message.roster, self._threshold)
        return _reply("boxes", *(boxes[index] for index in sorted(boxes))), lists

    def _check_near(self, message: SecureMessage) -> None:
        """Checks that a list is that of this device and its neighbours, with its own keys."""
        from fleetdistill.secure.session import neighbours

        own = [entry for entry in message.entries if entry.device == self._device]
        if [entry.keys for entry in own] != [self._member.keys_entry(self._device)]:
            raise SumRefusedError("the server's list does not have this device's own keys")
        if len(message.roster) != _DIGEST_BYTES:
            raise WireError(f"the digest of a secure sum has {len(message.roster)} bytes, expected {_DIGEST_BYTES}")
        index = own[0].index
        if index >= message.devices:
            raise WireError(f"this device has number {index} of {message.devices} devices of the sum, from 0")
        near = neighbours(self._session.sid, message.devices, self._parameters.degree)(index)
        if [entry.index for entry in message.entries] != sorted([index, *near]):
            raise WireError("the server's list is not that of this device and its neighbours, in order")

    def _check_signed(self, message: SecureMessage, endorsing: Endorsing) -> None:
        from fleetdistill.secure.member import verify_keys_entry

        for entry in message.entries:
            endorsing.check(self._session.run, entry.device, entry.keys[100:132], entry.endorsement)
            if not verify_keys_entry(entry.keys, self._session.sid, entry.device):
                raise SumRefusedError(f"device {entry.device!r} has not signed its keys")

    def masked_input(self, message: SecureMessage) -> tuple[Mapping[str, SecureMessage], Mapping[str, Any]]:
        """Step 3: opens all boxes, and masks the input for the devices that sent boxes."""
        from fleetdistill.knowledge.secure import BOX_BYTES
        from fleetdistill.methods.classstats_secure.exchange import INPUT
        from fleetdistill.secure.primitives import to_bytes

        shared = self._members(message)
        self._check_count("shares", len(shared))
        near = shared & self._steps.entries.keys()
        if self._index not in near or len(near) < self._threshold:
            raise SumRefusedError("too few devices sent shares, or this device is not among them")
        senders = sorted(near - {self._index})
        sent = message.boxes
        if sent is None or sent.dtype != np.uint8 or sent.shape != (len(senders), BOX_BYTES):
            raise WireError("the boxes for this device are not those of the devices that sent shares")
        boxes = {index: row.tobytes() for index, row in zip(senders, sent, strict=True)}
        numbers = self._member.masked_numbers(self._index, self._others, self._steps.roster, boxes)
        lists = {"boxes": boxes, "members": {**self._steps.members, INPUT: message.members}}
        return _reply("numbers", to_bytes(numbers, self._parameters.width)), lists

    def signature(self, message: SecureMessage) -> tuple[Mapping[str, SecureMessage], Mapping[str, Any]]:
        """Step 4, with signed keys: signs the list of the devices whose inputs are in the sum."""
        from fleetdistill.methods.classstats_secure.exchange import CHECK

        signed = self._member.sign(self._survivors_message(self._check_survivors(message)))
        return _reply("signature", signed), {"members": {**self._steps.members, CHECK: message.members}}

    def unmask(self, message: SecureMessage) -> tuple[Mapping[str, SecureMessage], Mapping[str, Any]]:
        """Step 5: gives one share for each device that sent boxes, never both of one device."""
        from fleetdistill.methods.classstats_secure.exchange import CHECK, UNMASK

        survivors = self._check_survivors(message)
        if self._endorsing is not None:
            if message.members != self._steps.members[CHECK]:
                raise SumRefusedError("the devices of the sum are not those that this device has signed")
            self._check_signatures(message, survivors)
        shares = self._member.unmasking_shares(
            self._index, self._others, self._steps.roster, self._threshold, dict(self._steps.boxes), survivors
        )
        lists = {"members": {**self._steps.members, UNMASK: message.members}, "gave_shares": True}
        return _reply("shares", *(shares[index] for index in sorted(shares))), lists

    def gradient(self, sent: HeadGradient, label: bytes) -> Mapping[str, SecureMessage]:
        """Returns sums of the gradient, masked for the devices of the finished sum."""
        from fleetdistill.methods.classstats_secure.encoding import gradient_numbers
        from fleetdistill.methods.classstats_secure.exchange import UNMASK
        from fleetdistill.secure.primitives import to_bytes, wrap

        width = self._parameters.width
        _check_rows(sent.rows, self._parameters)
        members = self._unpacked(self._steps.members[UNMASK])
        numbers = wrap(gradient_numbers(sent, self._parameters), width)
        masked = self._member.masked_further(self._index, self._others, members, numbers, label)
        return _reply("gradient", to_bytes(masked, width))

    def _check_survivors(self, message: SecureMessage) -> frozenset[int]:
        from fleetdistill.methods.classstats_secure.exchange import INPUT

        survivors = self._members(message)
        self._check_count("inputs", len(survivors))
        if not survivors <= self._unpacked(self._steps.members[INPUT]) or self._index not in survivors:
            raise SumRefusedError("the devices of the sum are not among those that sent shares, or this one is missing")
        return survivors

    def _check_signatures(self, message: SecureMessage, survivors: frozenset[int]) -> None:
        from fleetdistill.secure.primitives import verify_signature

        text = self._survivors_message(survivors)
        valid = {
            entry.index
            for entry in message.entries
            if entry.index in survivors
            and verify_signature(self._steps.entries[entry.index][1][100:132], text, entry.signature)
        }
        if len(valid) < self._threshold:
            raise SumRefusedError(
                f"{len(valid)} devices have signed the same list as this device, {self._threshold} are needed"
            )

    def _survivors_message(self, survivors: frozenset[int]) -> bytes:
        from fleetdistill.methods.classstats_secure.exchange import INPUT
        from fleetdistill.secure.session import survivors_message

        shared = self._unpacked(self._steps.members[INPUT])
        return survivors_message(self._session.sid, self._steps.roster, self._steps.devices, shared, survivors)

    def _members(self, message: SecureMessage) -> frozenset[int]:
        return self._unpacked(message.members)

    def _unpacked(self, members: bytes) -> frozenset[int]:
        from fleetdistill.secure.session import unpack_members

        return unpack_members(members, self._steps.devices)

    def _check_count(self, what: str, count: int) -> None:
        if count < self._parameters.least:
            raise SumRefusedError(f"only {count} devices sent {what}, the sum needs {self._parameters.least}")

    @property
    def _index(self) -> int:
        return next(index for index, (device, _) in self._steps.entries.items() if device == self._device)

    @property
    def _others(self) -> dict[int, bytes]:
        return {index: keys for index, (device, keys) in self._steps.entries.items() if device != self._device}

    @property
    def _threshold(self) -> int:
        from fleetdistill.secure.session import session_threshold

        return session_threshold(self._steps.devices, self._parameters.degree)


def _reply(name: str, *rows: bytes) -> Mapping[str, SecureMessage]:
    """Returns an answer with one tensor, of one axis for a single row of keys, numbers or a signature, else of two."""
    from fleetdistill.knowledge import SecureMessage

    array = np.frombuffer(b"".join(rows), np.uint8)
    shaped = array.reshape(len(rows), -1) if name in ("boxes", "shares") else array
    fields: dict[str, Any] = {name: shaped}
    return {name: SecureMessage(**fields)}


def contract_digest(contract: contract_pb2.Contract, config: SumSettings) -> bytes:
    """Returns the digest of what the summed numbers mean: classes, inputs, settings and extractor."""
    from fleetdistill.methods.classstats_secure.exchange import statistics_digest

    return statistics_digest(
        list(contract.classes),
        list(contract.input_shape),
        config,
        extractor=contract.extractor_fingerprint,
        weights=contract.initial_weights,
        file=contract.extractor_file,
    )
