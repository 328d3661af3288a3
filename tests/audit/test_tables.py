"""The attack on class tables among a method's own tensors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from audit.conftest import attacker_of, linked, members_of, message, small

from fleetdistill.knowledge import Array, NamedTensors
from fleetdistill.methods.base import Answer, Ask, DeviceMethod
from fleetdistill.models import build_model
from fleetdistill_lab.audit.audit import attack, audit
from fleetdistill_lab.audit.knowledge import PublicMoments
from fleetdistill_lab.audit.public_set import PublicSet
from fleetdistill_lab.audit.record import Rows
from fleetdistill_lab.audit.tables import read_table, table_scores
from fleetdistill_lab.baselines.shared import class_sums, embeddings_of

CROSS = np.array([[1.0, 0], [-1, 0], [0, 1], [0, -1]])
PUBLIC = PublicMoments(np.concatenate([CROSS, CROSS + np.array([5, 0])]), np.repeat([0, 1], 4))
"""Both classes have the covariance 2/3 in each feature; see `test_a_mean_is_weighed_with_and_without_a_row`."""


def test_sums_and_products_give_means_and_their_covariance() -> None:
    """Rows (0, 0) and (2, 0) of class 0, (1, 1) and (1, 3) of class 2: each class differs by 1 from its mean.

    The products less those of the means, ((6, 4), (4, 10)) - 2 (1, 0) (1, 0)' - 2 (1, 2) (1, 2)', are ((2, 0), (0, 2)).
    """
    sums, products = np.array([[2.0, 0], [0, 0], [2, 4]]), np.array([[6.0, 4], [4, 10]])
    (found,) = read_table({"counts": np.array([2, 0, 2]), "sums": sums, "products": products}, 3)
    assert (found.labels, found.counts.tolist(), found.df) == ((0, 2), [2, 2], 2)
    assert found.means.tolist() == [[1, 0], [1, 2]]
    assert found.covariance.tolist() == [[1, 0], [0, 1]]


def test_each_gaussian_of_a_mixture_is_read() -> None:
    """Four rows of class 1 with shares of a quarter and three quarters."""
    means = np.arange(8.0).reshape(2, 2, 2)
    tensors = {"counts": np.array([0, 4]), "shares": np.array([[0, 0], [0.25, 0.75]]), "means": means}
    for variances, covariance in (
        (np.ones((2, 2)), []),
        (np.full((2, 2, 2), 3.0), [[3, 0], [0, 3]]),
        (np.full((2, 2, 2, 2), 3.0), [[3, 3], [3, 3]]),
    ):
        found = read_table({**tensors, "variances": variances}, 2)
        assert [(one.labels, one.counts.tolist()) for one in found] == [((1,), [1]), ((1,), [3])]
        assert [one.means.tolist() for one in found] == [[[4, 5]], [[6, 7]]]
        assert [one.covariance.tolist() for one in found] == [covariance] * 2


@pytest.mark.parametrize(
    "tensors",
    [
        {"counts": np.ones(3)},
        {"logits": np.ones((3, 3))},
        {"counts": np.ones(2), "prototypes": np.ones((3, 4))},
        {"counts": np.ones(3), "prototypes": np.ones((2, 4))},
        {"counts": np.zeros(3), "prototypes": np.ones((3, 4))},
        {"counts": np.ones(3), "means": np.ones((3, 5)), "shares": np.ones((3, 2))},
        {"counts": np.ones(3), "means": np.ones((3, 6)), "shares": np.ones(3)},
    ],
)
def test_other_tensors_are_no_table(tensors: dict[str, Array]) -> None:
    assert read_table(tensors, 3) == []


@pytest.mark.parametrize("variances", [np.ones(2), np.ones((2, 1, 3)), np.ones((2, 1, 2, 3))])
def test_variances_of_another_shape_are_not_read(variances: Array) -> None:
    (found,) = read_table({"counts": np.array([1, 0]), "means": np.ones((2, 1, 2)), "variances": variances}, 2)
    assert found.covariance.size == 0


def test_a_row_is_scored_by_its_likeliest_gaussian() -> None:
    """x = (1, 2), five rows behind (.3, 0) and five behind (0, .3): .3 / (2/3) - .75 and .6 / (2/3) - .75."""
    x, labels = np.array([[1.0, 2]]), np.array([0])
    alone = read_table({"counts": np.array([5, 0]), "prototypes": np.array([[0.3, 0], [0, 0]])}, 2)
    mixture = {
        "counts": np.array([10, 0]),
        "shares": np.array([[0.5, 0.5], [0, 0]]),
        "means": np.array([[[0.3, 0], [0, 0.3]], np.zeros((2, 2))]),
        "variances": np.ones((2, 2)),
    }
    for table, expected in ((alone, -0.3), (read_table(mixture, 2), 0.15)):
        assert table_scores(table, x, labels, PUBLIC) == {"means": pytest.approx([expected], rel=1e-4)}


def test_products_of_few_rows_span_these() -> None:
    """Rows (0, 0, 0) and (2, 0, 0) differ along the first axis: (5, 0, 0) may be among them, (1, 1, 0) is not."""
    corners = np.concatenate([CROSS, np.zeros((4, 1))], axis=1) + np.array([0, 0, 1]) * np.array([[1], [-1], [1], [-1]])
    products = np.diag([4.0, 0, 0])
    table = read_table({"counts": np.array([2]), "sums": np.array([[2.0, 0, 0]]), "products": products}, 1)
    public = PublicMoments(corners, np.zeros(4, dtype=np.int64))
    scores = table_scores(table, np.array([[5.0, 0, 0], [1, 1, 0]]), np.array([0, 0]), public)["directions"]
    assert scores[0] == pytest.approx(0, abs=1e-9)
    assert scores[1] < -0.1


def test_fedcgs_of_few_rows_gives_all_of_them_away() -> None:
    """Each device has fewer rows than features."""
    result = audit(small("fedcgs"))
    attacks = result.parts["table"]
    assert list(attacks) == ["means", "covariance", "means and covariance", "directions"]
    assert attacks["directions"].linked == 1
    assert attacks["means"].linked > 0.05  # chance is 1 / (decoys + 1), below 0.01
    assert result.unattacked == {}


def test_fedpft_with_one_variance_has_means_alone() -> None:
    result = audit(small("fedpft"))
    assert list(result.parts["table"]) == ["means"]
    assert result.parts["table"]["means"].linked > 0.05


def test_full_mixtures_span_the_rows_of_a_class() -> None:
    result = audit(small("fedpft", covariance="full"))
    assert result.parts["table"]["directions"].linked > 0.9


def test_fedproto_is_attacked_with_a_model_of_the_servers() -> None:
    result = audit(small("fedproto", "cdkt_digits_small"))
    assert (list(result.parts["prototypes"]), result.unattacked) == (["means"], {})


def test_server_without_weights_trains_a_model_of_its_own(public: PublicSet) -> None:
    """The device half that it trains gets the device's asks and public rows, and its embedding reads the prototypes."""
    torch.manual_seed(4)
    trained = build_model("cdkt_digits_small", input_shape=(1, 8, 8), classes=10).eval()
    handled = []

    class Half(DeviceMethod):
        def handle(self, ask: Ask) -> Answer:
            handled.append((ask.round, len(self.local.data)))
            self.local.model.load_state_dict(trained.state_dict())
            return Answer(parts={}, samples=1)

    own = members_of(public, 200)
    taken = torch.cat([torch.nonzero(own.labels == label)[:2, 0] for label in range(10)])
    rows = Rows(own.inputs[taken], own.labels[taken])
    sums, counts = class_sums(embeddings_of(trained, rows.inputs).detach(), rows.labels, 10)
    part = NamedTensors(tensors={"prototypes": (sums / 2).numpy(), "counts": counts.numpy()})
    attacker = replace(attacker_of(public, "fedproto", "cdkt_digits_small"), device=Half)
    sent = [message({"prototypes": part}, number=number) for number in (1, 2)]
    assert linked(public, attacker, sent, rows)["prototypes", "means"] > 0.2  # chance .01
    assert handled == [(1, len(public.attacker)), (2, len(public.attacker))]
    assert attack(sent, replace(attacker, device=None), rows) == {}
