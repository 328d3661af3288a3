"""Training that comes to nothing finite is taken back."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from fleetdistill.errors import ConfigurationError, DataError, KnowledgeError
from fleetdistill.training.rollback import check_can_be_sent, snapshot, train_or_roll_back

RATE = ("server_learning_rate", 0.1)


def trained(after: float = 1.0, error: Exception | None = None) -> tuple[str | None, bool]:
    """What `train_or_roll_back` says, and whether weights, statistics and momentum are those of before."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 2)).pow(2).sum().backward()
        optimizer.step()

    def train() -> None:
        step()
        with torch.no_grad():
            model[0].weight[0, 0] *= after  # type: ignore[index, operator]
        if error is not None:
            raise error

    step()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    reason = train_or_roll_back(train, model, optimizer, rate=RATE)
    momentum = [item["momentum_buffer"] for item in optimizer.state_dict()["state"].values()]
    was = [item["momentum_buffer"] for item in before[1]["state"].values()]
    pairs = [*zip(model.state_dict().values(), before[0].values(), strict=True), *zip(momentum, was, strict=True)]
    return reason, all(torch.equal(now, then) for now, then in pairs)


def test_training_that_works_stays() -> None:
    assert trained() == (None, False)


@pytest.mark.parametrize("error", [KnowledgeError("the loss is inf"), DataError("one row only")])
def test_training_that_fails_leaves_everything_as_it_was(error: Exception) -> None:
    assert trained(error=error) == (str(error), True)


@pytest.mark.parametrize("after", [math.inf, math.nan])
def test_weights_that_are_not_finite_are_taken_back(after: float) -> None:
    reason, same = trained(after)
    assert same
    assert reason == "0.weight is not finite after training; server_learning_rate = 0.1 is probably too large"


def test_what_is_wrong_with_the_run_itself_is_not_hidden() -> None:
    with pytest.raises(ConfigurationError):
        trained(error=ConfigurationError("epochs is 0"))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 65505.0, -1e5])
def test_what_a_model_says_must_fit_the_runs_type_on_the_wire(value: float) -> None:
    with pytest.raises(
        KnowledgeError, match=r"the largest output is .*, the limit of float16 is 65504; server_learning_rate = 0\.1 is"
    ):
        check_can_be_sent(torch.tensor([[0.0, value]]), "float16", RATE)
    check_can_be_sent(torch.tensor([[0.0, -65504.0]]), "float16", RATE)
    check_can_be_sent(torch.empty(0, 3), "float16", RATE)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_float32_run_takes_values_beyond_float16_but_no_infinity(value: float) -> None:
    with pytest.raises(KnowledgeError, match=r"the limit of float32 is 3\.40282e\+38"):
        check_can_be_sent(torch.tensor([value]), "float32", RATE)
    check_can_be_sent(torch.tensor([1e5, -3.4e38]), "float32", RATE)


def test_a_way_back_leads_to_where_it_was_made_more_than_once() -> None:
    model = nn.Linear(1, 1, bias=False)
    before = model.weight.item()
    restore = snapshot(model)
    for value in (3.0, 5.0):
        nn.init.constant_(model.weight, value)
        restore()
        assert model.weight.item() == before
