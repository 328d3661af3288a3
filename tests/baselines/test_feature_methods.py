"""FedGKT and FedICT: the losses' numbers through the real halves, their limits, and hostile input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from baselines.bed import SameLogits, make_device, make_feature_server, make_rows, tiny_model
from methods.tiny_context import CLASSES, INPUTS
from torch import Tensor
from torch.testing import assert_close

from fleetdistill.errors import ConfigurationError, KnowledgeError, WireError
from fleetdistill.knowledge import CUT, RefinedKnowledge, SampleKnowledge
from fleetdistill.methods.base import Ask
from fleetdistill.training.local_training import TensorData
from fleetdistill.training.losses import distillation_loss, soft_targets
from fleetdistill_server.methods.feddkc.server import Upload
from fleetdistill_server.testing import FakeCohort, always, play

STUDENT, TEACHER = (1.0, 2.0, 3.0), (3.0, 2.0, 1.0)
SHARES = {"d0": (0.7, 0.2, 0.1), "d1": (0.1, 0.4, 0.5)}
"""Label shares of two devices with equally many rows; those of both together are 0.4, 0.3 and 0.3."""
BOTH = ["fedgkt", "fedict"]
both = pytest.mark.parametrize("method", BOTH)


def labels_of(shares: tuple[float, ...]) -> Tensor:
    """Labels of ten rows."""
    return torch.repeat_interleave(torch.arange(CLASSES), torch.tensor([round(10 * share) for share in shares]))


def knowledge_of(device: str) -> SampleKnowledge:
    """Ten rows of a device in `SHARES`."""
    labels, seed = labels_of(SHARES[device]), int(device[1])
    features = torch.randn(10, INPUTS, generator=torch.Generator().manual_seed(seed)) + labels[:, None]
    return SampleKnowledge(
        sample_ids=np.arange(10) + 100 * seed,
        features={CUT: features.numpy()},
        logits=torch.nn.functional.one_hot(labels, CLASSES).float().numpy(),
        labels=labels.numpy().astype(np.int32),
    )


def run_rounds(server: Any, *devices: str, rounds: int = 1) -> list[FakeCohort]:
    return play(server, {one: always({"knowledge": knowledge_of(one)}) for one in devices}, rounds=rounds)


def loss_of_device(method: str, labels: Tensor, *, taught: bool = True, **settings: Any) -> float:
    """Loss of a device's first step, whose model gives every row STUDENT and which gets TEACHER for every row."""
    rows = len(labels)
    data = TensorData(torch.zeros(rows, INPUTS), labels)
    device = make_device(method, SameLogits(STUDENT), data, **settings)
    ids, values = np.arange(rows), np.tile(np.array(TEACHER, np.float32), (rows, 1))
    taught_by = RefinedKnowledge(valid=True, sample_ids=ids, values=values)
    device.handle(
        Ask(round=2, step="train", seed=0, parts={"knowledge": taught_by if taught else RefinedKnowledge(valid=False)})
    )
    return float(device.trained.mean_loss)


def loss_of_server(server: Any, weights_bc: Tensor | None = None) -> float:
    server.predictor = SameLogits(STUDENT)
    targets_bc = soft_targets(torch.tensor([TEACHER]), server.config.temperature)
    return float(server.loss(torch.zeros(1, INPUTS), torch.tensor([2]), targets_bc, weights_bc).detach())


@pytest.mark.parametrize(("tau", "expected"), [(1.0, 1.150421), (3.0, 1.309222), (100.0, 1.333311)])
def test_distillation_term_of_fedgkt(tau: float, expected: float) -> None:
    labels, exact = torch.tensor([2]), 1e-5 if tau < 10 else 1e-3  # float32 times the temperature squared
    assert loss_of_device("fedgkt", labels, ce_weight=0.0, beta=1.0, temperature=tau) == pytest.approx(
        expected, abs=exact
    )
    server = make_feature_server("fedgkt", server_ce_weight=0.0, temperature=tau)
    assert loss_of_server(server) == pytest.approx(expected, abs=exact)


def test_losses_of_fedgkt_are_those_of_its_code() -> None:
    """CE 0.407606, KD 1.309222 with temperature 3; alpha = 1.5 is on the device's KD and on the server's CE."""
    assert loss_of_device("fedgkt", torch.tensor([2])) == pytest.approx(2.371439, abs=1e-5)
    assert loss_of_server(make_feature_server("fedgkt")) == pytest.approx(1.920631, abs=1e-5)


def test_first_round_of_fedgkt_is_cross_entropy() -> None:
    assert loss_of_device("fedgkt", torch.tensor([2]), taught=False) == pytest.approx(0.407606, abs=1e-6)


@both
def test_paper_has_one_weight_on_both_sides(method: str) -> None:
    """CE 0.407606 + 1.5 times KL 1.150421."""
    server = make_feature_server(method, paper=True)
    assert loss_of_server(server) == pytest.approx(2.133237, abs=1e-5)
    assert server.config.beta == server.config.server_beta == 1.5
    assert server.config.server_order == "sequential"
    if method == "fedgkt":
        assert loss_of_device(method, torch.tensor([2]), paper=True) == pytest.approx(2.133237, abs=1e-5)


def test_teacher_that_agrees_adds_nothing() -> None:
    probs_bc = soft_targets(torch.tensor([STUDENT]), 3.0)
    assert float(distillation_loss(torch.tensor([STUDENT]), probs_bc, 3.0)) == pytest.approx(0, abs=1e-6)


@both
def test_server_without_distillation_learns_from_labels_alone(method: str) -> None:
    """Whatever logits devices send, the predictor is the same."""
    states = []
    for value in (0.0, 5.0):
        server = make_feature_server(method, server_beta=0.0, teacher_guard=False)
        sent = knowledge_of("d0")
        play(server, {"d0": always({"knowledge": with_logits(sent, value)})}, rounds=2)
        states.append(server.predictor.state_dict())
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name])


def with_logits(sent: SampleKnowledge, value: float) -> SampleKnowledge:
    assert sent.logits is not None
    return SampleKnowledge(
        sample_ids=sent.sample_ids, features=sent.features, logits=sent.logits * value, labels=sent.labels
    )


def test_own_classes_weigh_more_on_a_device_of_fedict() -> None:
    """KL 1.150421 with the FPKD term 0.304444 of shares 0.7, 0.2, 0.1; without a cross-entropy."""
    loss = loss_of_device("fedict", labels_of(SHARES["d0"]), ce_weight=0.0, beta=1.0, temperature=1.0)
    assert loss == pytest.approx(1.150421 + 0.304444, abs=1e-5)


def test_uniform_shares_of_fedict_add_a_ninth() -> None:
    loss = loss_of_device("fedict", torch.arange(CLASSES), ce_weight=0.0, beta=1.0, temperature=1.0)
    assert loss == pytest.approx(1.150421 + 0.127825, abs=1e-5)


def test_class_that_a_device_lacks_has_weight_1() -> None:
    device = make_device("fedict", SameLogits(STUDENT), TensorData(torch.zeros(2, INPUTS), torch.tensor([0, 0])))
    assert_close(device.class_weights(), torch.tensor([1 + 1 / 3, 1.0, 1.0]))


@pytest.mark.parametrize(
    ("alignment", "weights", "term"),
    [
        ("similarity", [1.863506] * 3, 0.863506 * 1.150421),
        ("class_balance", [1 - 0.042857, 1 + 0.014286, 1 + 0.028571], -0.062165),
    ],
)
def test_server_of_fedict_weights_by_label_shares(alignment: str, weights: list[float], term: float) -> None:
    server = make_feature_server("fedict", alignment=alignment, server_ce_weight=0.0, temperature=1.0)
    factors = server.class_weights([upload_of(device) for device in SHARES])
    assert factors["d0"].tolist() == pytest.approx(weights, abs=1e-6)
    assert loss_of_server(server, factors["d0"][None]) == pytest.approx(1.150421 + term, abs=1e-5)


def upload_of(device: str) -> Upload:
    none = torch.zeros(0)
    return Upload(device, none, none, none, labels_of(SHARES[device]))


@pytest.mark.parametrize(("alignment", "weight"), [("similarity", 2.0), ("class_balance", 1.0)])
def test_device_with_the_shares_of_all_is_not_balanced(alignment: str, weight: float) -> None:
    factors = make_feature_server("fedict", alignment=alignment).class_weights([upload_of("d0")])
    assert factors["d0"].tolist() == pytest.approx([weight] * CLASSES)


def test_each_row_gets_the_weights_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    server = make_feature_server("fedict", alignment="class_balance", batch_size=10, server_epochs=1)
    seen = list[Tensor]()
    plain = type(server).loss

    def noting(half: Any, *given: Tensor) -> Any:
        seen.append(given[3])
        return plain(half, *given)

    monkeypatch.setattr(type(server), "loss", noting)
    run_rounds(server, *SHARES)
    expected = make_feature_server("fedict", alignment="class_balance").class_weights([*map(upload_of, SHARES)])
    for weights_bc, device in zip(seen, SHARES, strict=True):  # one device after the other, ten rows each
        assert_close(weights_bc, expected[device].expand(10, -1))


def test_forgotten_device_leaves_the_shares_of_all() -> None:
    server = make_feature_server("fedict")
    (cohort,) = run_rounds(server, *SHARES)
    server.forget("d1", cohort)
    state = server.state_dict()
    assert set(state["counts"]) == {"d0"}
    assert state["counts"]["d0"].tolist() == [7, 2, 1]
    again = make_feature_server("fedict")
    again.load_state_dict(state)
    assert again.class_weights([upload_of("d0")])["d0"].tolist() == pytest.approx([2.0] * CLASSES)


@pytest.mark.parametrize("shape", [(2,), (1, 3), (4,)])
def test_class_weights_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    logits_bc = torch.zeros(2, CLASSES)
    with pytest.raises(KnowledgeError, match="class weights"):
        distillation_loss(logits_bc, logits_bc.softmax(1), 1.0, class_weights=torch.ones(shape))


def test_class_weights_of_1_change_nothing() -> None:
    logits_bc, probs_bc = torch.randn(5, CLASSES), torch.randn(5, CLASSES).softmax(1)
    plain = distillation_loss(logits_bc, probs_bc, 2.0)
    assert_close(distillation_loss(logits_bc, probs_bc, 2.0, class_weights=torch.ones(CLASSES)), plain)


@both
@pytest.mark.parametrize("bad", [np.full((20, CLASSES), np.nan), np.zeros((20, CLASSES + 1))], ids=["nan", "shape"])
def test_bad_logits_from_the_server_are_refused(method: str, bad: Any) -> None:
    device = make_device(method, tiny_model(), make_rows(0))
    sent = RefinedKnowledge(valid=True, sample_ids=np.arange(20), values=bad.astype(np.float32))
    with pytest.raises((WireError, KnowledgeError)):  # the loss of a row that is not a number says so
        device.handle(Ask(round=2, step="train", seed=0, parts={"knowledge": sent}))


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedgkt", {"refinement": "skr"}),
        ("fedgkt", {"ce_weight": -1.0}),
        ("fedgkt", {"server_ce_weight": -1.0}),
        ("fedict", {"labels": False}),
        ("fedict", {"alignment": "none"}),
        ("fedict", {"prior_divisor": 0.0}),
        ("fedict", {"balance_divisor": -7.0}),
    ],
)
def test_settings_out_of_range_are_refused(method: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(settings))):
        make_feature_server(method, **settings)
