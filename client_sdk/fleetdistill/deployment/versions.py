"""The versions of the delivered model in a state directory.

    deployed.json          the version in use: number, round, variant, accuracy, and the names of its ONNX files
    versions/deployed.json a copy, from which a damaged or missing deployed.json is restored
    model.onnx.due         a version whose model is delivered, or will be after a restart, and that is not recorded yet
    roll-back.due          number of the version that the device returns to in its next turn
    pinned                 number of the version that the app keeps until `Device.roll_forward`
    versions/NUMBER/       an earlier version: delivered.safetensors, ONNX files and version.json, written last

A kept version consists of hard links where the file system supports them: the device replaces files and never writes
into them. If the file of the variant in use refers to shared weights, it stands for `model.onnx` too. Numbers only
increase; after a roll-back the next delivery has a new number. While a version is pinned, a delivery is only stored,
with its model alone; the newest one is used after `Device.roll_forward`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
from dataclasses import dataclass, fields, replace
from pathlib import Path

from fleetdistill.deployment.external_weights import whole
from fleetdistill.errors import ModelError, StateError
from fleetdistill.state import failpoints
from fleetdistill.state.disk import disk_errors
from fleetdistill.state.durable import make_directory, rename_durably, sync_directory
from fleetdistill.state.files import Files
from fleetdistill.state.format import json_object, sealed_json
from fleetdistill.state.state_check import STATES, damaged_states
from fleetdistill.state.weights import with_weights

__all__ = ["Version", "Versions", "link_file"]

MODEL = "delivered.safetensors"
"""File with the app's model in a state directory."""
MODEL_FILE = "model.onnx"
IN_USE = "deployed.json"
"""File that describes the version in use."""
NO_VERSION = "it does not describe a version"
"""What is wrong with a damaged `deployed.json`."""
_DUE, _ROLL_BACK, _PINNED = "model.onnx.due", "roll-back.due", "pinned"
_FOLDER, _NOTE = "versions", "version.json"
_COPY = f"{_FOLDER}/{IN_USE}"


@dataclass(frozen=True)
class Version:
    """A delivered model.

    Attributes:
        number: Number of the version, from 1.
        round: Round that delivered it; 0 if unknown.
        variant: Name of the variant in use; empty if the method has a single one.
        accuracy: Accuracy on the app's validation data at the delivery, in [0, 1]; None without such data.
        files: Names of its ONNX files.
        last: Highest number so far.
        sha256: Digest of a kept version's `delivered.safetensors`, in hexadecimal.
        held: Whether it was stored while another version was pinned, and has not been in use.
    """

    number: int
    round: int = 0
    variant: str = ""
    accuracy: float | None = None
    files: tuple[str, ...] = ()
    last: int = 0
    sha256: str = ""
    held: bool = False


class Versions:
    """Reads and writes the versions of one state directory.

    Args:
        files: Files of the state directory.
        keep: Number of versions to keep, with the one in use, at least 1.
    """

    def __init__(self, files: Files, keep: int) -> None:
        self._files, self._keep = files, keep
        self._directory = files.directory
        self._restore_record()

    def _restore_record(self) -> None:
        """Puts a damaged record of the version in use aside and restores it from its copy."""
        data, copy = self._files.load(IN_USE), self._files.load(_COPY)
        if (data is None and copy is None) or version_of(data) is not None:
            return
        version = version_of(copy)
        effect = "the numbers of versions start again"
        if version is not None:
            effect = f"version {version.number} is restored from a copy"
        if data is not None:
            self._files.set_aside(IN_USE, NO_VERSION, effect)
        if version is not None:
            self._files.save(IN_USE, _pack(version))

    # --- the version in use

    def in_use(self) -> Version | None:
        """Returns the version in use, or None before the first delivery."""
        return version_of(self._files.load(IN_USE)) or version_of(self._files.load(_COPY))

    def due(self) -> Version | None:
        """Returns the delivered version that is not recorded yet, or None."""
        data = self._files.load(_DUE)
        if data is None:
            return None
        return version_of(data) or self._next(0)

    def announce(self, number: int, variant: str, accuracy: float | None) -> None:
        """Keeps the version in use, then stores that the next one is about to be delivered.

        Args:
            number: Round of the delivery.
            variant: Name of the variant in use; empty for a single one.
            accuracy: Accuracy on the validation data, or None.
        """
        if self._keep > 1:
            self._keep_version_in_use()
        failpoints.hit("device.deploy.after-keep")
        self._files.save(_DUE, _pack(replace(self._next(number), variant=variant, accuracy=accuracy)))

    def mark_due(self) -> None:
        """Stores that the version in use has no ONNX file yet."""
        if (version := self.in_use()) is not None:
            self._files.save(_DUE, _pack(version))

    def _next(self, number: int) -> Version:
        in_use = self.in_use()
        last = max([0 if in_use is None else in_use.last, *(int(folder.name) for folder in self._folders())]) + 1
        return Version(last, number, last=last)

    def record(self, version: Version) -> None:
        """Records a version as the one in use, and deletes the versions that are no longer kept."""
        failpoints.hit("device.deploy.before-record")
        self._save_in_use(version)
        self._files.remove(_DUE)
        self._prune()
        failpoints.hit("device.deploy.after-record")

    def _save_in_use(self, version: Version) -> None:
        if self._files.has_directory:
            with disk_errors(self._directory):
                make_directory(self._directory / _FOLDER)
        packed = _pack(version)
        for name in (_COPY, IN_USE):
            self._files.save(name, packed)

    # --- earlier versions

    def earlier(self) -> list[Version]:
        """Returns the kept versions before the one in use, the newest first."""
        in_use = self.in_use()
        kept = [item for item in self._kept() if in_use is not None and item.number < in_use.number and not item.held]
        return sorted(kept, key=lambda one: -one.number)

    def previous(self) -> Version | None:
        """Returns the newest kept version before the delivered one, also while that is not recorded yet, or None."""
        delivered = self.due() or self.in_use()
        kept = [
            item for item in self._kept() if delivered is not None and item.number < delivered.number and not item.held
        ]
        return max(kept, key=lambda one: one.number, default=None)

    def _kept(self) -> list[Version]:
        result = [version_of(self._load(folder)) for folder in self._folders()]
        return [item for item in result if item is not None]

    def model_of(self, version: Version) -> bytes:
        """Returns `delivered.safetensors` of a kept version. Raises StateError if it is damaged."""
        with disk_errors(self._directory):
            data = (self._folder(version.number) / MODEL).read_bytes()
        if hashlib.sha256(data).hexdigest() != version.sha256:
            raise StateError(f"version {version.number} of the model is damaged; the device keeps the model in use")
        return with_weights(self._directory, data)

    def _keep_version_in_use(self) -> None:
        version = self.in_use()
        if version is None:
            return
        kept = version_of(self._load(self._folder(version.number)))
        if kept is not None and not kept.held:
            return
        folder = self._folder(version.number)
        with disk_errors(self._directory):
            self._delete(folder)  # possibly left incomplete by a crash
            make_directory(folder)
            present = tuple(name for name in version.files if (self._directory / name).exists())
            for name in (MODEL, *present):
                if name != MODEL_FILE or not self._can_be_made(version):
                    link_file(self._directory / name, folder / name)
            sync_directory(folder)
            digest = hashlib.sha256((folder / MODEL).read_bytes()).hexdigest()
        Files(folder).save(_NOTE, _pack(replace(version, files=present, sha256=digest)))

    def _can_be_made(self, version: Version) -> bool:
        """Returns whether `model.onnx` is the variant in use with weights that the directory has anyway."""
        variant, model = self._directory / f"{version.variant}.onnx", self._directory / MODEL_FILE
        if not variant.exists() or variant.samefile(model):
            return False
        with contextlib.suppress(ModelError):
            return whole(variant.read_bytes(), self._directory) == model.read_bytes()
        return False

    def _prune(self) -> None:
        requested = self.requested()
        kept = {item.number for item in self.earlier()[: self._keep - 1]}
        if (held := self.held()) is not None:
            kept.add(held.number)
        for folder in self._folders():
            number = int(folder.name)
            if number not in kept and (requested is None or number != requested.number):
                with disk_errors(self._directory):
                    self._delete(folder)

    def _delete(self, folder: Path) -> None:
        (folder / _NOTE).unlink(missing_ok=True)  # first, so that an incomplete folder is not a version
        shutil.rmtree(folder, ignore_errors=True)

    def _folders(self) -> list[Path]:
        if not self._files.has_directory:
            return []
        folder = self._directory / _FOLDER
        return [item for item in folder.iterdir() if item.name.isdigit()] if folder.is_dir() else []

    def _folder(self, number: int) -> Path:
        return self._directory / _FOLDER / str(number)

    def _load(self, folder: Path) -> bytes | None:
        return Files(folder).load(_NOTE)

    # --- deliveries while a version is pinned

    def unpin(self) -> None:
        """Ends the effect of a pinned request to roll back."""
        self._files.remove(_PINNED)

    def is_pinned(self) -> bool:
        """Returns whether the app keeps its version."""
        return self._files.load(_PINNED) is not None

    def hold(self, model: Path, number: int, variant: str, accuracy: float | None) -> None:
        """Stores a delivery that is not used yet, instead of an earlier one; repeatable after a crash.

        Args:
            model: The delivered model.
            number, variant, accuracy: As in `announce`.
        """
        with disk_errors(self._directory):
            digest = hashlib.sha256(model.read_bytes()).hexdigest()
        newest = self.held()
        if newest is not None and (newest.round, newest.sha256) == (number, digest):
            return
        version = replace(self._next(number), variant=variant, accuracy=accuracy, sha256=digest, held=True)
        folder = self._folder(version.number)
        with disk_errors(self._directory):
            make_directory(folder)
            link_file(model, folder / MODEL)
            sync_directory(folder)
        Files(folder).save(_NOTE, _pack(version))
        self._prune()

    def hold_in_use(self) -> None:
        """Keeps the version in use as one that is not used, before a return to an earlier one; repeatable as `hold`.

        Does nothing if its model is missing or damaged.
        """
        version = self.in_use()
        if version is None or MODEL in missing_states(self._files) | damaged_states(self._files):
            return
        folder = self._folder(version.number)
        if version_of(self._load(folder)) is None:
            self._keep_version_in_use()
        kept = version_of(self._load(folder))
        assert kept is not None
        Files(folder).save(_NOTE, _pack(replace(kept, held=True)))

    def held(self) -> Version | None:
        """Returns the newest version that was stored while another was pinned, until `end_holding`; None without."""
        in_use = self.in_use()
        first = 0 if in_use is None else in_use.number
        held = (item for item in self._kept() if item.held and item.number >= first)
        return max(held, key=lambda one: one.number, default=None)

    def use_held(self, version: Version) -> None:
        """Makes a held version the one in use; repeatable after a crash at any point."""
        in_use = self.in_use()
        if self._keep > 1 and in_use is not None and in_use.number != version.number:
            self._keep_version_in_use()
        self.roll_back(version)

    def end_holding(self, version: Version) -> None:
        """Deletes the second copy of a version that is in use now, after the app has been notified."""
        with disk_errors(self._directory):
            self._delete(self._folder(version.number))
        self._prune()

    # --- roll-back

    def request_roll_back(self, version: Version, *, pinned: bool) -> None:
        """Stores that the device returns to a kept version in its next turn, and if `pinned` keeps it until `unpin`.

        Raises:
            StateError: The version is damaged.
        """
        self.model_of(version)
        if pinned:
            self._files.save(_PINNED, str(version.number).encode())
        self._files.save(_ROLL_BACK, str(version.number).encode())
        failpoints.hit("device.roll-back.after-request")

    def requested(self) -> Version | None:
        """Returns the version that the device is to return to, or None."""
        number = self._files.load(_ROLL_BACK)
        return None if number is None else version_of(self._load(self._directory / _FOLDER / number.decode()))

    def roll_back(self, version: Version) -> None:
        """Makes a kept version the one in use; repeatable after a crash at any point."""
        in_use = self.in_use()
        folder, files = self._folder(version.number), version.files
        with disk_errors(self._directory):
            for name in (*version.files, MODEL):
                try:
                    self._restore(folder / name, version)
                except ModelError:  # the weights are missing; the file is exported again
                    files = ()
                failpoints.hit("device.roll-back.after-file")
        last = version.last if in_use is None else in_use.last
        self._save_in_use(replace(version, files=files, last=max(last, version.last), sha256="", held=False))
        failpoints.hit("device.roll-back.after-record")

    def _restore(self, kept: Path, version: Version) -> None:
        """Replaces a file by a kept one, or `model.onnx` by one that is made of a kept variant."""
        target = self._directory / kept.name
        temporary = target.with_name(f"{target.name}.new")
        temporary.unlink(missing_ok=True)
        if kept.name == MODEL_FILE and not kept.exists():
            variant = kept.with_name(f"{version.variant}.onnx")
            temporary.write_bytes(whole(variant.read_bytes(), self._directory))
        else:
            link_file(kept, temporary)
        rename_durably(temporary, target)
        temporary.unlink(missing_ok=True)  # a rename to another name of the same file does nothing

    def end_roll_back(self) -> None:
        """Removes the request, after the app has been notified."""
        self._files.remove(_ROLL_BACK)
        self._prune()


def _pack(version: Version) -> bytes:
    return sealed_json(vars(version))  # `asdict` would copy each value


def missing_states(files: Files) -> dict[str, str]:
    """Returns the state files that are missing although a model was delivered, with what is wrong."""
    if all(version_of(files.load(name)) is None for name in (IN_USE, _COPY)):
        return {}
    return {name: "it is missing, and a model was delivered" for name in STATES if files.load(name) is None}


@functools.lru_cache(maxsize=32)
def version_of(data: bytes | None) -> Version | None:
    """Returns the version that a file describes, or None if the file is missing or damaged."""
    if data is None:
        return None
    with contextlib.suppress(TypeError, KeyError, StateError):
        result = json_object(Path(), data)
        known = {field.name for field in fields(Version)}
        values = {name: value for name, value in result.items() if name in known}
        return Version(**{**values, "files": tuple(values["files"])})
    return None


def link_file(source: Path, target: Path) -> None:
    """Creates a second name for a file, or a copy where hard links are not supported."""
    try:
        os.link(source, target)
    except OSError:
        temporary = target.with_name(f"{target.name}.new")
        shutil.copyfile(source, temporary)
        rename_durably(temporary, target)
