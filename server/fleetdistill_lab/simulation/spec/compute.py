"""The compute backend of simulated devices that share a process: equal work is done once."""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fleetdistill.compute.base import Computed
from fleetdistill.compute.torch_compute import TorchCompute
from fleetdistill.data.samples import Samples, read_samples
from fleetdistill.knowledge import DELIVER, RECEIVED, RESULT, Kind
from fleetdistill.methods.base import Ask
from fleetdistill.replacement import SPLIT
from fleetdistill.training.figures import Confusion, Counts, place_of
from fleetdistill.training.local_training import LazyData, TensorData, extract
from fleetdistill.training.onnx_graphs import Graphs
from fleetdistill.training.tensor_data import tensor_data_of
from fleetdistill.wire.v1 import contract_pb2, service_pb2
from fleetdistill_lab.simulation.report.metrics import top_k_predictions
from fleetdistill_lab.simulation.spec.arrays import load_arrays, split_slice
from fleetdistill_lab.simulation.spec.score_log import OPTIMIZER_STEPS, OWN, STEP_NUMBER, TOP_K

_MAX_SCORES = 64
_taken: ContextVar[list[int] | None] = ContextVar("_taken", default=None)
"""Steps of optimisers while an ask is answered, also in the thread that computes; None otherwise."""


def count_steps(number: int) -> None:
    """Counts steps of optimisers for the ask that the calling thread answers."""
    taken = _taken.get()
    if taken is not None:
        taken[0] += number


register_optimizer_step_post_hook(lambda *_: count_steps(1))


class Shared:
    """What the devices of one process of a simulation share; several threads may use it.

    Attributes:
        scores: Counts of models on the test set, by architecture and weights; the newest ones.
        profiles: What profiles say of a model, by its name.
        graphs: Graphs of the exported models, one for each architecture.
        asks, seconds: Number of asks that were computed, and the time that this took, in seconds.
    """

    def __init__(self) -> None:
        self.scores: OrderedDict[tuple[str, bytes], Counts] = OrderedDict()
        self._samples: dict[str, Samples] = {}
        self._reading = threading.Lock()
        self.profiles: dict[str, contract_pb2.DeviceProfile] = {}
        self.graphs = Graphs()
        self.asks, self.seconds = 0, 0.0

    def samples(self, name: str) -> Samples:
        """Returns the samples of a data file, or of some of its rows; each file is read and checked once."""
        file, rows = split_slice(name)
        with self._reading:
            if file not in self._samples:
                self._samples[file] = read_samples(load_arrays(file))
        whole = self._samples[file]
        return whole if rows == slice(None) else whole.part(rows)


class SimulatedCompute(TorchCompute):
    """A `TorchCompute` that scores models on the test set in some rounds only, and equal models once.

    It counts the steps of all optimisers, whatever the method trains, and notes them in the answer. Top-k scores, and
    scores on the device's own rows of the test set, are for the score logs, and are not sent to the server.

    Args:
        contract: The run's contract.
        shared: What the devices of this process share.
        is_scored: Returns whether models are scored after a round, given its number.
        top_k: k of the top-k accuracy to score besides; None for none.
        own_test: The device's own rows of the test set; None if it has none.
        given: Arguments of `TorchCompute`.
    """

    def __init__(
        self,
        contract: contract_pb2.Contract,
        shared: Shared,
        is_scored: Callable[[int], bool],
        top_k: int | None = None,
        own_test: Samples | None = None,
        **given: Any,
    ) -> None:
        super().__init__(contract, **given)
        self._shared = shared
        self._own_test = None if own_test is None else tensor_data_of(own_test)
        self.graphs = shared.graphs
        self._is_scored = is_scored
        self._top_k = top_k
        self._round = 0  # of the ask in progress
        self._unsent: dict[str, Counts] = {}  # scores of the ask in progress, by place

    def _describe_model(self, profile: contract_pb2.DeviceProfile) -> None:
        known = self._shared.profiles.get(self._model_name)
        if known is None:
            known = contract_pb2.DeviceProfile()
            super()._describe_model(known)
            self._shared.profiles[self._model_name] = known  # complete, because another thread may use it at once
        profile.MergeFrom(known)

    def answer(self, ask: service_pb2.Ask, parts: Mapping[str, Kind], allow: Sequence[str]) -> Computed:
        self._round, self._unsent = ask.round, {}
        began = time.perf_counter()
        taken = [0]
        outside = _taken.set(taken)
        try:
            computed = super().answer(ask, parts, allow)
        finally:
            _taken.reset(outside)
            self._shared.asks += 1
            self._shared.seconds += time.perf_counter() - began
        if self._unsent:  # only now, so that they are not sent
            computed = replace(computed, scores={**computed.scores, **self._unsent})
        if not taken[0]:
            return computed
        notes = {**computed.answer.notes, OPTIMIZER_STEPS: taken[0], STEP_NUMBER: ask.step_number}
        return replace(computed, answer=replace(computed.answer, notes=notes))

    def _score_received(self, ask: Ask) -> tuple[dict[str, Counts], nn.Module | None]:
        # A model that all devices receive is the global model, which the engine scores.
        is_scored = not self.method.shares_fleet_model and self._is_due(RESULT if ask.step == DELIVER else RECEIVED)
        return super()._score_received(ask) if is_scored or SPLIT in self._scored else ({}, None)

    def _is_due(self, name: str) -> bool:
        """Returns whether a model is scored on the test set; a received one is the previous round's result."""
        return self._is_scored(self._round - (name == RECEIVED))

    def _score_model(self, name: str, model: nn.Module) -> list[tuple[str, Counts]]:
        if self._is_due(name):
            scores = super()._score_model(name, model)
            if self._top_k is not None:
                self._unsent[place_of(TOP_K, name)] = self.score_top_k(model)
            if self._own_test is not None:
                self._unsent[place_of(OWN, name)] = self._counts_on(model, self._own_test)
            return scores
        return [(place_of(SPLIT, name), self._counts(model, SPLIT))] if SPLIT in self._scored else []

    def _counts(self, model: nn.Module, split: str) -> Counts:
        return super()._counts(model, split) if split == SPLIT else self.score(model)

    def score(self, model: nn.Module) -> Counts:
        """Returns the counts of a model on the test set."""
        return self._once("", model, lambda: super(SimulatedCompute, self)._counts(model, "test"))

    def score_top_k(self, model: nn.Module) -> Counts:
        """Returns the counts of a model on the test set with top-k predictions; they have no loss."""
        assert self._top_k is not None  # checked by the callers
        k, data = self._top_k, self._scored_tensors["test"]
        return self._once(TOP_K, model, lambda: top_k_counts(model, data, k, self._classes))

    def _once(self, what: str, model: nn.Module, count: Callable[[], Counts]) -> Counts:
        key, scores = (f"{what} {self._model_name}", _digest(model)), self._shared.scores
        result = scores.get(key)
        if result is None:
            result = scores[key] = count()
            while len(scores) > _MAX_SCORES:
                scores.popitem(last=False)
        return result

    def score_on(self, model: nn.Module, rows: Samples) -> Counts:
        """Returns the counts of a model on some rows."""
        return self._counts_on(model, tensor_data_of(rows))


def top_k_counts(model: nn.Module, data: TensorData | LazyData, k: int, classes: int) -> Counts:
    """Returns the counts of a model on data with the predictions of `top_k_predictions`, without a loss."""
    labels_n = data.labels.numpy(force=True)
    logits_nc = extract(model, data.inputs).numpy()
    confusion = Confusion.of(labels_n, top_k_predictions(logits_nc, labels_n, k), classes)
    return Counts(confusion.correct, len(labels_n), math.nan, confusion)


def _digest(model: nn.Module) -> bytes:
    result = hashlib.sha256()
    for tensor in model.state_dict().values():
        result.update(np.ascontiguousarray(tensor.numpy(force=True)).data)
    return result.digest()
