"""Reads a state directory without changing or locking it, also while its device runs, and if it is damaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from fleetdistill.deployment.external_weights import whole
from fleetdistill.deployment.stamp import check_stamp
from fleetdistill.deployment.versions import IN_USE, NO_VERSION, missing_states, version_of
from fleetdistill.device.usage import PACE, USAGE
from fleetdistill.errors import DamagedStateError, ModelError, StateError
from fleetdistill.link.credentials import is_enrolled
from fleetdistill.state.files import Files
from fleetdistill.state.format import damaged_error, json_object
from fleetdistill.state.outbox import Outbox
from fleetdistill.state.own_files import DEVICE, ERASING
from fleetdistill.state.privacy_ledger import PrivacyLedger
from fleetdistill.state.sample_ids import SampleIds
from fleetdistill.state.saved_profile import load_contract, load_profile
from fleetdistill.state.sent_ledger import LEDGER, Ledger, read_ledger
from fleetdistill.state.state_check import damaged_states

T = TypeVar("T")


@dataclass
class Inspection:
    """What a state directory contains.

    Attributes:
        directory: Path of the directory.
        device, run: Names of the device and its run; empty if they are unknown.
        sdk: Version of the SDK that wrote the directory.
        enrolled: Whether the device has a key for TLS.
        model: Name of the model at the last check-in.
        parameters: Number of its trainable parameters.
        samples: Number of training samples that the device declared at the last check-in.
        data_version: Data version of the last check-in in hexadecimal; empty if there was none.
        allowed: Columns that could leave the device at the last check-in, also if the server rejected it.
        waiting: Round, step number and attempt of an answer without a receipt; None without one.
        last_round: Round of the last answer with an outcome; 0 before the first.
        last_receipt: Id of its receipt; empty if it was refused.
        rounds: Number of rounds with a receipt among the ledger's entries.
        ledger: What the device has sent.
        releases: Number of private releases.
        epsilon: Epsilon of all private releases together; 0 without any.
        files: Size of each file of the directory in bytes, by path within it.
        set_aside: Damaged files that the device has put aside.
        erasing: Whether an erasure has begun, which the next start completes.
        damage: What is damaged, one sentence each.
    """

    directory: str
    device: str = ""
    run: str = ""
    sdk: str = ""
    enrolled: bool = False
    model: str = ""
    parameters: int = 0
    samples: int = 0
    data_version: str = ""
    allowed: Sequence[str] = ()
    waiting: tuple[int, int, int] | None = None
    last_round: int = 0
    last_receipt: str = ""
    rounds: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    releases: int = 0
    epsilon: float = 0.0
    files: dict[str, int] = field(default_factory=dict)
    set_aside: Sequence[str] = ()
    erasing: bool = False
    damage: list[str] = field(default_factory=list)


def inspect(state_dir: str | Path) -> Inspection:
    """Reads a state directory without changing it. Works while a device uses it, and reports damage.

    Raises:
        StateError: The directory does not exist, or contains no device.
    """
    directory = Path(state_dir)
    result = Inspection(str(directory), erasing=(directory / ERASING).exists(), enrolled=is_enrolled(directory))
    result.files = _sizes(directory)
    if not result.files.keys() & {"device.json", LEDGER, "state.safetensors", ERASING}:
        raise StateError(f"{directory} is not the state directory of a device; it has no device.json")
    result.set_aside = [name for name in result.files if ".damaged-" in name]
    _Reader(Files(directory), result).read()
    return result


class _Reader:
    """Fills an inspection; each part is read by itself, so that one damaged file does not hide the others."""

    def __init__(self, files: Files, found: Inspection) -> None:
        self._files, self._found = files, found

    def read(self) -> None:
        """Reads all parts."""
        for part in (
            self._identity,
            self._profile,
            self._contract,
            self._answers,
            self._ledger,
            self._privacy,
            self._sample_ids,
        ):
            try:
                part()
            except StateError as error:
                self._found.damage.append(str(error))
        states = damaged_states(self._files) | missing_states(self._files)
        for name, reason in (states | self._damaged_model() | self._damaged_notes()).items():
            self._found.damage.append(f"{self._files.directory / name} is damaged: {reason}")

    def _identity(self) -> None:
        path, data = self._files.directory / DEVICE, self._files.load(DEVICE)
        if data is None:
            raise StateError(f"{path} is missing")
        saved = json_object(path, data)
        self._found.device, self._found.run = str(saved.get("device", "")), str(saved.get("run", ""))
        self._found.sdk = str(saved.get("sdk", ""))

    def _contract(self) -> None:
        load_contract(self._files)  # for damage only

    def _profile(self) -> None:
        profile = load_profile(self._files)
        if profile is None:
            return
        self._found.model, self._found.parameters = profile.model_name, profile.parameters
        self._found.samples, self._found.allowed = profile.samples, list(profile.allowed_columns)
        self._found.data_version = profile.data_version.hex()

    def _answers(self) -> None:
        outbox = Outbox(self._files, 0)
        last = outbox.last_outcome()
        if last is not None:
            self._found.last_round, self._found.last_receipt = last.pending.round, last.receipt
        waiting = outbox.stored()
        self._found.waiting = None if waiting is None else waiting.name

    def _ledger(self) -> None:
        ledger = self._found.ledger = read_ledger(self._files.load(LEDGER) or b"")
        self._found.rounds = len({entry.round for entry in ledger.entries if entry.receipt})
        if ledger.damaged:
            raise damaged_error(self._files.directory / LEDGER, f"{ledger.damaged} unreadable lines")

    def _privacy(self) -> None:
        releases = PrivacyLedger(self._files).releases
        self._found.releases = len(releases)
        self._found.epsilon = releases[-1].epsilon if releases else 0.0

    def _sample_ids(self) -> None:
        SampleIds(self._files).check()

    def _damaged_model(self) -> dict[str, str]:
        """Returns a damaged record of the version in use, and the damaged ones of the ONNX files that it names."""
        record = self._files.load(IN_USE)
        if record is None:
            return {}
        version = version_of(record)
        names = version.files if version is not None else (name for name in self._found.files if name == "model.onnx")
        result = {name: _damage_of_onnx(self._files.load(name), self._files.directory) for name in names}
        result[IN_USE] = "" if version is not None else NO_VERSION
        return {name: reason for name, reason in result.items() if reason}

    def _damaged_notes(self) -> dict[str, str]:
        result = {}
        for name in (USAGE, PACE):
            try:
                json_object(Path(name), self._files.load(name) or b"{}")
            except DamagedStateError as error:
                result[name] = error.reason
        return result


def _damage_of_onnx(data: bytes | None, directory: Path) -> str:
    if data is None:
        return "the file is missing"
    try:
        check_stamp(whole(data, directory))
    except ModelError as error:
        return str(error).removeprefix("the file is incomplete or damaged: ")
    return ""


def _sizes(directory: Path) -> dict[str, int]:
    """Returns the size of each file; one that the running device deletes in the meantime is left out."""
    result: dict[str, int] = {}
    for path in sorted(directory.rglob("*")) if directory.is_dir() else ():
        try:
            if path.is_file():
                result[path.relative_to(directory).as_posix()] = path.stat().st_size
        except OSError:
            continue
    return result
