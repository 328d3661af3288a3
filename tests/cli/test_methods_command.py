"""`fleetdistill methods`: what it says about every method, and that its bytes are those that travel."""

from __future__ import annotations

import io
import json
from math import prod
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from support.fleets import EVERY_METHOD, SUITED, prepare, run_in_memory
from support.outside import fresh_process
from support.sizes import sizes_of
from typer.testing import CliRunner, Result

from fleetdistill import COLUMNS
from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import KINDS, Weights
from fleetdistill.methods import METHODS, config_class, example_config
from fleetdistill.methods.cdkt.config import CDKTConfig
from fleetdistill.methods.dafkd.config import DaFKDConfig
from fleetdistill.methods.fedd2s.config import FedD2SConfig
from fleetdistill.methods.feddkc.config import FedDKCConfig
from fleetdistill.methods.feddkd.config import FedDKDConfig
from fleetdistill.models import build_model
from fleetdistill.training.model import output_shape
from fleetdistill.training.parameters import model_parameters
from fleetdistill_console.commands.methods import audit_figures, compare_methods, method_row, method_tables
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.cli.app import app
from fleetdistill_server.config.run_config import ContractSection, load_run_config
from fleetdistill_server.engine.contract import build_method
from fleetdistill_server.methods import server_class
from fleetdistill_server.methods.traffic import (
    KNOWLEDGE_TYPES,
    UP,
    Sizes,
    all_exchanges,
    answer_kinds,
    exchange_formula,
    in_round,
    is_over_early,
    mean_round_bytes,
    round_bytes,
)
from fleetdistill_server.texts import readable_bytes

WIDTH = 118
every_method = pytest.mark.parametrize("method", EVERY_METHOD)
USUAL = {"classstats", "fedavg", "feddkc"}


def call(*words: str) -> Result:
    return CliRunner().invoke(app, ["methods", *words])


def predicted(
    method: str, sizes: Sizes, knowledge_type: str = "float32", *, completed: int | None = None, **settings: Any
) -> tuple[int, int]:
    """Bytes of a round up and down: of that after so many completed ones, or of all exchanges that a method has."""
    config = example_config(method, **settings).for_classes(sizes.classes)
    exchanges = server_class(method).exchanges(config, sizes)
    result = round_bytes(exchanges if completed is None else in_round(exchanges, completed), knowledge_type)  # type: ignore[arg-type]
    return result["up"], result["down"]


# --- the bytes are those that travel


@pytest.mark.parametrize(
    ("method", "settings", "knowledge_type"),
    [
        *((method, {}, "float16") for method in sorted(USUAL)),
        *(
            pytest.param(method, {}, "float16", marks=pytest.mark.long)
            for method in sorted(set(EVERY_METHOD) - {*USUAL, "no_transfer"})
        ),
        *(pytest.param("feddkd", {"dkd_steps": steps}, "float16", marks=pytest.mark.long) for steps in (1, 5)),
        pytest.param("classstats", {}, "float32", marks=pytest.mark.long),
        ("classstats", {"rank": 0}, "float16"),
        *(pytest.param(method, {}, "float32", marks=pytest.mark.long) for method in ("cdkt", "fedd2s", "feddkd")),
        *(pytest.param(method, {}, "uint8", marks=pytest.mark.long) for method in ("cdkt", "fedd2s")),
        *(pytest.param("feddkc", {}, number, marks=pytest.mark.long) for number in ("float32", "uint8")),
    ],
)
def test_a_round_sends_the_bytes_that_the_table_says(
    method: str, settings: dict[str, Any], knowledge_type: Any, tmp_path: Path
) -> None:
    """The second of three rounds: nothing of the start or the end is in it, and no guard has fired before it.

    Of a method that is through after one round it is the first.
    """
    number = min(2, config_class(method).usual_rounds)
    devices = 10 if config_class(method).sums_securely else 2  # the table has sums of ten
    suited = SUITED.get(method, {})
    fleet = Simulation(
        method=method,
        settings={**suited.get("settings", {}), **settings},
        models=suited.get("models", ()),
        knowledge_type=knowledge_type,
        devices=devices,
        rounds=3,
        train_limit=600,
        test_limit=20,
        alpha=10.0,
        torch_device="cpu",
    )
    prepared = prepare(fleet, tmp_path / "work")
    half = build_method(prepared[0])
    store = run_in_memory(prepared)
    kinds = {event.kind for event in store.history.events(RUN) if event.round < 3}
    assert kinds <= {"secure-sum", "other-dimensions"}, "no guard has fired"
    counted = {
        (item.device, item.direction): item.tensor_bytes for item in store.history.traffic(RUN) if item.round == number
    }
    store.close()
    assert len(counted) == 2 * devices
    for spec in prepared[1]:
        sizes = sizes_of(half, spec.rows)
        up, down = predicted(method, sizes, knowledge_type, completed=number - 1, **settings)
        assert (counted[spec.name, "up"], counted[spec.name, "down"]) == (up, down)
        assert up > 0


# --- examples calculated by hand


@pytest.mark.parametrize(("features", "up"), [(4096, 16_428_000), (16_384, 65_580_000)])
def test_dkc_17_bytes(features: int, up: int) -> None:
    ids = 8 * 1000  # which the formula counts apart
    assert predicted("feddkc", Sizes(samples=1000, features=features)) == (up + ids, 40_000 + ids)


def test_d2s_10_bytes() -> None:
    last = Sizes(samples=800, features=2048)
    third = Sizes(samples=800, features=2048, layer_features=512, head=Weights(17_114))
    ids = 8 * 800
    assert predicted("fedd2s", last) == (6_588_800 + ids, 32_000 + ids)
    assert predicted("fedd2s", third) == (8_195_200 + ids, 100_456 + ids)
    assert predicted("fedd2s", third, s2c_mode="feature_grad") == (8_195_200 + ids, 1_638_400 + ids)


def test_d2s_10_at_the_first_layer_features_travel_once() -> None:
    first = Sizes(samples=800, features=2048, layer_features=0, head=Weights(22_922))
    assert predicted("fedd2s", first)[0] == 800 * (4 * 2048 + 4 + 8)
    assert predicted("fedd2s", first, distance="mse")[1] == 0


@pytest.mark.parametrize(
    ("sizes", "knowledge", "up"),
    [
        (Sizes(proxy_samples=330), "full", 13_200),
        (Sizes(proxy_samples=330, embedding=512), "rep", 675_840),
        (Sizes(proxy_samples=330, embedding=512), "repfull", 689_040),
        (Sizes(proxy_samples=4200), "full", 168_000),
        (Sizes(proxy_samples=4200, embedding=64), "repfull", 1_243_200),
        (Sizes(proxy_samples=4200, embedding=64, classes=100), "repfull", 2_755_200),
    ],
)
def test_cdk_11_bytes(sizes: Sizes, knowledge: str, up: int) -> None:
    assert predicted("cdkt", sizes, knowledge=knowledge)[0] == up


def test_dkd_11_bytes() -> None:
    """Both directions: FEMNIST's CNN without batch-norm, and the digits' CNN with FedDKD_BN (W without batch-norm)."""
    digits = Sizes(model=Weights(14_213_578))
    assert sum(predicted("feddkd", digits, dkd_steps=10, variant="bn")) == 2 * 11 * 4 * 14_213_578
    assert sum(predicted("feddkd", Sizes(model=Weights(200_666)), dkd_steps=10)) == 17_658_608


@pytest.mark.parametrize(
    ("method", "settings", "expected"),
    [
        ("fedavg", {}, (92_584, 92_584)),
        ("scaffold", {}, (185_168, 185_168)),
        ("fedgkd", {"models": 5}, (92_584, 185_168)),
        ("fedgen", {}, (92_624, 187_944)),
        ("feddistill", {}, (93_024, 92_984)),
        ("feddkd", {"dkd_steps": 10}, (1_018_424, 1_018_424)),
        ("cdkt", {}, (20_000, 20_000)),
    ],
)
def test_bytes_of_methods_on_the_network_m1(method: str, settings: dict[str, Any], expected: tuple[int, int]) -> None:
    """23,146 parameters, a generator of 23,840, ten classes, and 500 rows of a proxy set."""
    model = Weights.of(model_parameters(build_model("fedd2s_m1")))
    sizes = Sizes(model=model, generator=Weights(23_840), classes=10, proxy_samples=500)
    assert predicted(method, sizes, **settings) == expected


@pytest.mark.parametrize(("rows", "classes", "nbytes"), [(5000, 16, 320_000), (1000, 10, 40_000)])
@pytest.mark.parametrize("method", ["fedmd", "dsfl"])
def test_bytes_of_a_proxy_sets_logits(method: str, rows: int, classes: int, nbytes: int) -> None:
    """No row ids travel: the whole proxy set is used, in its order."""
    assert predicted(method, Sizes(proxy_samples=rows, classes=classes)) == (nbytes, nbytes)


@pytest.mark.parametrize(("rows", "up", "down"), [(1, 65_580, 40), (5000, 327_900_000, 200_000)])
def test_bytes_of_fedgkts_features(rows: int, up: int, down: int) -> None:
    ids = 8 * rows
    assert predicted("fedgkt", Sizes(samples=rows, features=16 * 32 * 32)) == (up + ids, down + ids)


@pytest.mark.parametrize(
    ("settings", "up"),
    [
        ({}, 1_681_028),
        ({"sharing": False}, 2_880_000),
        ({"discriminator_location": "device"}, 1_731_200),
        ({"discriminator_location": "device", "upload_model": False}, 531_200),
    ],
)
def test_daf_12_bytes(settings: dict[str, Any], up: int) -> None:
    sizes = Sizes(model=Weights(300_000), generator=Weights(120_000), embedding=256)
    assert predicted("dafkd", sizes, kd_samples=1280, **settings) == (up, 1_680_000)


def test_daf_12_the_exact_mode_adds_the_generator_down() -> None:
    sizes = Sizes(model=Weights(300_000), generator=Weights(120_000))
    lagged, exact = (
        predicted("dafkd", sizes, discriminator_location="device", sync=item) for item in ("lagged", "exact")
    )
    assert (exact[0] - lagged[0], exact[1] - lagged[1]) == (0, 4 * 120_000)


@pytest.mark.parametrize(
    ("samples", "up"),
    [(10_000, 57_900), (1000, 57_900 - (128 - 66) * (384 + 2)), (10, 57_900 - 128 * (384 + 2))],
)
def test_fix_10_bytes_of_one_exchange(samples: int, up: int) -> None:
    """990 degrees of freedom at 15 a direction allow 66 of them, 0 none.

    The 24 bytes of single numbers down are three of 8.
    """
    sizes = Sizes(samples=samples, features=217 * 16)
    assert predicted("classstats", sizes, "float16") == (up, 7174)
    assert predicted("classstats", sizes, "float32") == (up, 7174)


def test_single_exchange_is_counted_whole_not_spread_over_rounds() -> None:
    row = method_row("classstats", Sizes(), "float16", rounds=30)
    assert (row["exchanges"], row["exchanges_formula"]) == (2, "2 in all")
    assert (row["bytes_up"], row["bytes_down"]) == predicted("classstats", Sizes(), "float16")
    assert method_row("classstats", Sizes(), "float16", rounds=1) == row


# --- laws

counts = st.integers(1, 10_000)


@given(samples=counts, features=counts, classes=st.integers(2, 100), model=counts, more=counts)
def test_bytes_never_fall_with_size_nor_rise_at_half_precision(
    samples: int, features: int, classes: int, model: int, more: int
) -> None:
    small = Sizes(samples=samples, features=features, classes=classes, model=Weights(model))
    large = Sizes(samples=samples + more, features=features + more, classes=classes, model=Weights(model + more))
    for method in EVERY_METHOD:
        half, single, byte = (predicted(method, small, item) for item in KNOWLEDGE_TYPES)
        assert all(a <= b <= 2 * a for a, b in zip(half, single, strict=True))
        scales = 8 * (features + classes)  # which weigh more than they save where there are few samples
        assert all(a <= b + scales and b <= 2 * a for a, b in zip(byte, half, strict=True))
        assert all(a <= b for a, b in zip(single, predicted(method, large), strict=True))


@pytest.mark.parametrize("steps", [0, 1, 7])
def test_feddkd_has_an_exchange_more_for_every_step(steps: int) -> None:
    exchanges = server_class("feddkd").exchanges(FedDKDConfig(dkd_steps=steps).for_classes(10), Sizes())
    assert sum(exchange.times for exchange in exchanges) == 1 + steps
    assert exchange_formula(exchanges) == "1 + dkd_steps"


def test_sizes_below_their_least_are_refused() -> None:
    for bad in ({"samples": 0}, {"proxy_samples": -1}, {"model": Weights(-1)}, {"head": Weights(0, -2)}):
        with pytest.raises(ConfigurationError, match=r"is -?\d, must be at least [01]"):
            Sizes(**bad)


# --- what a method says about itself


@every_method
def test_a_method_describes_itself(method: str) -> None:
    half, config = server_class(method), example_config(method).for_classes(10)
    assert 0 < len(half.summary) <= 57
    assert "\n" not in half.summary
    assert not half.summary.endswith(".")
    exchanges = half.exchanges(config, Sizes())
    steps = answer_kinds(exchanges)
    assert list(dict.fromkeys(exchange.step for exchange in exchanges if exchange.times)) == list(steps)
    for exchange in exchanges:
        assert bool(steps[exchange.step]) == (exchange.nbytes(UP, "float32") > 0), exchange.step


@every_method
def test_what_leaves_is_what_the_answers_hold(method: str) -> None:
    """The gate names the column of a part: each must be one that the method asks the app for."""
    half, config = server_class(method), example_config(method).for_classes(10)
    columns = set(half.columns(config))
    assert columns <= set(COLUMNS)
    steps = answer_kinds(half.exchanges(config, Sizes()))
    kinds = {KINDS[kind] for parts in steps.values() for kind in parts.values()}
    assert {
        column for kind in kinds for column in kind.possible_columns or () if len(kind.possible_columns or ()) == 1
    } <= columns


@pytest.mark.parametrize(
    ("method", "config", "says"),
    [
        ("cdkt", CDKTConfig(knowledge="repfull"), ["features", "logits"]),
        ("cdkt", CDKTConfig(exchange=False), []),
        ("dafkd", DaFKDConfig(discriminator_location="device"), ["logits", "parameters"]),
        ("fedd2s", FedD2SConfig(), ["features", "labels"]),
        ("feddkc", FedDKCConfig(), ["features", "logits", "labels"]),
        ("feddkd", FedDKDConfig(dkd_steps=0), ["parameters"]),
    ],
)
def test_the_columns_follow_the_settings(method: str, config: Any, says: list[str]) -> None:
    assert list(server_class(method).columns(config.for_classes(10))) == says


def test_tensors_of_a_method_are_shown_with_their_columns() -> None:
    row = method_row("fedproto", Sizes(), "float32")
    assert "own tensors (counts, features)" in row["leaves_the_device"]


# --- the command


def test_json_has_a_row_for_every_method() -> None:
    with fresh_process():
        said = json.loads(call("--json").stdout)
    assert [row["method"] for row in said["methods"]] == EVERY_METHOD
    assert said["knowledge_type"] == "float16"
    all_rows = {row["method"]: row for row in said["methods"]}
    assert {name for name, row in all_rows.items() if row["server_proxy_set"]} == {"feddf"}
    rows = {name: all_rows[name] for name in METHODS}
    assert {name for name, row in rows.items() if row["labels_leave"]} == {"fedd2s", "feddkc"}
    measured = audit_figures()["forms"]
    for name, row in rows.items():
        result = [item["linked"] for item in measured[name]["attacks"] if item["attack"] is not None]
        assert row["linked"] == (max(result) if result else "none")
    assert {name for name, row in rows.items() if row["models"] == "different"} == {
        "cdkt",
        "classstats",
        "classstats_private",
        "classstats_secure",
        "classstats_summed",
        "feddkc",
    }
    assert {name for name, row in rows.items() if row["recommended"]} == {
        "classstats",
        "classstats_private",
        "classstats_secure",
        "classstats_summed",
    }
    assert {name for name, row in rows.items() if row["proxy_set"]} == {"cdkt"}
    assert {name: row["exchanges"] for name, row in rows.items()} == {
        **dict.fromkeys(("cdkt", "dafkd", "fedavg", "feddkc"), 1),
        **dict.fromkeys(("classstats", "classstats_private", "fedd2s"), 2),
        "feddkd": 4,
        **dict.fromkeys(("classstats_secure", "classstats_summed"), 5),
    }


def test_options_reach_the_bytes() -> None:
    words = "--samples 10 --features 20 --classes 3 --parameters 100 --buffer-bytes 7 --knowledge-type float32"
    said = {row["method"]: row for row in json.loads(call(*words.split(), "--json").stdout)["methods"]}
    assert said["fedavg"]["bytes_up"] == 407
    assert said["feddkc"]["bytes_up"] == 10 * (4 * 20 + 4 * 3 + 4 + 8)
    bytes_up = json.loads(call(*words.replace("float32", "uint8 --channels 4").split(), "--json").stdout)["methods"]
    assert {row["method"]: row["bytes_up"] for row in bytes_up}["feddkc"] == 10 * (20 + 2 * 3 + 4 + 8) + 8 * 4
    more = "--proxy-samples 5 --embedding 9 --generator-parameters 11 --layer-features 6 --head-parameters 13"
    said = {row["method"]: row for row in json.loads(call(*words.split(), *more.split(), "--json").stdout)["methods"]}
    assert said["cdkt"]["bytes_up"] == 4 * 5 * 3
    assert said["dafkd"]["bytes_up"] == 4 * 100 + 7 + 4 * 11 + 4 * 9 + 4
    assert (said["fedd2s"]["bytes_up"], said["fedd2s"]["bytes_down"]) == (10 * (4 * 26 + 12), 10 * 20 + 4 * 13)


def run_toml(directory: Path, method: str, **settings: Any) -> Path:
    """A run.toml whose sizes are not the command's defaults."""
    path = directory / "run.toml"
    proxy = directory / "proxy.npz"
    np.savez(proxy, inputs=np.zeros((37, 1, 8, 8), np.float32), labels=np.arange(37) % 7)
    values: dict[str, dict[str, Any]] = {
        "run": {"name": "r", "method": method, "rounds": 12},
        "contract": {"classes": 7, "input_shape": [1, 8, 8], "knowledge_type": "float32"},
        "model": {"extractor": "digits_extractor", "server": "digits_cnn_small", "device": "digits_cnn_small"},
        "method": settings,
        "proxy": {"data": str(proxy), "name": "made", "licence": "CC0-1.0"},
    }
    if method in ("classstats", "feddkc", "fedgkt", "fedict"):
        values["model"]["server"] = "digits_server"  # it reads features
    path.write_text(tomli_w.dumps(values))
    return path


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        *((method, {}) for method in sorted(USUAL)),
        *(pytest.param(method, {}, marks=pytest.mark.long) for method in sorted(set(EVERY_METHOD) - USUAL)),
        ("feddkd", {"dkd_steps": 5}),
        ("cdkt", {"knowledge": "repfull"}),
    ],
)
def test_a_run_toml_gives_the_sizes_and_the_settings(method: str, settings: dict[str, Any], tmp_path: Path) -> None:
    path = run_toml(tmp_path, method, **{**config_class(method).examples, **settings})
    with fresh_process():
        said = json.loads(call(str(path), "--samples", "55", "--json").stdout)
    assert (said["knowledge_type"], said["rounds"]) == ("float32", 12)
    sizes = said["sizes"]
    assert (sizes["samples"], sizes["classes"], sizes["proxy_samples"]) == (55, 7, 37)
    rows = {row["method"]: row for row in said["methods"]}
    half = build_method(load_run_config(path))
    exchanges = half.exchanges(half.config, sizes_of(half, 55))
    usual = all_exchanges(exchanges) if is_over_early(exchanges) else None
    expected = round_bytes(usual, "float32") if usual else mean_round_bytes(exchanges, "float32", 12)
    assert (rows[method]["bytes_up"], rows[method]["bytes_down"]) == (expected["up"], expected["down"])
    model = Weights.of(model_parameters(half.context.device_model()))
    averaged = rows["fedavg"]["bytes_up"]
    assert averaged == 4 * model.parameters + model.buffer_bytes, "other methods have the run's models too"
    assert sizes["features"] == prod(output_shape(half.context.extractor(), (1, 8, 8)))


def test_options_go_before_the_run_toml(tmp_path: Path) -> None:
    words = [str(run_toml(tmp_path, "fedavg")), "--parameters", "11", "--buffer-bytes", "3", "--rounds", "5", "--json"]
    with fresh_process():
        said = json.loads(call(*words).stdout)
    assert said["rounds"] == 5
    assert {row["method"]: row["bytes_up"] for row in said["methods"]}["fedavg"] == 4 * 11 + 3


def test_a_run_toml_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    result = call(str(tmp_path / "none.toml"))
    assert result.exit_code == 1
    text = f"there is no file {tmp_path / 'none.toml'}; enter the path of a TOML file, such as run.toml"
    assert result.stderr == f"error: {text}\n"


def test_each_method_has_one_line_in_each_table_of_a_terminal() -> None:
    console = Console(width=WIDTH, file=io.StringIO())
    largest = Sizes(samples=10**6, features=10**6, model=Weights(10**9), layer_features=512)
    console.print(*method_tables(compare_methods(largest, "float32"))[:2])
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert all(len(line) <= WIDTH for line in lines)
    for name in EVERY_METHOD:
        what, costs = (line for line in lines if line.split()[:1] == [name])
        row = method_row(name, largest, "float32")
        assert row["summary"] in what
        assert row["leaves_the_device"] in costs
        assert readable_bytes(row["bytes_up"]) in costs
    assert sum(line.startswith("  ") and bool(line.strip()) for line in lines) == 0  # no cell went on in a second line


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--samples 0", "samples is 0, must be at least 1"),
        ("--rounds 0", "rounds is 0, must be at least 1"),
        ("--parameters -1", "model is -1, must be at least 0"),
        ("--knowledge-type int8", "'int8', expected one of float16, float32, uint8"),
    ],
)
def test_a_bad_option_is_one_sentence(words: str, sentence: str) -> None:
    result = call(*words.split())
    assert result.exit_code == 1
    assert sentence in result.stderr


def test_the_knowledge_types_and_the_default_are_those_of_a_run() -> None:
    field = ContractSection.model_fields["knowledge_type"]
    assert get_args(field.annotation) == KNOWLEDGE_TYPES
    assert json.loads(call("--json").stdout)["knowledge_type"] == field.default
