"""What the compute backends with and without PyTorch have in common: the app's data, and the delivered models."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from fleetdistill.compute.base import Compute, Computed
from fleetdistill.data.samples import Samples, named, read_samples
from fleetdistill.data.splits import Splits
from fleetdistill.deployment.batch import range_of
from fleetdistill.deployment.quantization import CheckData, check_data_of
from fleetdistill.deployment.settings import Deployment
from fleetdistill.errors import DataError, ExportError
from fleetdistill.knowledge import Array, Metric, Metrics
from fleetdistill.methods.base import Answer
from fleetdistill.replacement import REPLACED, SPLIT, Replacement, judge, picked
from fleetdistill.training.figures import Counts, metrics_of, place_of
from fleetdistill.training.onnx_file import OnnxReport, copy_onnx
from fleetdistill.version import VERSION
from fleetdistill.wire.codec import KNOWLEDGE_TYPES
from fleetdistill.wire.v1 import contract_pb2

Model = TypeVar("Model")


class DeliveringCompute(Compute, Generic[Model]):
    """`Compute` that reads the app's data, scores the variants of a round, and keeps the delivered ones.

    Args:
        contract: Contract of the run.
        model_name: Name of the model in the server's lists.
        data: Training data, and data on which the variants are scored.

    Raises:
        DataError: The data are invalid or do not fit the run.
    """

    def __init__(self, contract: contract_pb2.Contract, model_name: str, data: Splits) -> None:
        super().__init__(contract)
        self._model_name = model_name
        self._classes = len(contract.classes)
        self._input_shape = tuple(contract.input_shape)
        self._given = data.data
        self._samples = self._read(data.data, "data")
        self._scored = {
            split: self._read(given, f"{split}_data")
            for split, given in (("test", data.test_data), (SPLIT, data.validation_data))
            if given is not None
        }
        if SPLIT in self._scored and not len(self._scored[SPLIT]):
            raise DataError("validation_data has no samples; pass at least one, or None to accept every round's model")
        self._delivered: dict[str, Model] = {}
        self._in_use = ""
        self._decided: Mapping[str, Model] = {}  # variants of the last decision, until they are delivered
        self._best = ""  # best of them
        self._delivered_accuracy: float | None = None
        self._deployment = Deployment()

    def use_deployment(self, deployment: Deployment) -> None:
        """Applies the app's settings for replacement and export."""
        self._deployment = deployment

    # --- data

    def _read(self, data: Any, name: str, known: Samples | None = None) -> Samples:
        """Reads and checks data for a run; returns `known` if they have not changed."""
        with named(name):
            samples = read_samples(data, known)
            if samples is not known:
                self._check_samples(samples)
        return samples

    def _check_samples(self, samples: Samples) -> None:
        """Raises DataError if the backend cannot use samples in this run."""
        samples.check_run(self.contract.run, self._input_shape, self._classes)

    def profile(self, allow: Sequence[str]) -> contract_pb2.DeviceProfile:
        """Returns the device's profile for the check-in."""
        profile = contract_pb2.DeviceProfile(
            model_name=self._model_name[:128],
            samples=len(self._samples),
            classes=self._classes,
            input_shape=self._input_shape,
            knowledge_types=KNOWLEDGE_TYPES,
            allowed_columns=sorted(allow),
            sdk_version=VERSION,
        )
        self._describe_model(profile)
        return profile

    @abstractmethod
    def _describe_model(self, profile: contract_pb2.DeviceProfile) -> None:
        """Adds what the profile says of the model."""

    def data_digest(self) -> bytes:
        """Returns the SHA-256 of the training data."""
        return self._samples.digest

    @property
    def sample_count(self) -> int:
        """Number of training samples; 0 if the app has none yet."""
        return len(self._samples)

    def reread_data(self, data: Any) -> bool:
        """Reads the training data again; returns whether a sample was added, removed or changed."""
        given = self._given if data is None else data  # None for a worker, which has its own data
        previous = self._samples
        samples = self._read(given, "data", previous)
        if samples is not previous:
            self._samples = samples
            try:
                self._use_samples()
            except BaseException:
                self._samples = previous  # else they would pass for data that the method uses
                raise
        self._given = given
        return samples is not previous

    @abstractmethod
    def _use_samples(self) -> None:
        """Makes the method use the training data that were read again."""

    # --- state

    def restore(self, saved: bytes, delivered: bytes | None) -> None:
        """Restores the committed state and the delivered models, whose accuracy is measured again when needed."""
        self._restore(saved, delivered)
        self._delivered_accuracy = None
        self.has_state = True

    @abstractmethod
    def _restore(self, saved: bytes, delivered: bytes | None) -> None:
        """Unpacks the results of `state` and `delivered_state`."""

    def delivered_state(self) -> bytes:
        """Returns the packed models of the app, for `restore`."""
        return self._pack(self._delivered, self._in_use)

    @abstractmethod
    def _pack(self, models: Mapping[str, Model], in_use: str) -> bytes:
        """Packs models of the app by name."""

    @abstractmethod
    def unpack_model(self, delivered: bytes) -> Model:
        """Returns the app's model from a `delivered_state` of a device with the same model, as a new object."""

    # --- answers

    def _complete(
        self,
        answer: Answer,
        allow: Sequence[str],
        scores: Mapping[str, Counts],
        figures: Sequence[Metric],
        replacement: Replacement | None,
        replaced: str = REPLACED,
    ) -> Computed:
        """Returns the result of an ask: adds the metrics to the answer, and packs the state after it.

        Args:
            answer: Answer of the method.
            allow: Columns that may leave the device.
            scores: Counts of models on the app's data, by place.
            figures: Figures of the method and of the training.
            replacement: Decision about the app's model, if this answer ends the round.
            replaced: Name of the metric of the decision.
        """
        metrics = [metric for place, counts in scores.items() for metric in metrics_of(place, counts, allow)]
        metrics += figures
        if replacement is not None and replacement.accuracy is not None:
            metrics += [replacement.metric(replaced), *picked(self._decided, replacement)]
        if metrics and "metrics" in allow:
            answer = replace(answer, parts={**answer.parts, "metrics": Metrics(metrics=metrics)})
        delivered = None
        if replacement is not None and replacement.replaced:
            delivered = self._pack({**self._delivered, **self._decided}, self._best)
        return Computed(answer, self.state(), replacement, delivered, scores)

    def _score(self, models: Mapping[str, Model]) -> dict[str, Counts]:
        return {place: counts for name, model in models.items() for place, counts in self._score_model(name, model)}

    def _score_model(self, name: str, model: Model) -> list[tuple[str, Counts]]:
        """Returns the scores of a model on the app's test and validation data, by place."""
        return [(place_of(split, name), self._counts(model, split)) for split in self._scored]

    @abstractmethod
    def _counts(self, model: Model, split: str) -> Counts:
        """Returns the scores of a model on the app's test or validation data."""

    # --- delivery

    def _judge(
        self, models: Mapping[str, Model], scores: Mapping[str, Counts], received: tuple[Model, float] | None = None
    ) -> Replacement:
        """Returns the decision about the best variant: it replaces the app's model unless its accuracy is lower.

        Args:
            models: Variants of the round; without validation data the first one is delivered.
            scores: Their scores, as far as they are known, by place.
            received: The model that the device received and trained, and its accuracy on the validation data.
        """
        self._best, self._decided = next(iter(models)), models
        if SPLIT not in self._scored:
            return Replacement(replaced=True, variant=self._best if len(models) > 1 else "")
        accuracies = {
            name: (scores.get(place_of(SPLIT, name)) or self._counts(model, SPLIT)).accuracy
            for name, model in models.items()
        }
        if self._delivered_accuracy is None and self._delivered:  # the app's own model, or from before a restart
            self._delivered_accuracy = self._counts(self.delivered_model(), SPLIT).accuracy
        self._best, replacement = judge(
            accuracies,
            self._delivered_accuracy,
            self._deployment.max_accuracy_drop,
            None if received is None else received[1],
        )
        if received is not None and replacement.received:
            self._decided = {self._best: received[0]}
        return replacement

    def deliver(self, replacement: Replacement) -> None:
        """Replaces or keeps the app's model."""
        if replacement.replaced:
            self._update_delivered(self._decided)
            self._in_use = self._best
            self._delivered_accuracy = replacement.accuracy
        self._decided = {}

    @abstractmethod
    def _update_delivered(self, models: Mapping[str, Model]) -> None:
        """Copies models to the app's, in place where the app may already have a reference; adds missing ones."""

    def delivered_model(self) -> Model:
        """Returns the variant in use."""
        return self._delivered[self._in_use]

    def delivered_models(self) -> Mapping[str, Model]:
        """Returns all delivered variants by name."""
        return dict(self._delivered)

    def accuracy_of(self, delivered: bytes) -> float | None:
        """Returns the accuracy of an earlier delivered model on the validation data; None without such data."""
        return self._counts(self.unpack_model(delivered), SPLIT).accuracy if SPLIT in self._scored else None

    def input_range(self) -> tuple[float, float] | None:
        """Returns the range of the first training inputs' values; None without samples."""
        return range_of(self._samples.first)

    def check_data(self) -> CheckData:
        """Returns the samples that check and calibrate a quantised file."""
        return check_data_of(self._samples, self._scored.get(SPLIT))

    def export(self, path: Path, number: int) -> OnnxReport:
        """Writes the delivered models as ONNX and compares each with this backend on the device's own samples.

        If there are several variants, each is `VARIANT.onnx`, and `path` is a copy of the one in use. One that is not
        in use and cannot be exported is left out.

        Returns:
            Report on the file at `path`, with the largest difference over all variants, and the variants left out.

        Raises:
            ExportError: A package is not installed, or the model in use cannot be exported or its file gives other
                outputs.
        """
        metadata = {
            "run": self.contract.run,
            "round": str(number),
            "method": self.contract.method,
            "class_names": ",".join(self.contract.classes),
        }
        if known := self.input_range():
            metadata["input_range"] = "{:.9g},{:.9g}".format(*known)
        in_use = self.delivered_model()
        if len(self._delivered) == 1:
            return self._export(in_use, path, metadata)
        reports: dict[str, OnnxReport] = {}
        failures: dict[str, ExportError] = {}
        for name, model in self._delivered.items():
            try:
                reports[name] = self._export(model, path.with_name(f"{name}.onnx"), {**metadata, "answer": name})
            except ExportError as error:
                if name == self._in_use:
                    raise
                failures[name] = error
        copy_onnx(reports[self._in_use].path, path)
        largest = max(report.max_difference for report in reports.values())
        return replace(reports[self._in_use], path=path, max_difference=largest, failures=failures)

    @abstractmethod
    def _export(self, model: Model, path: Path, metadata: Mapping[str, str]) -> OnnxReport:
        """Writes a model as ONNX and compares it on `_first_inputs`."""

    @property
    def _first_inputs(self) -> Array:
        """The first training inputs, `[min(N, 64), *input_shape]` float32; an input of zeros without samples."""
        return self._samples.first if len(self._samples) else np.zeros((1, *self._input_shape), np.float32)
