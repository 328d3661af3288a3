"""run.toml: every mistake is named with its section and key before anything starts."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fleets import EVERY_METHOD
from support.outside import fresh_process

from fleetdistill.errors import ConfigurationError
from fleetdistill.methods import METHODS, config_class
from fleetdistill.names import NAME_RULE
from fleetdistill_server.config.run_config import RunConfig, load_run_config, run_config

GOOD: dict[str, Any] = {
    "run": {"name": "digits", "method": "feddkc"},
    "contract": {"classes": 10, "input_shape": [1, 8, 8]},
}
TOML = """
[run]
name = "digits"
method = "feddkc"
rounds = 5
quorum = 1
deadline_seconds = 90

[contract]
classes = ["cat", "dog"]
input_shape = [1, 8, 8]
knowledge_type = "float32"

[method]
refinement = "kkr"
target_peak = 0.75
teacher_guard = false

[server]
listen = "0.0.0.0:50051"
"""


def with_setting(section: str, key: str, value: object) -> dict[str, Any]:
    values = copy.deepcopy(GOOD)
    values.setdefault(section, {})[key] = value
    return values


def refusal(values: dict[str, Any]) -> str:
    with pytest.raises(ConfigurationError) as error:
        run_config(values)
    return str(error.value)


def shown(value: object) -> str:
    """As TOML has it."""
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


# --- what is taken


def test_a_small_configuration_is_completed_with_defaults() -> None:
    config = run_config(GOOD)
    assert (config.run.method, config.run.rounds, config.run.min_devices) == ("feddkc", 30, 2)
    assert (config.run.quorum, config.run.deadline_seconds) == (2 / 3, 600.0)
    assert config.contract.class_names() == [str(label) for label in range(10)]
    assert config.contract.knowledge_type == "float16"
    method = config.method_config()
    assert method.target_peak == pytest.approx((1 + 1 / 10) / 2)
    assert method.target_entropy == pytest.approx(0.5 * math.log2(10))


def test_the_default_method_is_class_statistics() -> None:
    assert run_config({**GOOD, "run": {"name": "digits"}}).run.method == "classstats"


def test_a_run_may_have_no_end() -> None:
    assert run_config(with_setting("run", "rounds", 0)).run.rounds == 0


def test_a_file_is_read_with_whole_numbers_for_real_ones(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(TOML)
    config = load_run_config(path)
    assert (config.run.rounds, config.run.quorum, config.run.deadline_seconds) == (5, 1.0, 90.0)
    assert config.contract.class_names() == ["cat", "dog"]
    method = config.method_config()
    assert (method.refinement, method.target_peak, method.teacher_guard) == ("kkr", 0.75, False)
    assert config.server.listen == "0.0.0.0:50051"


def test_a_checked_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        run_config(GOOD).run.rounds = 7


# --- unknown names


UNKNOWN = {
    "a section": (
        {**GOOD, "servers": {}},
        "[servers]: unknown section; did you mean 'server'? Known are run, contract, model, method, proxy, "
        "evaluation, "
        "server, engine, limits",
    ),
    "in run": (
        with_setting("run", "round", 3),
        "[run] round: unknown setting; did you mean 'rounds'? Known are name, method, rounds, seed, min_devices, "
        "devices_per_round, over_selection, quorum, deadline_seconds, min_round_seconds, buffer_answers, "
        "buffer_seconds, staleness_limit, staleness_exponent, threads, "
        "start_from, import",
    ),
    "in contract": (
        with_setting("contract", "labels", 3),
        "[contract] labels: unknown setting; known are classes, input_shape, knowledge_type, max_samples",
    ),
    "in model": (
        with_setting("model", "teacher", "x"),
        "[model] teacher: unknown setting; known are extractor, extractor_weights, server, device",
    ),
    "in server": (
        with_setting("server", "port", 1),
        "[server] port: unknown setting; known are listen, store, database, blobs, lease_seconds, "
        "engine_timeout_seconds, max_upload_bytes, torch_device, pki, enrol_listen, certificate_days, compression, "
        "keep_rounds, keep_checkpoints, disk_budget_bytes, keep_free_bytes, metrics, traces, engines_at_once, "
        "data_directories",
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    values, sentence = UNKNOWN[name]
    assert refusal(values) == sentence


def test_unknown_method_setting_is_refused_naming_known_ones() -> None:
    sentence = refusal(with_setting("method", "learning_rat", 0.1))
    assert sentence.startswith(
        "[method] learning_rat: unknown setting; did you mean 'learning_rate'? Known are local_epochs, "
    )
    assert ", learning_rate, " in sentence


def test_an_unknown_method_is_refused_with_the_known_ones() -> None:
    with fresh_process():
        said = refusal(with_setting("run", "method", "xyz"))
    assert said == (
        f"[run] method: unknown method 'xyz', expected one of {', '.join(EVERY_METHOD)}; "
        "import the module that registers your own method first"
    )


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("refinement", "[method] unknown refinement 'x', expected one of none, kkr, kkr_kernel, skr"),
        ("server_order", "[method] unknown server_order 'x', expected one of mixed, sequential"),
        ("kernel", "[method] unknown kernel 'x', expected one of exp, linear, softplus, sigmoid, quadratic"),
    ],
)
def test_an_unknown_choice_is_refused_with_the_known_ones(key: str, sentence: str) -> None:
    assert refusal(with_setting("method", key, "x")) == sentence


# --- wrong types


@pytest.mark.parametrize("given_value", ["3", True, 3.0, None, [3], {"n": 3}])
@pytest.mark.parametrize(("section", "key"), [("run", "rounds"), ("run", "seed"), ("method", "local_epochs")])
def test_a_whole_number_must_be_one(section: str, key: str, given_value: object) -> None:
    sentence = f"[{section}] {key} is {shown(given_value)}, must be a whole number"
    assert refusal(with_setting(section, key, given_value)) == sentence


@pytest.mark.parametrize("given_value", ["0.5", True, [0.5]])
@pytest.mark.parametrize(("section", "key"), [("run", "quorum"), ("server", "lease_seconds"), ("method", "beta")])
def test_a_number_must_be_one(section: str, key: str, given_value: object) -> None:
    sentence = f"[{section}] {key} is {shown(given_value)}, must be a number"
    assert refusal(with_setting(section, key, given_value)) == sentence


@pytest.mark.parametrize(("section", "key"), [("run", "name"), ("server", "listen"), ("method", "refinement")])
def test_a_text_must_be_one(section: str, key: str) -> None:
    assert refusal(with_setting(section, key, 3)) == f"[{section}] {key} is 3, must be text in quotes"


@pytest.mark.parametrize("given_value", [1, "true"])
def test_a_flag_must_be_one(given_value: object) -> None:
    sentence = f"[method] teacher_guard is {shown(given_value)}, must be true or false"
    assert refusal(with_setting("method", "teacher_guard", given_value)) == sentence


def test_a_section_must_be_one() -> None:
    assert refusal({**GOOD, "contract": 3}) == "[contract] is 3, must be a section of settings"
    assert refusal({**GOOD, "method": 3}) == "[method] is 3, must be a section of settings"


@pytest.mark.parametrize("address", ["127.0.0.1", ":50051", "h:", "h:x", "::1:5", "h:-1", ""])
def test_an_address_without_a_port_is_named(address: str) -> None:
    assert refusal(with_setting("server", "listen", address)) == (
        f"[server] listen is {shown(address)}, must be host:port, such as 127.0.0.1:50051 or [::1]:50051"
    )


@pytest.mark.parametrize("setting", ["listen", "enrol_listen", "metrics"])
def test_a_port_out_of_range_is_told_the_range(setting: str) -> None:
    assert refusal(with_setting("server", setting, "127.0.0.1:65536")) == (
        f'[server] {setting} is "127.0.0.1:65536", must be host:port with a port of at most 65535'
    )


def test_a_budget_below_the_database_alone_is_refused() -> None:
    assert refusal(with_setting("server", "disk_budget_bytes", 4_999_999)) == (
        "[server]: disk_budget_bytes is 4999999, must be 0 for no limit or at least 5000000: SQLite's log alone "
        "grows to 4.1 MB, and uploads would be refused then; add the size of the run's payloads"
    )
    for budget in (0, 5_000_000):
        assert run_config(with_setting("server", "disk_budget_bytes", budget)).server.disk_budget_bytes == budget
    with_postgres = with_setting("server", "database", "postgresql://host/fleetdistill")
    with_postgres["server"]["disk_budget_bytes"] = 1
    assert run_config(with_postgres).server.disk_budget_bytes == 1


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::]:50051", "fleet.example.org:65535"])
def test_an_address_with_a_port_is_taken(address: str) -> None:
    assert run_config(with_setting("server", "listen", address)).server.listen == address
    assert run_config(with_setting("server", "enrol_listen", address)).server.enrol_listen == address


def test_a_setting_in_the_wrong_section_is_told_its_own() -> None:
    assert refusal(with_setting("server", "rounds", 3)).startswith(
        "[server] rounds: unknown setting; it belongs to [run]. Known are listen, "
    )


def test_a_setting_of_two_types_names_both() -> None:
    values = with_setting("run", "method", "classstats")
    values["method"] = {"shrinkage": True}
    assert refusal(values) == "[method] shrinkage is true, must be a number or text in quotes"


def test_a_method_that_is_mistyped_is_guessed() -> None:
    sentence = refusal(with_setting("run", "method", "fedkc"))
    assert sentence.startswith("[run] method: unknown method 'fedkc'; did you mean 'feddkc'? Expected one of cdkt, ")


@pytest.mark.parametrize("contract", [{}, {"classes": 1, "input_shape": []}])
def test_a_mistyped_method_is_named_before_other_errors(contract: dict[str, Any]) -> None:
    sentence = refusal({"run": {"name": "digits", "method": "fedkc"}, "contract": contract})
    assert sentence.startswith("[run] method: unknown method 'fedkc'; did you mean 'feddkc'? Expected one of cdkt, ")
    assert "; [contract] classes " in sentence


@pytest.mark.parametrize("section", ["run", "method"])
def test_a_key_without_a_name_is_an_unknown_setting(section: str) -> None:
    assert refusal(with_setting(section, "", 1)).startswith(f'[{section}] "": unknown setting; known are ')


SECTIONS = [name for name in RunConfig.model_fields if name != "method"]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@given(data=st.data(), method=st.sampled_from(sorted(METHODS)), value=ANYTHING)
def test_no_value_of_any_setting_brings_a_sentence_of_pydantics(
    data: st.DataObject, method: str, value: object
) -> None:
    """Of every setting of every section and method, and of whole sections."""
    section = data.draw(st.sampled_from([*SECTIONS, "method"]))
    own = dataclasses.fields(config_class(method)) if section == "method" else ()
    annotation = RunConfig.model_fields[section].annotation
    keys = [item.name for item in own] or list((*get_args(annotation), annotation)[0].model_fields)
    values = with_setting("run", "method", method)
    key = data.draw(st.sampled_from(["", *keys]))
    values[section] = {**values.get(section, {}), key: value} if key else value
    said = ""
    try:
        run_config(values)
    except ConfigurationError as error:
        said = str(error)
    assert not re.search(r"Input should|should (be|have|match)|of another type|validation", said)


# --- ranges


@pytest.mark.parametrize(
    ("section", "key", "value", "sentence"),
    [
        ("run", "rounds", -1, "must be at least 0"),
        ("run", "rounds", 2**32, "must be below 4294967296"),
        ("run", "seed", -1, "must be at least 0"),
        ("run", "seed", 2**63, "must be below 9223372036854775808"),
        ("run", "min_devices", 0, "must be at least 1"),
        ("run", "threads", 0, "must be at least 1"),
        ("evaluation", "every", 0, "must be at least 1"),
        ("evaluation", "every", 2**32, "must be below 4294967296"),
        ("run", "quorum", 0, "must be above 0"),
        ("run", "quorum", 1.1, "must be at most 1.0"),
        ("run", "deadline_seconds", 0, "must be above 0"),
        ("server", "lease_seconds", 0, "must be above 0"),
        ("server", "max_upload_bytes", 0, "must be at least 1"),
        ("contract", "max_samples", 0, "must be at least 1"),
        ("contract", "input_shape", [], "must be a list of at least 1"),
        ("run", "deadline_seconds", math.inf, "must be a finite number"),
        (
            "contract",
            "knowledge_type",
            "float64",
            "must be 'float16', 'float32' or 'uint8'; did you mean 'float16'?",
        ),
        ("server", "compression", "gzip", "must be 'zstd' or 'none'"),
        ("proxy", "name", "x" * 65, "must be at most 64 characters"),
    ],
)
def test_a_number_out_of_range_is_refused(section: str, key: str, value: object, sentence: str) -> None:
    assert refusal(with_setting(section, key, value)) == f"[{section}] {key} is {shown(value)}, {sentence}"


def test_an_axis_of_the_input_is_named_by_its_position() -> None:
    assert refusal(with_setting("contract", "input_shape", [1, 0])) == (
        "[contract] input_shape.1 is 0, must be at least 1"
    )


@pytest.mark.parametrize("name", ["", "a b", "a/b", "é", "x" * 65, "digits\n"])
def test_a_bad_run_name_is_refused(name: str) -> None:
    assert refusal(with_setting("run", "name", name)) == (f"[run] name is {shown(name)}, must be {NAME_RULE}")


@pytest.mark.parametrize("classes", [1, 0, -3, True, 10.0, "10", [], ["a"], ["a", "a"], ["a", 1], [1, 2]])
def test_bad_classes_are_refused_with_one_sentence(classes: object) -> None:
    assert refusal(with_setting("contract", "classes", classes)) == (
        f"[contract] classes is {shown(classes)}, must be a number of classes or a list of distinct names, at least 2"
    )


def test_a_class_with_control_characters_is_refused() -> None:
    text = refusal(with_setting("contract", "classes", ["a", "b\x1b[2J"]))
    assert text.endswith("must be names without control characters")


@pytest.mark.parametrize("value", [0.1, 0.05, 0.0, -1.0, 1.0, 2, math.nan])
def test_a_target_peak_outside_its_range_is_refused(value: float) -> None:
    assert refusal(with_setting("method", "target_peak", value)) == (
        f"[method] target peak T={float(value)} must be in (1/C, 1) = (0.1, 1)"
    )


@pytest.mark.parametrize("value", [0.0, -1.0, math.log2(10), 4, math.nan])
def test_a_target_entropy_outside_its_range_is_refused(value: float) -> None:
    assert refusal(with_setting("method", "target_entropy", value)) == (
        f"[method] target entropy E={float(value)} must be in (0, log2 C) = (0, 3.32193)"
    )


@given(classes=st.integers(2, 100), share=st.floats(0.01, 0.99))
def test_ranges_of_the_method_follow_the_number_of_classes(classes: int, share: float) -> None:
    """T within (1/C, 1) and E within (0, log2 C) are taken; the same E is refused once C is too small for it."""
    entropy = share * math.log2(classes)
    values = with_setting("method", "target_entropy", entropy)
    values["contract"]["classes"] = classes
    values["method"]["target_peak"] = 1 / classes + share * (1 - 1 / classes)
    values["method"]["epsilon"] = 1e-9
    assert run_config(values).method_config().target_entropy == entropy
    values["method"]["target_entropy"] = math.log2(classes)
    assert "must be in (0, log2 C)" in refusal(values)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (0.0, "epsilon must be > 0, got 0.0"),
        (-1e-3, "epsilon must be > 0, got -0.001"),
        (math.inf, "epsilon must be > 0, got inf"),
        (4.0, "epsilon=4.0 must be < 2*min(E, log2 C - E) = 3.32193; use a smaller one"),
    ],
)
def test_a_tolerance_out_of_range_is_refused(value: float, sentence: str) -> None:
    assert refusal(with_setting("method", "epsilon", value)) == f"[method] {sentence}"


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("temperature", 0.0, "temperature must be > 0, got 0.0"),
        ("learning_rate", -0.1, "learning_rate must be > 0, got -0.1"),
        ("batch_size", 0, "batch_size must be >= 1, got 0"),
        ("momentum", 1.0, "momentum must be >= 0 and < 1, got 1.0"),
    ],
)
def test_settings_of_the_method_out_of_range_are_refused(key: str, value: float, sentence: str) -> None:
    assert refusal(with_setting("method", key, value)) == f"[method] {sentence}"


# --- what is missing, several at once, and the file


def test_everything_that_is_missing_or_wrong_is_said_at_once() -> None:
    assert refusal({}) == "[run] is missing; [contract] is missing"
    assert refusal({"run": {"rounds": -1}, "contract": {"classes": 2}}) == (
        "[run] name is missing; [run] rounds is -1, must be at least 0; [contract] input_shape is missing"
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("rounds = 5", "rounds = '5'"), '[run] rounds is "5", must be a whole number'),
        (("rounds = 5", "rounds = true"), "[run] rounds is true, must be a whole number"),
        (("target_peak = 0.75", "target_peak = 0.5"), "[method] target peak T=0.5 must be in (1/C, 1) = (0.5, 1)"),
        (("target_peak = 0.75", "target_peak = 2020-01-01"), '[method] target_peak is "2020-01-01", must be a number'),
    ],
)
def test_a_mistake_in_a_file_names_file_section_and_key(tmp_path: Path, change: tuple[str, str], sentence: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(TOML.replace(*change))
    with pytest.raises(ConfigurationError) as error:
        load_run_config(path)
    assert str(error.value).startswith(f"{path}: {sentence}")


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    sentence = f"there is no file {tmp_path / 'none.toml'}; enter the path of a TOML file, such as run.toml"
    with pytest.raises(ConfigurationError, match=sentence):
        load_run_config(tmp_path / "none.toml")


def test_a_file_that_is_no_toml_is_named_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[run]\nname = digits\n")
    with pytest.raises(ConfigurationError, match=rf"{path}: .*line 2"):
        load_run_config(path)


def test_a_file_in_another_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes("[run]\nname = 'é'\n".encode("latin-1"))
    with pytest.raises(ConfigurationError, match=f"cannot read {path}: 'utf-8' codec can't decode"):
        load_run_config(path)


# --- what is kept of a run


def test_the_server_section_is_not_kept_and_all_else_is() -> None:
    fixed = run_config(GOOD).fixed_part()
    assert set(fixed) == {"run", "contract", "model", "method"}
    assert run_config(with_setting("server", "listen", "0.0.0.0:1")).fixed_part() == fixed
    for section, key, value in (
        ("run", "rounds", 31),
        ("contract", "knowledge_type", "float32"),
        ("model", "server", "package.module:factory"),
        ("method", "beta", 2.0),
    ):
        changed = run_config(with_setting(section, key, value)).fixed_part()
        assert changed != fixed
        assert changed[section][key] == value


def test_an_extractor_of_a_library_gives_the_features() -> None:
    values = with_setting("model", "extractor", "torchvision:resnet18")
    values["run"] = {"name": "digits", "method": "classstats"}
    assert run_config(values).method_config().features == "model"
    values["method"] = {"features": "scattering"}
    assert run_config(values).method_config().features == "scattering"
    values["run"], values["method"] = {"name": "digits", "method": "feddkc"}, {}
    assert run_config(values).method == {}


def test_only_an_extractor_of_a_library_has_weights(tmp_path: Path) -> None:
    values = with_setting("model", "extractor_weights", "weights.pt")
    assert "extractor_weights is for an extractor torchvision:... or timm:..." in refusal(values)
    values["model"]["extractor"] = "torchvision:resnet18"
    assert run_config(values).setup()["model"]["extractor_weights"] == "weights.pt"  # no file: a name in the library
    (tmp_path / "weights.pt").touch()
    values["model"]["extractor_weights"] = str(tmp_path / "weights.pt")
    assert run_config(values).setup()["model"]["extractor_weights"] == str(tmp_path / "weights.pt")
