"""Networks that train together have the weights that they have alone, within float tolerance."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fleets import MECHANISMS, REPRODUCIBLE, RUNS, SMALL, device_files, prepare, record, run_in_memory
from support.long import long_except
from support.undisturbed import Undisturbed
from torch import Tensor, nn
from torch.nn import functional

from fleetdistill.errors import RunError
from fleetdistill.state.state_file import unpack_state
from fleetdistill.training.local_training import TensorData, Training, TrainingReport, train_epochs
from fleetdistill.training.model import split_sequential
from fleetdistill_lab import Simulation
from fleetdistill_lab.simulation.backends.stacked_models import CannotStackError, StackedModels, train_stacked
from fleetdistill_lab.simulation.fleet import simulate
from fleetdistill_lab.simulation.links.links import run_over_memory

TOGETHER = "none ran together"


def perceptron(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    layers = [nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, classes)]
    return split_sequential(nn.Sequential(*layers), 3)


def dropping(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """A network that draws random numbers while it trains."""
    layers = [nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, classes)]
    return split_sequential(nn.Sequential(*layers), 3)


ALIKE = replace(
    SMALL,
    method="fedavg",
    devices=4,
    rounds=3,
    train_limit=200,
    test_limit=50,
    models=(perceptron,),
    partition="iid",
)
"""Four devices with one network and 50 rows each."""


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 3))


def training(number: int, kind: str = "sgd", model: nn.Module | None = None, rows: int = 11) -> Training:
    """A training of 11 rows in batches of 4, of which the last one has 3."""
    model = network(number) if model is None else model
    generator = torch.Generator().manual_seed(100 + number)
    data = TensorData(torch.randn(rows, 1, 3, 4, generator=generator), torch.arange(rows) % 3)
    if kind == "adam":
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
    return Training(
        model, lambda inputs, labels: functional.cross_entropy(model(inputs), labels), data, 3, 4, optimizer, generator
    )


def trained_alone(one: Training) -> TrainingReport:
    return train_epochs(
        one.model,
        one.data,
        epochs=one.epochs,
        batch_size=one.batch_size,
        optimizer=one.optimizer,
        loss=lambda logits_bc, labels_b, rows_b: functional.cross_entropy(logits_bc, labels_b),
        generator=one.generator,
        device="cpu",
    )


def weights(model: nn.Module) -> Mapping[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_networks_have_the_weights_that_they_have_alone(kind: str) -> None:
    reports = train_stacked(together := [training(number, kind) for number in range(5)])
    for number, (one, report) in enumerate(zip(together, reports, strict=True)):
        alone = training(number, kind)
        expected = trained_alone(alone)
        assert (report.steps, report.samples_seen) == (expected.steps, expected.samples_seen) == (9, 33)
        assert report.mean_loss == pytest.approx(expected.mean_loss, rel=1e-5)
        torch.testing.assert_close(weights(one.model), weights(alone.model), rtol=1e-4, atol=1e-6)
        assert torch.equal(one.generator.get_state(), alone.generator.get_state())


def changing(model: nn.Module) -> nn.Module:
    """A network with a step in Python that depends on its values, which has no stacked form."""
    model.register_forward_hook(lambda module, given, made: made if float(made.sum()) < 1e9 else -made)
    return model


@pytest.mark.parametrize(
    ("trainings", "reason"),
    [
        (lambda: [training(0)], "no other device has the same network and as many rows"),
        (lambda: [training(0), diverging()], "a loss is not finite"),
        (lambda: [training(0, model=changing(network())), training(1, model=changing(network(1)))], "vmap"),
    ],
    ids=["one", "diverging", "python"],
)
def test_what_cannot_be_stacked_is_left_as_it_was(trainings: Any, reason: str) -> None:
    given = trainings()
    before = [(weights(one.model), one.generator.get_state(), one.model.training) for one in given]
    with pytest.raises(CannotStackError, match=reason):
        train_stacked(given)
    for one, (tensors, state, mode) in zip(given, before, strict=True):
        torch.testing.assert_close(weights(one.model), tensors, rtol=0, atol=0)
        assert torch.equal(one.generator.get_state(), state)
        assert one.model.training is mode


def diverging() -> Training:
    """A training whose loss is not finite after its first steps."""
    one = training(1)
    one.optimizer.param_groups[0]["lr"] = one.optimizer.defaults["lr"] = 0.1
    with torch.no_grad():
        one.model[3].weight.mul_(1e38)  # type: ignore[index]
    return one


# --- simulations


def stacked(wanted: Simulation, folder: Path) -> Any:
    """A simulation's configuration, devices and folder after it has run with the backend."""
    prepared = prepare(wanted, folder)
    with closing(run_over_memory(*prepared, lambda store: None, make_backend=StackedModels)) as store:
        return prepared, record(store)


def test_simulation_has_the_same_results(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """States within float tolerance, and all else that does not follow from rounding."""
    alone = prepare(ALIKE, tmp_path / "alone")
    with closing(run_in_memory(alone)) as store:
        expected = record(store)
    together, found = stacked(ALIKE, tmp_path / "together")
    assert TOGETHER not in caplog.text
    assert found != expected, "to the bit they would differ, or nothing was stacked"
    assert found["asks"][0][:-1] == expected["asks"][0][:-1]
    files, others = device_files(alone), device_files(together)
    assert files.keys() == others.keys()
    for name, data in files.items():
        if name.endswith("state.safetensors"):
            model, other = unpack_state(data)["model"], unpack_state(others[name])["model"]
            torch.testing.assert_close(model, other, rtol=1e-3, atol=1e-4)


def test_report_counts_the_steps_of_stacked_trainings(tmp_path: Path) -> None:
    reports = [simulate(replace(ALIKE, backend=backend, out=tmp_path / backend)) for backend in ("local", "stacked")]
    assert reports[0].curves[0].spent == reports[1].curves[0].spent
    for one, other in zip(*(report.global_accuracy_by_round for report in reports), strict=True):
        assert one == pytest.approx(other, abs=0.02)  # one of 50 rows


@pytest.mark.slow
@pytest.mark.parametrize("name", long_except(REPRODUCIBLE, "feddkc", long=MECHANISMS))
def test_what_is_not_stacked_is_the_same_to_the_bit(
    tmp_path: Path, undisturbed: Undisturbed, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The devices of these runs have different numbers of rows, or methods with losses of their own."""
    alone = undisturbed(name)
    prepared, found = stacked(RUNS[name], tmp_path / "together")
    assert found == alone.record
    assert device_files(prepared) == alone.files


def test_networks_with_dropout_draw_what_they_draw_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wanted = replace(ALIKE, models=(dropping,))
    alone = prepare(wanted, tmp_path / "alone")
    with closing(run_in_memory(alone)) as store:
        expected = record(store)
    before = torch.get_rng_state()
    together, found = stacked(wanted, tmp_path / "together")
    assert torch.equal(torch.get_rng_state(), before)
    assert found == expected
    assert device_files(together) == device_files(alone)
    assert "of 12 trainings none ran together: 12 because the network has dropout" in caplog.text


class Counting(nn.Module):
    """Counts its batches in training, as batch-norm does."""

    batches: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("batches", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.batches += 1
        return x


def counting(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """A network with a buffer, which is another one on each device: stacked, only the first one's would count."""
    return split_sequential(nn.Sequential(nn.Flatten(), Counting(), nn.Linear(64, classes)), 2)


def test_networks_with_buffers_are_not_stacked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wanted = replace(ALIKE, models=(counting,), rounds=1)
    alone = prepare(wanted, tmp_path / "alone")
    with closing(run_in_memory(alone)) as store:
        expected = record(store)
    together, found = stacked(wanted, tmp_path / "together")
    assert found == expected
    assert device_files(together) == device_files(alone)
    assert "of 4 trainings none ran together: 4 because the network has buffers" in caplog.text


def large(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    layers = [nn.Flatten(), nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, classes)]
    return split_sequential(nn.Sequential(*layers), 3)


def test_large_networks_are_not_stacked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stacked(replace(ALIKE, models=(large,), rounds=1), tmp_path / "together")
    assert "of 4 trainings none ran together: 4 because the network has more than 10,000 parameters" in caplog.text


def failing(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """A network that ends its process's work in training."""
    model = dropping(input_shape, classes)
    model.register_forward_hook(_exit)
    return model


def _exit(module: nn.Module, *_: Any) -> None:
    if module.training:
        raise ZeroDivisionError("of the app")


def test_error_of_a_model_leaves_no_thread(tmp_path: Path) -> None:
    prepared = prepare(replace(ALIKE, models=(failing,)), tmp_path / "work")
    with pytest.raises(RunError):
        run_over_memory(*prepared, lambda store: None, make_backend=StackedModels)
    assert not [thread for thread in threading.enumerate() if thread.name == "stacked work"]


def test_interrupted_simulation_leaves_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fleetdistill_lab.simulation.backends.stacked_models.train_stacked", interrupt)
    prepared = prepare(ALIKE, tmp_path / "work")
    with pytest.raises(KeyboardInterrupt):
        run_over_memory(*prepared, lambda store: None, make_backend=StackedModels)
    assert not [thread for thread in threading.enumerate() if thread.name == "stacked work"]


def test_different_numbers_of_rows_are_not_stacked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wanted = replace(ALIKE, partition="dirichlet_by_class", alpha=0.5, seed=1)
    alone = prepare(wanted, tmp_path / "alone")
    assert len({spec.rows for spec in alone[1]}) == 4
    with closing(run_in_memory(alone)) as store:
        expected = record(store)
    together, found = stacked(wanted, tmp_path / "together")
    assert found == expected
    assert device_files(together) == device_files(alone)
    assert "12 because no other device has the same network and as many rows" in caplog.text
