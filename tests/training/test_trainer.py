"""The engine's loop: bit-equal to the plain loop in float32, and the same results with less memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from fleetdistill.errors import KnowledgeError, RunError
from fleetdistill.testing import ManualClock
from fleetdistill.training.local_training import extract, train_steps
from fleetdistill_server.training.compiling import Compiling
from fleetdistill_server.training.hardware import Hardware
from fleetdistill_server.training.rows import Pool, ahead, mapped_tensor
from fleetdistill_server.training.trainer import Trainer

CPU = torch.device("cpu")
ROWS, CLASSES = 37, 3
SHARDINGS: tuple[Literal["auto", "none", "full"], ...] = ("auto", "none", "full")


def plain_network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(32, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, CLASSES))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, CLASSES))


def normalised() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, CLASSES))


def data() -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 2, 4, 4, generator=drawn), torch.randint(0, CLASSES, (ROWS,), generator=drawn)


Losses = Callable[[nn.Module], Callable[..., Iterator[Tensor]]]


def two_losses(model: nn.Module) -> Callable[..., Iterator[Tensor]]:
    """Two steps for each mini-batch."""
    inputs, labels = data()

    def losses(epoch: int, rows: Tensor, read: Tensor | None = None) -> Iterator[Tensor]:
        given = inputs[rows] if read is None else read
        yield functional.cross_entropy(model(given), labels[rows])
        yield model(given).square().mean()

    return losses


def fitted(
    make: Callable[[], nn.Module],
    trainer: Trainer | None = None,
    losses: Losses = two_losses,
    **how: Any,
) -> tuple[nn.Module, float]:
    """A model after two epochs in mini-batches of eight, and the mean loss; without a trainer by the plain loop."""
    torch.manual_seed(0)
    model = make()
    given: dict[str, Any] = {
        "epochs": 2,
        "batch_size": 8,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        "losses": losses(model),
        "generator": torch.Generator().manual_seed(2),
    }
    if trainer is None:
        return model, train_steps(model, ROWS, device=CPU, **given).mean_loss
    return model, trainer.train_steps(model, ROWS, **given, **how).mean_loss


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def assert_near(one: nn.Module, other: nn.Module, **tolerance: Any) -> None:
    for name, value in one.state_dict().items():
        assert_close(other.state_dict()[name], value, **tolerance)


def trainer_of(**settings: Any) -> tuple[Trainer, list[tuple[str, str]]]:
    events: list[tuple[str, str]] = []
    return Trainer(Hardware(device=CPU, **settings), lambda *event: events.append(event)), events


class SmallMemory:
    """A network that runs out of memory on batches above `rows`, or on its first `failures` forward passes."""

    def __init__(self, rows: int = 10**9, failures: int = 0) -> None:
        self.rows, self.failures = rows, failures

    def losses(self, model: nn.Module) -> Callable[..., Iterator[Tensor]]:
        def forget_nothing(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self.failures -= 1
            if len(inputs[0]) > self.rows or self.failures >= 0:
                raise torch.OutOfMemoryError("CUDA out of memory")

        model.register_forward_pre_hook(forget_nothing)
        return two_losses(model)


# --- float32 on a CPU


@pytest.mark.parametrize("make", [plain_network, convolutions, normalised])
@pytest.mark.parametrize("streamed", [False, True])
def test_float32_results_are_those_of_the_plain_loop_bit_for_bit(make: Callable[[], nn.Module], streamed: bool) -> None:
    expected, mean_loss = fitted(make)
    trainer, events = trainer_of(resident_bytes=1 if streamed else 0)
    inputs = data()[0]
    pool = Pool([inputs[:10], inputs[10:12], inputs[12:]], trainer.hardware)
    series: list[dict[str, Any]] = [{}, {"pool": pool}]
    for how in series:
        model, result = fitted(make, trainer, **how)
        assert_equal(expected, model)
        assert result == mean_loss
    assert events == []


def test_pools_follow_each_other_and_are_shuffled_separately() -> None:
    seen: list[int] = []

    def losses(model: nn.Module) -> Callable[..., Iterator[Tensor]]:
        def one(epoch: int, rows: Tensor) -> Iterator[Tensor]:
            seen.extend(rows.tolist())
            yield model(torch.ones(1, 2, 4, 4)).sum()

        return one

    model = convolutions()
    trainer_of()[0].train_steps(
        model,
        [6, 4],
        epochs=1,
        batch_size=4,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        losses=losses(model),
        generator=torch.Generator().manual_seed(0),
    )
    assert sorted(seen[:6]) == list(range(6))
    assert sorted(seen[6:]) == [6, 7, 8, 9]
    assert seen[:6] != list(range(6))


def test_a_loss_that_is_not_finite_stops_before_its_step() -> None:
    def losses(model: nn.Module) -> Callable[..., Iterator[Tensor]]:
        def second_fails(epoch: int, rows: Tensor) -> Iterator[Tensor]:
            yield model(torch.ones(1, 2, 4, 4)).sum()
            yield model(torch.ones(1, 2, 4, 4)).sum() * torch.nan

        return second_fails

    with pytest.raises(KnowledgeError, match=r"the loss is nan at epoch 1 of 2, step 2; the learning rate 0\.05"):
        fitted(convolutions, trainer_of()[0], losses)


# --- too little memory


def test_low_memory_gives_micro_batches_same_result_and_an_event() -> None:
    expected, mean_loss = fitted(convolutions)
    trainer, events = trainer_of()
    model, result = fitted(convolutions, trainer, SmallMemory(rows=3).losses)
    assert_near(expected, model, atol=1e-6, rtol=1e-5)
    assert result == pytest.approx(mean_loss, rel=1e-5)
    assert [kind for kind, _ in events] == ["out-of-memory"]
    assert "micro-batches of at most 4 rows" in events[0][1]
    again, _ = fitted(convolutions, trainer, SmallMemory(rows=2).losses)  # the size is kept, and halved again
    assert_near(expected, again, atol=1e-6, rtol=1e-5)
    assert len(events) == 1


@pytest.mark.parametrize("make", [convolutions, normalised, plain_network])
def test_second_step_of_mini_batch_is_not_repeated_with_first(make: Callable[[], nn.Module]) -> None:
    """Memory runs out in the second loss of the first mini-batch."""
    expected, _ = fitted(make)
    passes = 0

    def losses(model: nn.Module) -> Callable[..., Iterator[Tensor]]:
        plain = two_losses(model)

        def failing(epoch: int, rows: Tensor) -> Iterator[Tensor]:
            nonlocal passes
            for loss in plain(epoch, rows):
                passes += 1
                if passes == 2:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                yield loss

        return failing

    trainer, events = trainer_of()
    model, _ = fitted(make, trainer, losses, separable=make is convolutions)
    assert len(events) == 1
    assert_near(expected, model, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("make", "separable"), [(normalised, True), (convolutions, False), (plain_network, False)])
def test_whole_mini_batch_losses_move_saved_tensors_to_host(make: Callable[[], nn.Module], separable: bool) -> None:
    """Batch-norm, or a norm over the mini-batch: parts of it would have another gradient."""
    expected, _ = fitted(make)
    trainer, events = trainer_of()
    model, _ = fitted(make, trainer, SmallMemory(failures=1).losses, separable=separable)
    assert_equal(expected, model)
    assert ["moved to the host's memory" in text for _, text in events] == [True]


@pytest.mark.parametrize("make", [convolutions, normalised])
def test_a_step_that_never_fits_ends_the_run_with_what_to_do(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(RunError, match="too little memory for one step; lower the method's batch_size"):
        fitted(make, trainer_of()[0], SmallMemory(rows=0).losses)


def test_a_setting_of_micro_batches_needs_no_error() -> None:
    expected, _ = fitted(convolutions)
    trainer, events = trainer_of(micro_batch=3)
    model, _ = fitted(convolutions, trainer, SmallMemory(rows=3).losses)
    assert_near(expected, model, atol=1e-6, rtol=1e-5)
    assert events == []


def test_inference_halves_its_batches() -> None:
    torch.manual_seed(0)
    model, inputs = convolutions(), data()[0]
    expected = extract(model, inputs)
    model.register_forward_pre_hook(lambda module, given: _full(len(given[0]), 3))
    assert_close(trainer_of()[0].extract(model, inputs), expected)
    model.register_forward_pre_hook(lambda module, given: _full(len(given[0]), 0))
    with pytest.raises(RunError, match="too little memory for one step"):
        trainer_of()[0].extract(model, inputs)


def _full(rows: int, most: int) -> None:
    if rows > most:
        raise torch.OutOfMemoryError("CUDA out of memory")


# --- precision and layout


def test_bfloat16_is_close_and_keeps_weights_and_outputs_float32() -> None:
    expected, mean_loss = fitted(convolutions)
    trainer, _ = trainer_of(dtype=torch.bfloat16)
    used: list[torch.dtype] = []

    def losses(model: nn.Module) -> Callable[..., Iterator[Tensor]]:
        model.register_forward_hook(lambda module, given, output: used.append(output.dtype))
        return two_losses(model)

    model, result = fitted(convolutions, trainer, losses)
    assert set(used) == {torch.bfloat16}
    assert result == pytest.approx(mean_loss, rel=0.02)
    assert_near(expected, model, atol=0.02, rtol=0.05)
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    assert trainer.extract(model, data()[0]).dtype == torch.float32


def test_channels_last_gives_same_result_and_restores_layout() -> None:
    expected, _ = fitted(normalised)
    model, _ = fitted(normalised, trainer_of(channels_last=True)[0])
    assert_near(expected, model, atol=1e-5, rtol=1e-4)
    assert all(value.is_contiguous() for value in model.state_dict().values())


def test_compiled_forward_pass_gives_same_result_and_keeps_model() -> None:
    expected, _ = fitted(convolutions)
    trainer, events = trainer_of(compile="on", compile_backend="eager")
    model, _ = fitted(convolutions, trainer)
    assert_near(expected, model, atol=1e-6, rtol=1e-5)
    assert "forward" not in vars(model)
    assert events == []


def test_uncompilable_forward_pass_runs_plain_with_one_report() -> None:
    def no_backend(*_: Any) -> Any:
        raise RuntimeError("no C++ compiler")

    expected, mean_loss = fitted(normalised)
    trainer, events = trainer_of(compile="on", compile_backend=no_backend)
    model, result = fitted(normalised, trainer)
    assert_equal(expected, model)
    assert result == mean_loss
    assert [kind for kind, _ in events] == ["not-compiled"]


@pytest.mark.parametrize(("left", "compiled"), [(2400, True), (2399, False)])
def test_only_a_long_training_is_compiled(left: int, compiled: bool) -> None:
    """Each of 20 steps takes an eighth of a second; 2,400 more take five minutes."""
    clock, model = ManualClock(), convolutions()
    hardware = Hardware(device=CPU, compile="auto", compile_backend="eager")
    with Compiling(model, hardware, lambda kind, text: None, clock.now) as compiling:
        for step in range(20):
            assert "forward" not in vars(model)
            clock.advance(0.125)
            compiling.count_batch(left + 19 - step)
        assert ("forward" in vars(model)) is compiled
    assert "forward" not in vars(model)


# --- rows


@pytest.mark.parametrize("reads_ahead", [False, True])
@pytest.mark.parametrize(("resident_bytes", "dtype"), [(239, torch.float16), (240, torch.float32)])
def test_mapped_rows_are_read_from_their_file_or_kept_in_float32(
    resident_bytes: int, dtype: torch.dtype, reads_ahead: bool, tmp_path: Path
) -> None:
    array = np.arange(60, dtype=np.float16).reshape(20, 3)
    array.tofile(tmp_path / "rows")
    mapped = mapped_tensor(np.memmap(tmp_path / "rows", np.float16, "r", shape=(20, 3)))
    hardware = Hardware(device=CPU, resident_bytes=resident_bytes)
    pool = Pool([mapped[:7], mapped[7:8], mapped[8:]], hardware, reads_ahead=reads_ahead)
    wanted = [torch.tensor(rows) for rows in ([0, 19, 7], [6, 8], [3])]
    for rows, read in zip(wanted, pool.batches(wanted), strict=True):
        assert read.dtype == dtype
        assert torch.equal(read.half(), torch.from_numpy(array)[rows])
    assert len(pool) == 20


def test_rows_are_read_ahead_in_order_and_errors_arrive() -> None:
    items = [torch.tensor(number) for number in range(10)]
    assert list(ahead(int, items)) == list(range(10))

    def failing(item: Tensor) -> int:
        if int(item) == 3:
            raise OSError("cannot be read")
        return int(item)

    results = ahead(failing, items)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="cannot be read"):
        next(results)


def test_what_fits_is_kept_on_the_device() -> None:
    assert Hardware(device=CPU).keeps(256 << 20)
    assert not Hardware(device=CPU).keeps((256 << 20) + 1)
    assert not Hardware(device=CPU, resident_bytes=100).keeps(101)


def test_labels_are_kept_as_they_are() -> None:
    labels = torch.arange(10)
    read = list(Pool([labels[:4], labels[4:]], Hardware(device=CPU)).batches([torch.tensor([9, 0])]))
    assert [item.tolist() for item in read] == [[9, 0]]
    assert read[0].dtype == torch.int64


def test_a_cpu_shards_only_on_request() -> None:
    model = convolutions()
    assert [Hardware(device=CPU, sharding=how).shards(model) for how in SHARDINGS] == [False, False, True]


def test_models_of_a_caller_keep_their_mode() -> None:
    trainer, _ = trainer_of()
    model, _ = fitted(normalised, trainer)
    before = copy.deepcopy(model.eval().state_dict())
    trainer.extract(model, data()[0])
    assert not model.training
    for name, value in before.items():
        assert torch.equal(value, model.state_dict()[name])
