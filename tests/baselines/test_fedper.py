"""FedPer and FedRep: what stays on a device, and in which order it trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from baselines.bed import make_config, make_device, make_fleet, make_rows, norm_model, tiny_model
from baselines.personal_bed import (
    assert_equal,
    base_and_head,
    baseless,
    headless,
    members_of,
    scale_devices,
    small_server,
    state_of,
)
from torch import nn

from fleetdistill.errors import ConfigurationError, WireError
from fleetdistill.knowledge import ModelParameters
from fleetdistill.methods.base import Ask
from fleetdistill.methods.fedavg.device import FedAvgDevice
from fleetdistill.training.local_training import TensorData
from fleetdistill.training.model import SplitModel
from fleetdistill_server.testing import play

PERSONAL = ("fedper", "fedrep")


def test_fedper_averages_bases_and_leaves_heads() -> None:
    """Bases 1 and 3 of 1 and 3 samples have the mean 2.5; the heads 5 and 7 stay."""
    server = small_server("fedper", extractor="one_base", inputs=1)
    models = [base_and_head(head=5.0), base_and_head(head=7.0)]
    members = scale_devices("fedper", models, [[1.0, 5.0], [3.0, 7.0]], rows=[1, 3])
    (cohort,) = play(server, members)
    assert server.model.state_dict()["base.w"].tolist() == [2.5]
    for device, model in zip(members, models, strict=True):
        ask = Ask(round=2, step="train", seed=0, parts=server.message())
        assert members[device].fleet_model(ask).weights() == [2.5, model.weights()[1]]
        members[device].handle(Ask(round=2, step="deliver", seed=0, parts=server.message()))
        for message in (*cohort.sent(device), *cohort.answers(device)):
            assert list(message["parameters"].parameters) == ["base.w"]  # type: ignore[attr-defined]
    assert [model.weights() for model in models] == [[2.5, 5.0], [2.5, 7.0]]


@pytest.mark.parametrize(
    ("method", "base", "head"), [("fedrep", 1.095378, 0.785), ("fedper", 1.245210, 0.915591)], ids=["fedrep", "fedper"]
)
def test_fedrep_trains_the_head_and_then_the_base(method: str, base: float, head: float) -> None:
    """(h b - 2)^2 / 2 from h = 0.5 and b = 1: two steps of h and one of b, or three of both."""
    settings: dict[str, Any] = {"local_epochs": 3, **({"base_epochs": 1} if method == "fedrep" else {})}
    model = base_and_head()
    data = TensorData(torch.ones(1, 1), torch.zeros(1, dtype=torch.int64))
    device = make_device(method, model, data, classes=2, **settings)
    device.loss = lambda x, y: (model.stages(x) - 2).square().sum() / 2
    play(small_server(method, extractor="one_base", inputs=1, **settings), {"d0": device})
    assert model.weights() == pytest.approx([base, head], abs=1e-6)


@pytest.mark.parametrize("method", ["fedrep", "fedrep_plus"])
def test_each_phase_leaves_the_other_part(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also batch-norm's statistics and, with momentum and weight decay, tensors without a gradient."""
    phases = []
    original = FedAvgDevice.train_part

    def watched(half: FedAvgDevice, ask: Ask, **given: Any) -> None:
        before = state_of(half.local.model)
        original(half, ask, **given)
        after = state_of(half.local.model)
        phases.append({name for name in before if not torch.equal(before[name], after[name])})

    monkeypatch.setattr(FedAvgDevice, "train_part", watched)
    settings: dict[str, Any] = {"local_epochs": 4, "base_epochs": 2, "momentum": 0.9, "weight_decay": 0.1}
    members = members_of(method, norm_model, 1, **settings)
    if method == "fedrep":
        server = small_server(method, extractor="norm_base", **settings)
    else:
        server, _ = make_fleet(method, "norm_model", l_min=1, **settings)
        server.participations = {"d0": 9}
    play(server, members)
    names = set(members["d0"].local.model.state_dict())
    head = {name for name in names if name.startswith("stages.head")}
    assert phases == [head, names - head]
    for part in members["d0"].local.model.modules():
        assert part.training
        assert all(w.requires_grad for w in part.parameters())


@pytest.mark.parametrize("method", PERSONAL)
def test_a_single_row_trains_with_batch_norm(method: str) -> None:
    device = make_device(method, norm_model(), make_rows(0, rows=1), local_epochs=2)
    play(small_server(method, extractor="norm_base", local_epochs=2), {"d0": device})


def test_fedrep_needs_epochs_for_the_head() -> None:
    with pytest.raises(ConfigurationError, match="none for the head"):
        make_config("fedrep", local_epochs=2, base_epochs=2)


def test_fedper_without_head_is_fedavg() -> None:
    servers = small_server("fedavg", device="headless"), small_server("fedper", extractor="whole_base")
    servers[1].model.load_state_dict(servers[0].model.extractor.state_dict())
    for server, method in zip(servers, ("fedavg", "fedper"), strict=True):
        play(server, members_of(method, headless), rounds=3)
    mean, base = (list(server.model.state_dict().values()) for server in servers)
    assert all(torch.equal(one, other) for one, other in zip(mean, base, strict=True))


def test_fedper_without_base_is_local() -> None:
    shared, alone = (members_of(method, baseless) for method in ("fedper", "no_transfer"))
    play(small_server("fedper", extractor="empty_base"), shared, rounds=2)
    play(make_fleet("no_transfer")[0], alone, rounds=2)
    for device in shared:
        assert_equal(state_of(shared[device].local.model), state_of(alone[device].local.model))


@pytest.mark.parametrize("method", PERSONAL)
def test_heads_may_differ(method: str) -> None:
    def deep() -> SplitModel:
        head = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))
        return SplitModel({"body": tiny_model().stages[0], "head": head}, cut="body")

    server = small_server(method, local_epochs=2)
    first, second = (
        make_device(method, build(), make_rows(number), local_epochs=2)
        for number, build in enumerate((tiny_model, deep))
    )
    play(server, {"d0": first, "d1": second}, rounds=2)
    assert server.global_model() is None
    assert server.initial().scope == "extractor"


def test_fedper_sends_the_bytes_of_three_convolutions() -> None:
    server = small_server("fedper", extractor="m1_base")
    assert server.sizes().model.parameters == 6_032
    (exchange,) = server.run_exchanges()
    assert exchange.nbytes("up", "float32") == exchange.nbytes("down", "float32") == 24_128


@pytest.mark.parametrize("method", PERSONAL)
def test_base_of_a_hostile_server_is_refused(method: str) -> None:
    device = members_of(method, tiny_model, 1, local_epochs=2)["d0"]
    before = state_of(device.local.model)
    good = small_server(method, local_epochs=2).message()["parameters"]
    nan = ModelParameters(parameters={name: array * float("nan") for name, array in good.parameters.items()})
    head = ModelParameters(parameters={**good.parameters, "head.weight": good.parameters["body.0.weight"]})
    for bad in (nan, head):
        with pytest.raises(WireError):
            device.handle(Ask(round=1, step="train", seed=0, parts={"parameters": bad}))
    assert_equal(before, state_of(device.local.model))
