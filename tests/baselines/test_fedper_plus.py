"""FedPer+ and FedRep+: where a device's cut falls, and which layers are averaged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from baselines.bed import (
    make_config,
    make_device,
    make_fleet,
    make_rows,
    make_server,
    norm_model,
    one_weight,
    tiny_model,
)
from baselines.personal_bed import (
    ScaleAlone,
    assert_equal,
    members_of,
    scale_devices,
    six_layers,
    small_server,
    state_of,
    three_scales,
)

from fleetdistill.errors import ConfigurationError, ModelError, RefusedError, WireError
from fleetdistill.knowledge import ModelParameters, Plan
from fleetdistill.methods.base import Ask
from fleetdistill.wire.codec import encode
from fleetdistill_server.config.run_config import run_config
from fleetdistill_server.engine.cohort import with_columns
from fleetdistill_server.engine.contract import build_method, make_contract
from fleetdistill_server.intake.ingest import Ingest
from fleetdistill_server.store.memory_blobs import MemoryBlobs
from fleetdistill_server.testing import play

PLUS = ("fedper_plus", "fedrep_plus")


@pytest.mark.parametrize("method", PLUS)
def test_the_cut_falls_as_a_device_takes_part(method: str) -> None:
    """L = 6, Z_0 = 3 and l_min = 3; a round that a device misses does not count."""
    settings: dict[str, Any] = {"local_epochs": 2, "drop_every": 3, "l_min": 3}
    server = small_server(method, device="six_layers", **settings)
    members = members_of(method, six_layers, **settings)
    depths: dict[str, list[int]] = {"d0": [], "d1": []}
    for number in range(14):
        (cohort,) = play(server, members, completed=number, quorum=0.5, silent=[("train", "d1")] if number % 2 else ())
        for device, seen in depths.items():
            (parts,) = cohort.sent(device)
            seen.append(parts["plan"].values["depth"])  # type: ignore[attr-defined]
            sent = {name.split(".")[1] for name in parts["parameters"].parameters}  # type: ignore[attr-defined]
            assert sent == {f"l{layer}" for layer in range(1, seen[-1] + 1)}
            for answer in cohort.answers(device):
                assert answer["parameters"].parameters.keys() == parts["parameters"].parameters.keys()  # type: ignore[attr-defined]
    assert depths["d0"] == [6, 6, 6, 5, 5, 5, 4, 4, 4, 3, 3, 3, 3, 3]
    assert depths["d1"] == [6] * 5 + [5] * 6 + [4] * 3
    assert cohort.figures["sharing_devices"] == {"l1": 1, "l2": 1, "l3": 1}


@pytest.mark.parametrize(("depths", "third"), [((3, 2, 2), 100.0), ((2, 2, 2), 7.0)])
def test_each_layer_is_the_mean_of_those_that_share_it(depths: tuple[int, ...], third: float) -> None:
    """Layers (1, 10, 100), (3, 30, 300) and (5, 50, 500) of 1, 1 and 2 samples; (0, 0, 7) before."""
    server = small_server("fedper_plus", device="three_scales", inputs=1, drop_every=1, l_min=1)
    server.participations = {f"d{number}": 3 - depth for number, depth in enumerate(depths)}
    models: list[ScaleAlone] = [three_scales() for _ in depths]
    centres = [[1.0, 10.0, 100.0], [3.0, 30.0, 300.0], [5.0, 50.0, 500.0]]
    members = scale_devices("fedper_plus", models, centres, rows=[1, 1, 2], drop_every=1, l_min=1)
    play(server, members)
    assert server.model.weights() == [3.5, 35.0, third]
    assert [model.weights() for model in models] == centres
    play(server, members)
    assert models[1].weights() == centres[1], "a dropped layer is never overwritten"


def test_an_answer_has_exactly_the_layers_that_were_sent() -> None:
    settings = {
        "run": {"name": "small", "method": "fedper_plus"},
        "contract": {"classes": 10, "input_shape": [1, 8, 8]},
        "model": {"device": "fedd2s_digits"},
    }
    config = run_config(settings)
    server: Any = build_method(config)
    contract, _, _ = make_contract(config, server)
    server.participations = {"d1": 3}
    shared, whole = (server.message_for(device)["parameters"] for device in ("d1", "d0"))
    assert len(whole.parameters) == len(shared.parameters) + 2
    expects = with_columns({"parameters": "model_parameters"}, server.tensors_of("d1"))

    def send(parameters: ModelParameters) -> None:
        payload = encode({"parameters": parameters})
        Ingest("d1", payload.header(), contract, expects).start(MemoryBlobs().stage("key", payload.parts))

    send(shared)
    with pytest.raises(RefusedError, match=r"'parameters/parameters/stages\.F3\.\w+' is not part of the contract"):
        send(whole)
    with pytest.raises(RefusedError, match=r"lacks parameters/stages\.C1\.0\.bias"):
        send(shared.only(shared.parameters.keys() - {"stages.C1.0.bias"}))


@pytest.mark.parametrize("method", PLUS)
def test_a_cut_that_never_falls_is_fedavg(method: str) -> None:
    def end(name: str, **settings: Any) -> dict[str, torch.Tensor]:
        server = small_server(name, device="six_layers", local_epochs=2, **settings)
        play(server, members_of(name, six_layers, local_epochs=2, **settings), rounds=3)
        return state_of(server.model)

    assert_equal(end("fedavg"), end(method, drop_every=10**9))


@pytest.mark.parametrize(("method", "fixed"), [("fedper_plus", "fedper"), ("fedrep_plus", "fedrep")])
def test_a_cut_at_its_lowest_is_that_of_the_fixed_method(method: str, fixed: str) -> None:
    settings: dict[str, Any] = {"local_epochs": 2}
    falling, cut = (members_of(name, norm_model, **settings) for name in (method, fixed))
    server, _ = make_fleet(method, "norm_model", l_min=1, **settings)
    server.participations = dict.fromkeys(falling, 9)
    other = small_server(fixed, extractor="norm_base", **settings)
    other.model.load_state_dict(server.model.extractor.state_dict())
    play(server, falling, rounds=2)
    play(other, cut, rounds=2)
    assert_equal(state_of(server.model.extractor), state_of(other.model))
    for device in falling:
        assert_equal(state_of(falling[device].local.model), state_of(cut[device].local.model))


@pytest.mark.parametrize("method", PLUS)
def test_a_model_without_layers_is_refused(method: str) -> None:
    with pytest.raises(ModelError, match="split_sequential"):
        make_device(method, one_weight(), make_rows(0), local_epochs=2)
    with pytest.raises(ModelError, match="split_sequential"):
        make_server(method, "baselines.bed:one_weight", local_epochs=2)


def test_depth_of_a_hostile_server_is_refused() -> None:
    device = members_of("fedper_plus", tiny_model, 1)["d0"]
    server, _ = make_fleet("fedper_plus")
    good = server.message_for("d0")
    for depth in (0, 3, True, "2"):
        bad = {**good, "plan": Plan(values={"depth": depth})}
        with pytest.raises(WireError, match="depth"):
            device.handle(Ask(round=1, step="train", seed=0, parts=bad))
    with pytest.raises(WireError, match="names differ"):
        device.handle(Ask(round=1, step="train", seed=0, parts={**good, "plan": Plan(values={"depth": 1})}))


def test_a_forgotten_device_starts_again() -> None:
    server = small_server("fedper_plus", device="six_layers", drop_every=1, l_min=1)
    play(server, members_of("fedper_plus", six_layers, drop_every=1, l_min=1), rounds=2)
    server.forget("d0", None)
    assert server.state_dict()["participations"] == {"d1": 2}
    assert (server.depth("d0"), server.depth("d1")) == (6, 4)


def test_both_ways_to_set_the_lowest_cut_exclude_each_other() -> None:
    with pytest.raises(ConfigurationError, match="set one of them"):
        make_config("fedper_plus", l_min=1, dropping_set="head")
