"""Baselines of one exchange: classifiers worked out by hand, exactness, and hostile input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from baselines.bed import SameLogits, make_device, make_feature_server, make_rows
from methods.tiny_context import CLASSES, INPUTS
from torch.testing import assert_close

from fleetdistill.errors import ConfigurationError, WireError
from fleetdistill.knowledge import GENERAL, Array, NamedTensors
from fleetdistill.methods.base import Ask
from fleetdistill.training.local_training import TensorData
from fleetdistill_lab.baselines.fedpft import fit_mixture
from fleetdistill_server.testing import FakeCohort, Member, always, play

METHODS = ["fedcgs", "fedpft"]
every = pytest.mark.parametrize("method", METHODS)


def device_of(method: str, data: TensorData, **settings: Any) -> Any:
    return make_device(method, SameLogits([0.0] * CLASSES), data, **settings)


def numbers(*pairs: tuple[float, int]) -> TensorData:
    """Rows of one feature with their classes."""
    return TensorData(torch.tensor([[value] for value, _ in pairs]), torch.tensor([label for _, label in pairs]))


def parts_of(data: TensorData, devices: int) -> Sequence[TensorData]:
    return [TensorData(data.inputs[start::devices], data.labels[start::devices]) for start in range(devices)]


def table_of(**tensors: Any) -> Member:
    """A member that sends this table, and takes any classifier."""
    sent = {"table": NamedTensors(tensors=tensors, reveals=["features", "counts"])}
    return always(sent)


def test_classifier_of_fedcgs_by_hand() -> None:
    """Means 1 and 5 with prior 1/2; the four rows have the variance (56 - 4 * 3 * 3) / 3 = 20 / 3."""
    server = make_feature_server("fedcgs", inputs=1, ridge=0.0)
    members = {
        "d0": device_of("fedcgs", numbers((0.0, 0), (2.0, 0)), ridge=0.0),
        "d1": device_of("fedcgs", numbers((4.0, 1), (6.0, 1)), ridge=0.0),
    }
    play(server, members)
    assert server.head["weight"][:, 0].tolist() == pytest.approx([0.15, 0.75, 0.0])
    assert server.head["bias"].tolist() == pytest.approx([np.log(0.5) - 0.075, np.log(0.5) - 1.875, -1e3])


def test_fedcgs_is_the_classifier_of_all_rows_in_one_place() -> None:
    data, heads = make_rows(0, rows=60), []
    for devices in (1, 3):
        server = make_feature_server("fedcgs")
        play(server, {f"d{number}": device_of("fedcgs", part) for number, part in enumerate(parts_of(data, devices))})
        heads.append(server.head)
    assert_close(heads[0], heads[1], atol=1e-4, rtol=1e-4)


def test_ridge_is_a_share_of_the_mean_variance() -> None:
    server = make_feature_server("fedcgs", inputs=1, ridge=0.5)
    play(server, {"d0": device_of("fedcgs", numbers((0.0, 0), (2.0, 0), (4.0, 1), (6.0, 1)))})
    assert server.head["weight"][:, 0].tolist() == pytest.approx([0.1, 0.5, 0.0])


@every
def test_variant_has_the_servers_outputs_and_own_network_stays(method: str) -> None:
    server, device = make_feature_server(method), device_of(method, make_rows(0, rows=60))
    before = device.local.model.state_dict()["logits_c"].clone()
    assert device.variants() == {}
    play(server, {"d0": device})
    inputs = make_rows(1).inputs
    with torch.no_grad():
        assert_close(device.variants()[GENERAL](inputs), server.global_model()(inputs))
        right = device.variants()[GENERAL](make_rows(0, rows=60).inputs).argmax(1) == make_rows(0, rows=60).labels
    assert right.double().mean() > 0.5
    assert torch.equal(device.local.model.state_dict()["logits_c"], before)
    again = device_of(method, make_rows(0, rows=60))
    again.load_state_dict(device.state_dict())
    with torch.no_grad():
        assert_close(again.variants()[GENERAL](inputs), device.variants()[GENERAL](inputs))


@every
def test_later_rounds_ask_nobody_who_has_all(method: str) -> None:
    server, members = make_feature_server(method), {"d0": device_of(method, make_rows(0, rows=30))}
    first, second = play(server, members, rounds=2)
    assert [asked.step for asked in first.asked] == ["summarise", "learn"]
    assert second.asked == []
    assert not server.is_due({"d0": ""})
    assert server.is_due({"d0": "", "d1": ""})


@every
def test_forgotten_device_leaves_table_and_classifier(method: str) -> None:
    rows = parts_of(make_rows(0, rows=60), 2)
    server, alone = make_feature_server(method), make_feature_server(method)
    (cohort,) = play(server, {f"d{number}": device_of(method, part) for number, part in enumerate(rows)})
    server.forget("d1", cohort)
    play(alone, {"d0": device_of(method, rows[0])})
    assert set(server.state_dict()["tables"]) == {"d0"}
    assert_close(server.head, alone.head)
    again = make_feature_server(method)
    again.load_state_dict(server.state_dict())
    assert_close(again.head, server.head)


def cgs_table(counts: Sequence[int], value: float) -> Member:
    sums: Array = np.full((CLASSES, INPUTS), value, np.float32)
    products: Array = np.eye(INPUTS, dtype=np.float32)
    return table_of(sums=sums, products=products, counts=np.array(counts, np.int64))


@pytest.mark.parametrize("counts", [[-1, 5, 5], [0, 0, 0]])
def test_impossible_counts_are_left_out(counts: Sequence[int]) -> None:
    server, alone = make_feature_server("fedcgs"), make_feature_server("fedcgs")
    honest = make_rows(0, rows=30)
    (cohort,) = play(server, {"d0": device_of("fedcgs", honest), "d1": cgs_table(counts, 3.0)})
    play(alone, {"d0": device_of("fedcgs", honest)})
    assert [event.kind for event in cohort.events] == ["upload-left-out"]
    assert_close(server.head, alone.head)


def test_nothing_usable_gives_no_classifier() -> None:
    server = make_feature_server("fedcgs")
    (cohort,) = play(server, {"d0": cgs_table([0, 0, 0], 1.0)})
    assert server.head is None
    assert server.global_model() is None
    assert [asked.step for asked in cohort.asked] == ["summarise"]


def test_classifier_that_float32_cannot_hold_is_withheld() -> None:
    server = make_feature_server("fedcgs")
    sums: Array = np.array([3e38, -3e38, 0], np.float32).repeat(INPUTS).reshape(CLASSES, INPUTS)
    identity = np.eye(INPUTS, dtype=np.float32)
    (cohort,) = play(server, {"d0": table_of(sums=sums, products=identity, counts=np.ones(CLASSES, np.int64))})
    assert kinds(cohort) == ["knowledge-left-out"]
    assert server.head is None


def kinds(cohort: FakeCohort) -> list[str]:
    return [event.kind for event in cohort.events]


def test_device_with_most_rows_counts_as_three() -> None:
    """Two devices of one row and one that claims 10^12: it counts as three, as if it had sent a third of its sums."""
    server = make_feature_server("fedcgs", robust="gross")
    devices = [device_of("fedcgs", part) for part in parts_of(make_rows(0, rows=2), 2)]
    play(server, {"d0": devices[0], "d1": devices[1], "d2": cgs_table([0, 0, 10**12], 0.0)})
    prior = server.head["bias"]
    assert torch.isfinite(prior).all()
    weight = server.head["weight"].double()
    assert weight[2].abs().max() < 1e-6  # its sums are 0
    assert float(prior[2]) == pytest.approx(np.log(3 / 5), abs=1e-5)


@every
@pytest.mark.parametrize(
    "bad",
    [
        {"weight": np.zeros((CLASSES, INPUTS + 1), np.float32)},
        {"weight": np.full((CLASSES, INPUTS), np.nan, np.float32)},
        {"bias": np.full(CLASSES, np.inf, np.float32)},
        {"more": np.zeros(1, np.float32)},
    ],
    ids=["shape", "nan", "infinity", "name"],
)
def test_bad_classifier_of_the_server_is_refused(method: str, bad: dict[str, Any]) -> None:
    device = device_of(method, make_rows(0))
    tensors = {"weight": np.zeros((CLASSES, INPUTS), np.float32), "bias": np.zeros(CLASSES, np.float32), **bad}
    with pytest.raises(WireError, match="the server's"):
        device.handle(Ask(round=1, step="learn", seed=0, parts={"head": NamedTensors(tensors=tensors)}))
    assert device.variants() == {}


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedcgs", {"ridge": -0.1}),
        ("fedpft", {"components": 0}),
        ("fedpft", {"covariance": "tied"}),
        ("fedpft", {"drawn_rows": 0}),
        ("fedpft", {"head_epochs": 0}),
        ("fedpft", {"head_rate": 0.0}),
    ],
)
def test_settings_out_of_range_are_refused(method: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(settings))):
        make_feature_server(method, **settings)


ROWS = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 4.0], [2.0, 4.0]]).double()


@pytest.mark.parametrize(
    ("covariance", "expected"),
    [("spherical", 2.5), ("diagonal", [1.0, 4.0]), ("full", [[1.0, 0.0], [0.0, 4.0]])],
)
def test_one_gaussian_has_mean_and_variances_of_the_rows(covariance: str, expected: Any) -> None:
    """Means 1 and 2; variances ((-1)^2 + 1^2) / 2 = 1 and 4, whose mean is 2.5."""
    mixture = fit_mixture(ROWS, 1, covariance, torch.Generator())
    assert mixture["means"].tolist() == [[1, 2]]
    assert mixture["shares"].tolist() == [1]
    assert_close(mixture["variances"][0], torch.tensor(expected).double(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("covariance", ["spherical", "diagonal", "full"])
def test_two_gaussians_find_two_groups_of_rows(covariance: str) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(90, 2, generator=generator, dtype=torch.float64)
    rows[:30] += 20
    mixture = fit_mixture(rows, 2, covariance, generator)
    order = mixture["means"][:, 0].argsort()
    assert_close(mixture["shares"][order], torch.tensor([2 / 3, 1 / 3]).double(), atol=1e-3, rtol=0)
    assert_close(mixture["means"][order[1]], rows[:30].mean(0), atol=1e-3, rtol=0)


def test_mixture_has_no_more_components_than_rows() -> None:
    mixture = fit_mixture(ROWS[:2], 5, "diagonal", torch.Generator())
    assert mixture["means"].shape == (2, 2)


@pytest.mark.parametrize("covariance", ["spherical", "diagonal", "full"])
def test_head_of_drawn_rows_knows_the_classes(covariance: str) -> None:
    settings: dict[str, Any] = {"covariance": covariance, "components": 2}
    server = make_feature_server("fedpft", **settings)
    data = make_rows(0, rows=90)
    far = TensorData(data.inputs + 9 * torch.eye(INPUTS)[data.labels], data.labels)
    play(server, {f"d{number}": device_of("fedpft", one, **settings) for number, one in enumerate(parts_of(far, 3))})
    with torch.no_grad():
        assert (server.global_model()(far.inputs).argmax(1) == far.labels).double().mean() > 0.9


def pft_table(counts: Sequence[int], mean: float = 0.0, variance: float = 1.0, share: float = 1.0) -> Member:
    return table_of(
        shares=np.full((CLASSES, 1), share, np.float32),
        means=np.full((CLASSES, 1, INPUTS), mean, np.float32),
        variances=np.full((CLASSES, 1), variance, np.float32),
        counts=np.array(counts, np.int64),
    )


def test_server_draws_no_more_rows_than_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    server = make_feature_server("fedpft", drawn_rows=100, head_epochs=1)
    drawn = list[int]()
    steps = type(server.context.trainer).train_steps

    def noting(trainer: Any, model: Any, rows: int, **others: Any) -> Any:
        drawn.append(rows)
        return steps(trainer, model, rows, **others)

    monkeypatch.setattr(type(server.context.trainer), "train_steps", noting)
    play(server, {"d0": pft_table([10**15, 10**15, 2 * 10**15])})
    assert drawn == [100]


def test_mixture_without_shares_gives_no_classifier() -> None:
    server = make_feature_server("fedpft")
    play(server, {"d0": pft_table([5, 5, 5], share=-1.0)})
    assert server.head is None


def test_largest_numbers_leave_a_finite_classifier() -> None:
    server = make_feature_server("fedpft")
    play(server, {"d0": pft_table([5, 5, 5], mean=3e38, variance=3e38)})
    assert all(bool(one.isfinite().all()) for one in server.head.values())


def test_training_that_diverges_is_told_of() -> None:
    server = make_feature_server("fedpft", head_rate=3e37)
    (cohort,) = play(server, {"d0": pft_table([5, 5, 5], mean=10)})
    assert server.head is None
    assert kinds(cohort) == ["distillation-undone"]
