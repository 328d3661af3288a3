"""Baselines whose devices distil a frozen model: the loss by hand, its limits, and which model teaches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from baselines.bed import make_config, make_device, make_fleet, make_rows, norm_model, quadratic_fleet, weights_of
from baselines.personal_bed import assert_equal, state_of
from torch import Tensor, nn

from fleetdistill.errors import ConfigurationError, WireError
from fleetdistill.knowledge import ModelParameters, Plan
from fleetdistill.methods.base import Ask
from fleetdistill_lab.baselines.fedgkd import mean_state
from fleetdistill_lab.baselines.shared import TaughtDevice
from fleetdistill_server.testing import play

TAUGHT = ("pfedsd", "fedgkd", "fedlsd", "fedntd")


class Fixed(nn.Module):
    """Logits that do not depend on the input."""

    def __init__(self, *logits: float) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor([logits], dtype=torch.float64))
        self.extractor = nn.Identity()

    def features(self, x: Tensor) -> Tensor:
        return x

    def predict(self, x: Tensor) -> Tensor:
        return self.logits.expand(len(x), -1)

    def forward(self, x: Tensor) -> Tensor:
        return self.predict(x)


def loss_of(
    method: str, student: tuple[float, ...], teacher: tuple[float, ...], **settings: Any
) -> tuple[float, list[float]]:
    """Returns the loss of a row of class 0, and its gradient by the student's logits."""
    own = Fixed(*student)
    device = make_device(method, own, make_rows(0, classes=len(student)), classes=len(student), beta=1.0, **settings)
    device.teacher = Fixed(*teacher)
    loss = device.loss(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))
    loss.backward()
    assert own.logits.grad is not None
    return loss.item(), own.logits.grad[0].tolist()


@pytest.mark.parametrize(
    ("method", "student", "teacher", "expected"),
    [
        ("pfedsd", (2.0, 0.0, 0.0), (0.0, 2.0, 0.0), 1.600503),  # cross-entropy 0.239545 + 1.360958
        ("pfedsd", (2.0, 0.0, 0.0), (2.0, 0.0, 0.0), 0.239545),
        ("fedlsd", (2.0, 1.0, 0.0), (5.0, 1.0, 1.0), 0.407606 + 0.283288),
        ("fedntd", (2.0, 1.0, 0.0), (5.0, 1.0, 1.0), 0.407606 + 0.120115),
        ("fedgkd", (2.0, 1.0, 0.0), (5.0, 1.0, 1.0), 0.407606 + 0.283288),
        ("fedntd", (2.0, 0.0), (-3.0, 1.0), 0.126928),  # cross-entropy alone: one class is left, with probability 1
    ],
)
def test_loss_by_hand(method: str, student: tuple[float, ...], teacher: tuple[float, ...], expected: float) -> None:
    assert loss_of(method, student, teacher)[0] == pytest.approx(expected, abs=1e-6)


def test_fedlsd_may_take_the_rest_of_cross_entropy() -> None:
    """With beta = 1 cross-entropy has the weight 0."""
    assert loss_of("fedlsd", (2.0, 1.0, 0.0), (5.0, 1.0, 1.0), mix=True)[0] == pytest.approx(0.283288, abs=1e-6)
    with pytest.raises(ConfigurationError, match="at most 1 with mix"):
        make_config("fedlsd", beta=1.5, mix=True)


@pytest.mark.parametrize("change", [(-50.0, 5.0), (2.0, -50.0)], ids=["student", "teacher"])
def test_fedntd_ignores_logits_of_the_true_class(change: tuple[float, float]) -> None:
    """The loss changes by the cross-entropy alone, and so does the true logit's gradient, softmax - 1."""
    own, taught = change
    cross_entropy = torch.nn.functional.cross_entropy(torch.tensor([[own, 1.0, 0.0]]).double(), torch.tensor([0]))
    loss, gradient = loss_of("fedntd", (own, 1.0, 0.0), (taught, 1.0, 1.0))
    assert loss == pytest.approx(float(cross_entropy) + 0.120115, abs=1e-6)
    assert gradient[0] == pytest.approx(float(torch.tensor([own, 1.0, 0.0]).double().softmax(0)[0]) - 1, abs=1e-9)


@pytest.mark.parametrize("method", TAUGHT)
def test_equal_teacher_has_the_gradient_of_cross_entropy(method: str) -> None:
    """The gradient is softmax - (1, 0, 0)."""
    gradient = loss_of(method, (2.0, 1.0, 0.0), (2.0, 1.0, 0.0))[1]
    expected = torch.tensor([2.0, 1.0, 0.0]).double().softmax(0) - torch.tensor([1.0, 0.0, 0.0])
    assert gradient == pytest.approx(expected.tolist(), abs=1e-7)


def test_temperature_scales_the_distillation_loss() -> None:
    """4 KL(softmax(t / 2) || softmax(s / 2)) of the logits (0, 2, 0) and (2, 0, 0), by their two probabilities."""
    high, low = (float(p) for p in torch.tensor([1.0, 0.0, 0.0]).softmax(0)[:2])
    expected = 0.239545 + 4 * (high - low) * 1.0  # ln(high / low) is 1
    assert loss_of("pfedsd", (2.0, 0.0, 0.0), (0.0, 2.0, 0.0), temperature=2.0)[0] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("method", TAUGHT)
@pytest.mark.parametrize("settings", [{"beta": -0.1}, {"temperature": 0.0}])
def test_settings_out_of_range_are_refused(method: str, settings: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError):
        make_config(method, **settings)


@pytest.mark.parametrize("method", TAUGHT)
def test_without_its_term_it_is_fedavg(method: str) -> None:
    assert_equal(end_of("fedavg", 3), end_of(method, 3, beta=0.0))


def end_of(method: str, rounds: int, **settings: Any) -> dict[str, Tensor]:
    """Returns the global model after some rounds of two devices."""
    server, members = make_fleet(method, weighting="samples", **{"local_epochs": 3, **settings})
    play(server, members, rounds=rounds)
    return state_of(server.model)


@pytest.mark.parametrize(("method", "rounds"), [("fedlsd", 1), ("fedntd", 1), ("fedgkd", 2)])
def test_first_step_is_that_of_cross_entropy(method: str, rounds: int) -> None:
    """The teacher is the model itself, so that the distillation loss is 0 and has no gradient."""
    settings = {"models": 1} if method == "fedgkd" else {}
    plain, taught = end_of("fedavg", rounds, local_epochs=1), end_of(method, rounds, local_epochs=1, **settings)
    for name, tensor in plain.items():
        torch.testing.assert_close(tensor, taught[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", ["fedlsd", "fedntd"])
def test_the_received_model_teaches_in_eval_mode(method: str) -> None:
    server, members = make_fleet(method, "norm_model", local_epochs=2)
    start = state_of(server.model)
    (cohort,) = play(server, members)
    device = members["d0"]
    assert_equal(start, state_of(device.teacher))
    assert not any(part.training for part in device.teacher.modules())
    assert list(cohort.sent("d0")[0]) == ["parameters"]


@pytest.mark.parametrize(("models", "expected"), [(5, [1.0, 1.5, 7 / 3, 3.75, 6.2, 12.4]), (3, [1.0, 1.5, 7 / 3])])
def test_teacher_of_fedgkd_is_the_mean_of_the_last_models(
    models: int, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices of the centres 1, 2, 4, ... 32 in turn, which a step of rate 1 reaches: the means are those numbers."""
    monkeypatch.setattr(TaughtDevice, "loss", lambda half, x, y: ((half.local.model.w - x) ** 2 / 2).mean())
    server, members = quadratic_fleet("fedgkd", monkeypatch, centres=(1.0, 1.0), learning_rate=1.0, models=models)
    (cohort,) = play(server, members)
    assert list(cohort.sent("d0")[0]) == ["parameters", "plan"], "nothing teaches in round 1"
    for number, teacher in enumerate(expected, start=1):
        for member in members.values():
            member.local.data.inputs.fill_(2.0**number)
        (cohort,) = play(server, members)
        sent = cohort.sent("d0")[0]["teacher"]
        assert sent.parameters["w"][0] == pytest.approx(teacher, rel=1e-6)  # type: ignore[attr-defined]
        assert float(members["d0"].teacher.w) == pytest.approx(teacher, rel=1e-6)
        assert weights_of(server, members)[-1] == 2.0**number
    assert len(server.state_dict()["last"]) == min(models, len(expected) + 1)


def test_fedgkd_of_one_model_is_taught_by_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TaughtDevice, "loss", lambda half, x, y: ((half.local.model.w - x) ** 2 / 2).mean())
    server, members = quadratic_fleet("fedgkd", monkeypatch, centres=(32.0, 32.0), learning_rate=1.0, models=1)
    play(server, members, rounds=2)
    assert float(members["d0"].teacher.w) == 32.0


def test_fedgkd_of_one_model_sends_no_teacher() -> None:
    server, members = make_fleet("fedgkd", models=1)
    first, second = play(server, members, rounds=2)
    assert [list(cohort.sent("d0")[0]) for cohort in (first, second)] == [["parameters", "plan"]] * 2
    assert members["d0"].teacher is not None
    (exchange,) = server.run_exchanges()
    (other,) = make_fleet("fedgkd")[0].run_exchanges()
    assert other.nbytes("down", "float32") == 2 * exchange.nbytes("down", "float32")


def test_fedgkd_continues_from_its_state() -> None:
    server, members = make_fleet("fedgkd", "norm_model", models=2)
    play(server, members, rounds=3)
    again, _ = make_fleet("fedgkd", "norm_model", models=2)
    again.load_state_dict(server.state_dict())
    for name, array in server.message()["teacher"].parameters.items():
        assert (array == again.message()["teacher"].parameters[name]).all()


def test_mean_of_models_keeps_types() -> None:
    first, second = state_of(norm_model()), state_of(norm_model())
    second["stages.body.1.num_batches_tracked"] += 4
    mean = mean_state([first, second])
    assert {name: one.dtype for name, one in mean.items()} == {name: one.dtype for name, one in first.items()}
    assert int(mean["stages.body.1.num_batches_tracked"]) == 2


def test_teacher_of_a_hostile_server_is_refused() -> None:
    server, members = make_fleet("fedgkd")
    play(server, members)
    good = server.message()
    teacher = good["teacher"]
    nan = ModelParameters(parameters={name: one * float("nan") for name, one in teacher.parameters.items()})
    cut = ModelParameters(parameters=dict(list(teacher.parameters.items())[1:]))
    missing = {name: part for name, part in good.items() if name != "teacher"}
    for bad in ({**good, "teacher": nan}, {**good, "teacher": cut}, {**good, "plan": Plan(values={})}, missing):
        with pytest.raises(WireError):
            members["d0"].handle(Ask(round=2, step="train", seed=0, parts=bad))
