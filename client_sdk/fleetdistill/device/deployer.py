"""Keeps versions of the delivered model, exports them, and returns to an earlier one."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fleetdistill.control_flow import CONTROL_FLOW
from fleetdistill.deployment.external_weights import is_complete, referring, whole
from fleetdistill.deployment.settings import Deployment
from fleetdistill.deployment.stamp import stamp
from fleetdistill.deployment.versions import MODEL_FILE, Version, Versions, link_file
from fleetdistill.device.app_models import Predictions
from fleetdistill.device.backend import Backend
from fleetdistill.device.parts import DeviceParts
from fleetdistill.errors import (
    ExportError,
    LinkError,
    ModelError,
    NoRoomError,
    RefusedError,
    StateError,
    WorkInterrupted,
)
from fleetdistill.interruption import check_may_continue
from fleetdistill.replacement import Replacement
from fleetdistill.state.disk import disk_errors
from fleetdistill.state.durable import rename_durably
from fleetdistill.state.weights import shared_weights

if TYPE_CHECKING:
    from fleetdistill.compute.base import Compute
    from fleetdistill.training.onnx_file import OnnxReport

logger = logging.getLogger(__name__)

_STAGING = "export.new"
_RETRY_SECONDS = 60.0
"""Seconds after which an export is tried again for which the disk was full or failed."""


class Deployer:
    """Numbers, keeps and exports the delivered models of one device.

    Args:
        parts: What the parts of the open device share.
        backend: Keeps the compute backend.
        ready_compute: Returns the compute backend with the device's state.
        predictions: Predictions of the app, which use the model in use.
        deployment: Settings of the app.
    """

    def __init__(
        self,
        parts: DeviceParts,
        backend: Backend,
        ready_compute: Callable[[], Compute],
        predictions: Predictions,
        deployment: Deployment,
    ) -> None:
        self._parts = parts
        self._events = parts.events
        self._backend = backend
        self._ready_compute = ready_compute
        self._predictions = predictions
        self._deployment = deployment
        self._directory = parts.storage.directory
        self.versions = Versions(parts.storage, deployment.keep_versions)
        unsettled = parts.storage.outbox.pending() is not None  # then a version that is due is not delivered yet
        self._delivered = None if unsettled else self.versions.due()  # in use, but not recorded yet
        self._unchecked = True  # whether the files of an earlier process can be damaged
        self._export_at = 0.0  # when an export that failed is tried again, on the app's clock
        self._finished: int | None = None  # number of the version that `_export_once` has exported, or could not
        self._not_recorded = 0  # number of the version for which the disk was full; tried again at the next delivery
        self._measured: dict[int, float] = {}  # accuracy of versions on the current validation data, by number
        self._measured_by: Compute | None = None
        self._may_withdraw = False  # a request to roll back of this process, which no turn has begun to carry out

    def announce(self, number: int, replacement: Replacement) -> None:
        """Stores before the commit of an answer that it delivers a version, so that a crash leaves no outdated file."""
        unrecorded = self.versions.due()
        if unrecorded is not None and unrecorded.round != number:  # the disk was full
            self._record(unrecorded)
        self.versions.announce(number, replacement.variant, replacement.accuracy)

    @property
    def version(self) -> int:
        """Number of the version in use, also before it is recorded; 0 before the first delivery."""
        version = self._delivered or self.versions.in_use()
        return 0 if version is None else version.number

    def hold(self, number: int, replacement: Replacement) -> None:
        """Stores before the commit of an answer the model that it delivers while the app keeps another version."""
        if replacement.pinned:
            model = self._parts.storage.outbox.delivered_file
            self.versions.hold(model, number, replacement.variant, replacement.accuracy)

    def deliver(self, compute: Compute, replacement: Replacement) -> None:
        """Replaces or keeps the app's model after the commit; a model that cannot be copied is read from the disk."""
        with self._reports(self._events.emit_not_copied, self.versions.due() or Version(0)):
            try:
                compute.deliver(replacement)
            except BaseException:
                compute.forget_state()
                raise

    def use_delivered(self) -> None:
        """Makes the announced version and its model the ones in use, just before the event `delivered`."""
        self._delivered = self.versions.due()
        self._not_recorded = 0
        self._renew_predictions(self._delivered or Version(0))

    def _renew_predictions(self, version: Version) -> None:
        with self._reports(self._events.emit_not_copied, version):
            self._predictions.renew()

    @contextmanager
    def _reports(self, emit: Callable[[Version, BaseException], None], version: Version) -> Iterator[None]:
        """Turns a failure in the block into an event: what the app gets must not end its run."""
        try:
            yield
        except (WorkInterrupted, LinkError, RefusedError):
            raise  # the next turn does the same again
        except (Exception, *CONTROL_FLOW) as error:
            emit(version, error)

    def settle(self) -> None:
        """Exports and records a delivered version, carries out a roll-back or its end, exports what is missing."""
        for settle in (self._settle_due, self._roll_back, self._use_held, self._mark_missing_files, self._settle_due):
            with self._survives_full_disk():
                settle()

    def _mark_missing_files(self) -> None:
        """Lets the version in use be exported again if a file is missing or damaged, or its export has failed."""
        version = self.versions.in_use()
        if self._deployment.export != "round" or version is None or self.versions.due() is not None:
            return
        if self._parts.clock.now() >= self._export_at and not self._has_files(version):
            self.versions.mark_due()

    def _has_files(self, version: Version) -> bool:
        paths = [self._directory / name for name in version.files]
        if not paths or not all(path.exists() for path in paths):
            return False
        if self._unchecked:
            self._unchecked = False
            return all(map(is_complete, paths))
        return True

    def replace_requested(self) -> None:
        """Carries out a requested roll-back or its end, without server and data; `settle` exports what it lacks."""
        if self.versions.due() is None:  # else a delivery is settled first
            for carry_out in (self._roll_back, self._use_held):
                with self._survives_full_disk():
                    carry_out()

    @contextmanager
    def _survives_full_disk(self) -> Iterator[None]:
        """Turns a full disk in the block into an event, once for each version."""
        try:
            yield
        except NoRoomError as full:
            version = self.versions.due() or self.versions.requested() or self.versions.held() or Version(0)
            if version.number != self._not_recorded:
                self._events.emit_not_recorded(version, full)
            self._not_recorded = version.number

    def _settle_due(self) -> None:
        version = self.versions.due()
        if version is None or version.number == self._not_recorded:
            return
        files = self.export(version) if self._deployment.export == "round" else ()
        self._record(replace(version, files=files))

    def _record(self, version: Version) -> None:
        with self._parts.lock.held():
            self.versions.record(version)
            self._delivered = None

    def finish(self) -> None:
        """Exports the model in use at the end of the run, with `Deployment(export="finish")`; once for each version."""
        if self._deployment.export == "finish":
            self._export_once()

    def keep_own(self) -> None:
        """Exports the app's own model if the app keeps it instead of a first delivery; once in a process."""
        if self._deployment.export == "round" and self.versions.in_use() is None:
            self._export_once()

    def _export_once(self) -> None:
        version = self.versions.in_use() or Version(0)
        waits = self._parts.clock.now() < self._export_at < math.inf
        if version.number == self._finished or waits:
            return
        files = self.export(version)
        if not 0 < self._export_at < math.inf:  # else the disk was full
            self._finished = version.number
        if version.number:
            with self._survives_full_disk():
                self._record(replace(version, files=files))

    # --- export

    def export(self, version: Version) -> tuple[str, ...]:
        """Exports the model in use; returns the names of the files that it has replaced, none if the export failed.

        All files are complete before the first one is replaced.
        """
        check_may_continue()  # an export cannot be interrupted
        compute = self._ready_compute()
        self._export_at = math.inf  # if it fails, the next process tries again
        folder = self._directory / _STAGING
        made: tuple[str, ...] = ()
        with self._reports(self._events.emit_not_exported, version):
            try:
                with disk_errors(self._directory):
                    shutil.rmtree(folder, ignore_errors=True)
                    folder.mkdir(parents=True)  # a simulated device has no state directory yet
                report = compute.export(folder / MODEL_FILE, version.round)
                made = self._deploy(compute, report, folder, version)
                if made:
                    self._export_at = 0.0
            except (OSError, NoRoomError):
                self._export_at = self._parts.clock.now() + _RETRY_SECONDS
                raise
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        return made

    def _deploy(self, compute: Compute, report: OnnxReport, folder: Path, version: Version) -> tuple[str, ...]:
        made, difference = self._complete_all(folder, compute, version)
        limit = self._deployment.max_bytes
        size = max((folder / name).stat().st_size for name in made)
        if limit is not None and size > limit:
            self._report_too_large(version, size, limit)
            return ()
        with disk_errors(self._directory):
            self._share_weights(compute, [folder / name for name in made if name != MODEL_FILE])
            for name in made:
                rename_durably(folder / name, self._directory / name)
        path = self._directory / MODEL_FILE
        difference += report.max_difference  # int8 to float to the model
        report = replace(report, path=path, bytes=path.stat().st_size, max_difference=difference)
        self._events.emit_exported(report, version)
        for name, error in report.failures.items():
            self._events.emit_variant_not_exported(name, version, error)
        return made

    def _share_weights(self, compute: Compute, variants: Sequence[Path]) -> None:
        """Lets the variants' files refer to weights that the directory has anyway; `model.onnx` stays whole."""
        with shared_weights(self._directory, compute.contract.extractor_file) as shared:
            for path in variants:
                data = path.read_bytes()
                rest = referring(data, shared)
                if len(rest) < len(data) and whole(rest, self._directory) == data:
                    path.unlink()  # `model.onnx` may be a second name of it
                    path.write_bytes(rest)

    def _complete_all(self, folder: Path, compute: Compute, version: Version) -> tuple[tuple[str, ...], float]:
        """Completes all files in a folder.

        With several variants `model.onnx` is a copy of one of them, and is not quantised twice.

        Returns:
            The names of the files, `model.onnx` last, and the largest absolute difference between logits of an int8
            file and of its float file; 0 without int8.
        """
        model = folder / MODEL_FILE
        in_use = model.read_bytes()
        variants = sorted(path for path in folder.glob("*.onnx") if path != model)
        same = [path for path in variants if path.read_bytes() == in_use]
        differences = [self._complete(path, compute, version) for path in variants or [model]]
        if same:
            model.unlink()
            link_file(same[0], model)
        elif variants:
            differences.append(self._complete(model, compute, version))
        return (*(path.name for path in variants), MODEL_FILE), max(differences)

    def _complete(self, path: Path, compute: Compute, version: Version) -> float:
        """Quantises a file if the app wants it, adds version and digest; returns the difference of the int8 file."""
        from fleetdistill.training.onnx_file import doing

        metadata = {"version": str(version.number)}
        difference = None
        if self._deployment.quantize is not None:
            difference = self._quantize(path, self._deployment.quantize, compute, version)
        if difference is not None:
            metadata["quantized"] = str(self._deployment.quantize)
        with doing(f"writing {path.name}"):
            path.write_bytes(stamp(path.read_bytes(), metadata))
        return difference or 0.0

    def _quantize(self, path: Path, how: str, compute: Compute, version: Version) -> float | None:
        """Replaces a float file by its int8 file if that is good enough; returns their difference, else None."""
        from fleetdistill.deployment.quantization import quantize

        quantized = path.with_suffix(".int8")
        try:
            check = quantize(path, quantized, how, compute.check_data())
        except ExportError as error:
            self._report_float(path, version, str(error), {})
            return None
        limit = self._deployment.max_quantization_drop
        if check.drop <= limit:
            quantized.replace(path)
            return check.difference
        reason = (
            f"{check.measured} of the int8 file is {check.quantized:.3f}, of the float file {check.full:.3f}; "
            f"max_quantization_drop is {limit:g}"
        )
        values = {check.measured: check.full, "quantized": check.quantized, "max_quantization_drop": limit}
        self._report_float(path, version, reason, values)
        return None

    def _report_float(self, path: Path, version: Version, reason: str, values: dict[str, float]) -> None:
        text = f"{path.name} is exported as a float file: {reason}"
        self._events.emit("not-quantized", version.round, text, {"version": version.number, **values})

    def _report_too_large(self, version: Version, size: int, limit: int) -> None:
        text = f"the exported model is {size} bytes, the limit is {limit}; the previous file remains"
        values = {"bytes": size, "max_bytes": limit, "version": version.number}
        self._events.emit("too-large", version.round, text, values)

    # --- roll-back

    def request_roll_back(self) -> int:
        """Stores that the device returns to the previous version; returns its number.

        Raises:
            StateError: There is no earlier version, or it is damaged.
        """
        previous = self.versions.previous()
        if previous is None and not self.version:
            raise StateError(f"no model was delivered yet to {self._directory}, so there is no version to return to")
        if previous is None:
            text = f"{self._directory} has no earlier version of the model than version {self.version}, which is in use"
            kept = f"the device keeps {self._deployment.keep_versions}: pass a larger Deployment(keep_versions=...) to "
            kept += "keep more of those to come"
            raise StateError(f"{text}; {kept if self.version > 1 else 'it is the first that was delivered'}")
        self.versions.request_roll_back(previous, pinned=True)
        self._may_withdraw = True
        return previous.number

    def roll_forward(self) -> int:
        """Stores that the app takes deliveries again; returns the number of the version that it uses then.

        Raises:
            StateError: No version is held by `request_roll_back`.
        """
        if not self.versions.is_pinned():
            raise StateError(
                f"the model in {self._directory} was not rolled back, so there is nothing to roll forward to; the app "
                "uses each delivery already"
            )
        self.versions.unpin()
        if self._may_withdraw:
            self._may_withdraw = False
            self.versions.end_roll_back()
        version = self.versions.held() or self.versions.requested()
        return self.version if version is None else version.number

    def check_accuracy(self, replacement: Replacement) -> None:
        """Returns to a kept version if the model in use is worse on the validation data by more than the limit.

        A compute backend measures each kept version once: an accuracy from before a restart may be that of other data.
        """
        accuracy = replacement.accuracy if replacement.replaced else replacement.accuracy_in_use
        earlier, in_use = self.versions.earlier(), self.versions.in_use()
        if accuracy is None or in_use is None or self.versions.is_pinned():
            return
        if self._backend.compute is not self._measured_by:
            self._measured = {}
            self._measured_by = self._backend.compute
        self._measured[in_use.number] = accuracy
        best = max(earlier, key=self._accuracy_of, default=None)
        if best is not None and self._accuracy_of(best) > accuracy + self._deployment.max_accuracy_drop:
            with self._survives_full_disk():
                self.versions.request_roll_back(best, pinned=False)
                self._roll_back()
                self._settle_due()

    def _accuracy_of(self, version: Version) -> float:
        """Returns the accuracy of a kept version on the validation data; -1 if it cannot be measured."""
        if version.number not in self._measured:
            compute = self._ready_compute()
            try:
                result = compute.accuracy_of(self.versions.model_of(version))
            except (ModelError, StateError) as error:
                logger.warning("version %d of the model cannot be measured: %s", version.number, error)
                result = None
            self._measured[version.number] = -1.0 if result is None else result
        return self._measured[version.number]

    def _roll_back(self) -> None:
        with self._parts.lock.held():
            version, in_use = self.versions.requested(), self.versions.in_use()
            if version is None or in_use is None:
                return
            self._may_withdraw = False
            if self.versions.is_pinned() and in_use.number != version.number:  # else a crash came after the roll-back
                self.versions.hold_in_use()
            self.versions.roll_back(version)
            self._backend.forget_state()
            if self._deployment.export == "round" and not version.files:
                self.versions.mark_due()
        self._renew_predictions(version)
        text = f"the app's model is version {version.number} of round {version.round} again"
        self._events.emit("rolled-back", version.round, text, {"version": version.number})
        self.versions.end_roll_back()

    def _use_held(self) -> None:
        version = None if self.versions.is_pinned() else self.versions.held()
        if version is None:
            return
        with self._parts.lock.held():
            self.versions.use_held(version)
            self._backend.forget_state()
            if self._deployment.export == "round" and not version.files:
                self.versions.mark_due()
        self._renew_predictions(version)
        text = f"the app's model is version {version.number}, delivered in round {version.round}"
        self._events.emit("delivered", version.round, text, {"version": version.number})
        self.versions.end_holding(version)
