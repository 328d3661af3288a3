"""Local training: it learns, repeats to the bit, and scores and extracts in eval mode."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from fleetdistill.errors import CannotAnswer, ConfigurationError, DataError, KnowledgeError, ModelError
from fleetdistill.training.local_training import (
    TensorData,
    TrainingReport,
    as_tensor_data,
    evaluate,
    extract,
    make_optimizer,
    train_epochs,
)


def _cross_entropy(logits: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
    return functional.cross_entropy(logits, labels)


def _noise(count: int, features: int = 4, classes: int = 3, seed: int = 0) -> TensorData:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, features, generator=generator)
    return as_tensor_data((inputs, torch.randint(classes, (count,), generator=generator)), classes)


def _linear(features: int = 4, classes: int = 3, *, batch_norm: bool = False, seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        middle: nn.Module = nn.BatchNorm1d(8) if batch_norm else nn.Dropout(0.2)
        return nn.Sequential(nn.Flatten(), nn.Linear(features, 8), middle, nn.ReLU(), nn.Linear(8, classes))


def _train(
    model: nn.Module, data: TensorData, *, epochs: int = 2, batch_size: int = 8, rate: float = 0.1, seed: int = 0
) -> TrainingReport:
    optimizer = make_optimizer(model.parameters(), learning_rate=rate, momentum=0.9, nesterov=True, weight_decay=5e-4)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(0)  # dropout; the order of the rows must come from the generator alone
        return train_epochs(
            model,
            data,
            epochs=epochs,
            batch_size=batch_size,
            optimizer=optimizer,
            loss=_cross_entropy,
            generator=generator,
            device="cpu",
        )


class TestTraining:
    def test_it_learns_the_digits(self) -> None:
        """A net of 64-8-10 reached 88 to 91 % on the last 360 digits (new writers) over ten seeds; chance is 10 %."""
        sklearn_data = pytest.importorskip("sklearn.datasets", reason="scikit-learn brings the digits")
        digits = sklearn_data.load_digits()
        data = as_tensor_data((digits.images.astype(np.float32) / 16, digits.target), 10)
        model = _linear(64, 10, batch_norm=True)
        train, test = (TensorData(data.inputs[rows], data.labels[rows]) for rows in (slice(0, 1437), slice(1437, None)))
        _train(model, train, epochs=10, batch_size=32)
        assert evaluate(model, test, 10).accuracy > 0.85

    def test_the_same_seed_gives_the_same_bits(self) -> None:
        models = [_linear(), _linear(), _linear()]
        reports = [_train(model, _noise(50), seed=seed) for model, seed in zip(models, (3, 3, 4), strict=True)]
        first, second, other = (torch.cat([p.flatten() for p in model.parameters()]) for model in models)
        assert reports[0] == reports[1]
        assert torch.equal(first, second)
        assert not torch.equal(first, other)

    def test_every_row_is_used_once_per_epoch_and_matches_position(self) -> None:
        data, seen = _noise(10), []

        def loss(logits: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
            assert torch.equal(labels, data.labels[rows])
            seen.append(rows)
            return functional.cross_entropy(logits, labels)

        model = _linear()
        optimizer = make_optimizer(model.parameters(), learning_rate=0.1, momentum=0, nesterov=False, weight_decay=0)
        plan: dict[str, Any] = {
            "epochs": 2,
            "batch_size": 4,
            "generator": torch.Generator().manual_seed(0),
            "device": "cpu",
        }
        report = train_epochs(model, data, optimizer=optimizer, loss=loss, **plan)
        assert [len(rows) for rows in seen] == [4, 4, 2] * 2
        epochs = torch.cat(seen).view(2, 10)
        assert torch.equal(epochs.sort(dim=1).values, torch.arange(10).expand(2, 10))
        assert not torch.equal(epochs[0], epochs[1])
        assert (report.steps, report.samples_seen) == (6, 20)

    def test_the_mean_loss_weighs_samples_not_batches(self) -> None:
        """Batches of 3 and 1 with losses 3 and 1 (their own sizes): (3 · 3 + 1 · 1) / 4 = 2.5, not 2."""
        model = _linear()
        optimizer = make_optimizer(model.parameters(), learning_rate=1e-3, momentum=0, nesterov=False, weight_decay=0)
        report = train_epochs(
            model,
            _noise(4),
            epochs=1,
            batch_size=3,
            optimizer=optimizer,
            loss=lambda logits, labels, rows: 0 * logits.sum() + len(rows),
            generator=torch.Generator(),
            device="cpu",
        )
        assert report.mean_loss == 2.5

    def test_a_last_batch_of_one_is_left_out_with_batch_norm_only(self) -> None:
        data = _noise(9)
        assert _train(_linear(batch_norm=True), data, epochs=3).samples_seen == 24
        assert _train(_linear(batch_norm=False), data, epochs=3).samples_seen == 27

    def test_one_sample_trains_with_running_batch_norm_statistics(self) -> None:
        model: Any = _linear(batch_norm=True)
        before, weights = model[2].running_mean.clone(), model[1].weight.clone()
        report = _train(model, _noise(1), epochs=3)
        assert (report.samples_seen, report.steps) == (3, 3)
        assert math.isfinite(report.mean_loss)
        assert torch.equal(model[2].running_mean, before)
        assert not torch.equal(model[1].weight, weights)

    def test_batch_norm_cannot_train_on_batches_of_one(self) -> None:
        with pytest.raises(ConfigurationError, match="batch_size is 1"):
            _train(_linear(batch_norm=True), _noise(4), batch_size=1)
        assert _train(_linear(), _noise(1)).steps == 2

    def test_a_frozen_model_declines_with_what_to_do(self) -> None:
        with pytest.raises(CannotAnswer, match=r"requires a gradient; call model.requires_grad_\(True\)"):
            _train(_linear().requires_grad_(False), _noise(10))

    def test_no_samples_are_refused(self) -> None:
        with pytest.raises(DataError, match="nothing to train on"):
            _train(_linear(), _noise(0))

    def test_divergence_says_what_to_do_and_keeps_finite_weights(self) -> None:
        model = _linear()
        with pytest.raises(KnowledgeError, match=r"loss is (nan|inf) at epoch .* learning rate 1e\+20 is probably"):
            _train(model, _noise(64), epochs=50, rate=1e20)

    def test_a_loss_that_is_not_finite_leaves_the_model_as_it_was(self) -> None:
        model = _linear()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        data = _noise(8)
        data.inputs[0] = torch.inf  # behind the checks, as a broken transform would
        with pytest.raises(KnowledgeError, match="at epoch 1 of 2, step 1"):
            _train(model, data)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    def test_modes_are_restored_for_every_module(self) -> None:
        model = _linear(batch_norm=True).eval()
        model[1].train()
        _train(model, _noise(8))
        evaluate(model, _noise(8), 3)
        assert [module.training for module in model] == [False, True, False, False, False]

    @pytest.mark.parametrize("plan", [{"epochs": 0}, {"batch_size": 0}])
    def test_a_plan_out_of_range_is_refused(self, plan: dict[str, int]) -> None:
        with pytest.raises(ConfigurationError, match="is 0, must be at least 1"):
            _train(_linear(), _noise(4), **plan)


class TestOptimizer:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"learning_rate": 0.0}, "learning_rate is 0.0"),
            ({"learning_rate": float("nan")}, "learning_rate is nan"),
            ({"momentum": -0.1}, "momentum is -0.1"),
            ({"weight_decay": -1.0}, "weight_decay is -1.0"),
            ({"momentum": 0.0}, "nesterov needs momentum"),
        ],
    )
    def test_values_out_of_range_are_refused(self, change: dict[str, float], message: str) -> None:
        settings = {"learning_rate": 0.1, "momentum": 0.9, "weight_decay": 0.0} | change
        with pytest.raises(ConfigurationError, match=message):
            make_optimizer(_linear().parameters(), nesterov=True, **settings)

    def test_a_model_without_parameters_is_refused(self) -> None:
        with pytest.raises(ModelError, match="no parameters"):
            make_optimizer([], learning_rate=0.1, momentum=0, nesterov=False, weight_decay=0)


class TestScoring:
    def test_counts_by_hand(self) -> None:
        """Labels 0 0 1 2, answers 0 1 1 1: two right; the tie in the last row goes to class 1, not to 2."""
        logits = torch.tensor([[3.0, 1, 0], [0, 2, 1], [0, 5, 1], [0, 1, 1]])
        counts = evaluate(nn.Identity(), TensorData(logits, torch.tensor([0, 0, 1, 2])), 3, batch_size=3)
        assert (counts.correct, counts.count, counts.accuracy) == (2, 4, 0.5)
        assert counts.confusion.hits.tolist() == [1, 1, 0]
        assert counts.confusion.rows.tolist() == [2, 1, 1]
        assert counts.confusion.predicted.tolist() == [1, 3, 0]
        assert counts.confusion.cells.tolist() == [[0, 0, 1], [0, 1, 1], [1, 1, 1], [2, 1, 1]]
        rows = [-torch.log_softmax(row, 0)[label] for row, label in zip(logits, (0, 0, 1, 2), strict=True)]
        assert counts.loss_sum == pytest.approx(float(sum(rows)))

    def test_the_batch_size_does_not_change_the_counts(self) -> None:
        model, data = _linear(batch_norm=True), _noise(50)
        scores = [evaluate(model, data, 3, batch_size=size) for size in (1, 7, 1024)]
        assert len({(score.correct, tuple(score.confusion.hits.tolist())) for score in scores}) == 1
        assert scores[0].loss_sum == pytest.approx(scores[2].loss_sum, rel=1e-6)

    def test_no_samples_give_zero_counts(self) -> None:
        counts = evaluate(_linear(), _noise(0), 3)
        assert (counts.correct, counts.count, counts.loss_sum) == (0, 0, 0.0)
        assert counts.confusion.rows.tolist() == [0, 0, 0]
        assert np.isnan(counts.accuracy)

    def test_a_model_that_does_not_fit_is_refused(self) -> None:
        with pytest.raises(ModelError, match=r"returned shape \[5, 3\], expected logits \[5, 4\]"):
            evaluate(_linear(), _noise(5), 4)
        with pytest.raises(DataError, match="label 2 is outside"):
            evaluate(_linear(), TensorData(torch.zeros(1, 4), torch.tensor([2])), 2)
        diverged: Any = _linear()
        nn.init.constant_(diverged[1].weight, torch.nan)
        with pytest.raises(KnowledgeError, match="non-finite logit at row 0"):
            evaluate(diverged, _noise(5), 3)

    def test_extract_keeps_the_order_and_the_batch_norm_statistics(self) -> None:
        model: Any = _linear(batch_norm=True).train()
        data = _noise(10)
        before = model[2].running_mean.clone()
        whole, parts = (extract(model, data.inputs, batch_size) for batch_size in (10, 3))
        torch.testing.assert_close(whole, parts)
        assert torch.equal(model[2].running_mean, before)
        assert model.training
        assert not whole.requires_grad
        assert extract(model, data.inputs[:0], 3).shape == (0, 3)

    def test_layers_with_many_outputs_get_smaller_batches(self) -> None:
        sizes: list[int] = []
        wide = nn.Linear(4, 2**18)  # 16 bytes in and 1 MiB out: 67,108,864 // 1,048,592 = 63 rows
        wide.register_forward_pre_hook(lambda layer, given: sizes.append(len(given[0])))
        model = nn.Sequential(wide, nn.AdaptiveAvgPool1d(1))
        inputs = torch.rand(100, 4)
        made = extract(model, inputs, 80)
        assert sizes == [2, 63, 17, 20]  # the first two are measured
        sizes.clear()
        extract(model, inputs, 80)
        assert sizes == [63, 17, 20]
        sizes.clear()
        extract(lambda x: wide(x) + wide(x), inputs[:20], 80, model=model)
        assert sizes == [2, 2, 20, 20]  # another function of the same module is measured by itself
        assert_close(made, inputs @ wide.weight.mean(0)[:, None] + wide.bias.mean(), rtol=1e-4, atol=1e-5)

    @pytest.mark.filterwarnings("ignore::FutureWarning")
    def test_a_scripted_module_is_not_measured(self) -> None:
        assert extract(torch.jit.trace(nn.Linear(4, 2), torch.rand(2, 4)), torch.rand(40, 4)).shape == (40, 2)

    def test_extract_finds_the_module_or_asks_for_it(self) -> None:
        model: Any = _linear()  # dropout: train mode would show
        data = _noise(10)
        by_method = extract(model.forward, data.inputs, 4)
        by_name = extract(lambda inputs: model(inputs), data.inputs, 4, model=model)
        assert torch.equal(by_method, by_name)
        with pytest.raises(ConfigurationError, match="pass it as model="):
            extract(lambda inputs: model(inputs), data.inputs, 4)


class _Items(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        if not 0 <= row < 3:
            raise IndexError(row)
        return torch.full((2, 2), float(row)), row


class _Ragged(_Items):
    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return torch.zeros(row + 1), 0


class _Stream(IterableDataset[tuple[Tensor, int]]):
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        yield torch.zeros(1), 0


class TestTensorData:
    @pytest.mark.parametrize(
        "data",
        [
            (np.zeros((2, 3)), np.array([0, 1], dtype=np.uint8)),
            (torch.zeros(2, 3, dtype=torch.float16), torch.tensor([0, 1], dtype=torch.int32)),
            TensorDataset(torch.zeros(2, 3), torch.tensor([0, 1])),
            TensorData(torch.zeros(2, 3), torch.tensor([0, 1])),
        ],
    )
    def test_every_kind_becomes_float32_and_int64(self, data: object) -> None:
        result = as_tensor_data(data, 2)
        assert (result.inputs.dtype, result.labels.dtype) == (torch.float32, torch.int64)
        assert (result.inputs.shape, result.labels.tolist(), len(result)) == ((2, 3), [0, 1], 2)

    def test_a_dataset_is_stacked_in_order(self) -> None:
        result = as_tensor_data(_Items(), 3)
        assert result.labels.tolist() == [0, 1, 2]
        assert result.inputs[:, 0, 0].tolist() == [0.0, 1.0, 2.0]

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            ((torch.zeros(3, 2), torch.tensor([0, 1])), "3 inputs but 2 labels"),
            ((torch.zeros(2, 2), torch.tensor([0, 5])), r"label 5 at row 1 is outside \[0, 2\)"),
            ((torch.zeros(2, 2), torch.tensor([0, -1])), "label -1 at row 1 is negative"),
            ((torch.zeros(2, 2), torch.tensor([0.0, 1.0])), "labels are float32"),
            ((torch.zeros(2, 2), torch.tensor([[0], [1]])), r"shape \[2, 1\]"),
            (
                (torch.zeros(2, 2, dtype=torch.uint8), torch.tensor([0, 1])),
                r"inputs are uint8.*scale images to",
            ),
            ((torch.tensor([[0.0, 1.0], [0.0, torch.nan]]), torch.tensor([0, 1])), "NaN or infinity, first at row 1"),
            ((torch.tensor([0.0, torch.inf]), torch.tensor([0, 1])), "NaN or infinity, first at row 1"),
            ((np.array(["a"]), np.array([0])), "cannot convert an array of dtype"),
            (_Ragged(), r"the input in row 1 of _Ragged has shape \[2\], expected \[1\] as in row 0"),
            ("images/", "the data is of type str"),
        ],
    )
    def test_unusable_data_are_refused_with_the_place(self, data: object, message: str) -> None:
        with pytest.raises(DataError, match=message):
            as_tensor_data(data, 2)

    def test_one_class_is_no_task(self) -> None:
        with pytest.raises(ConfigurationError, match="classes is 1"):
            as_tensor_data(_Items(), 1)
