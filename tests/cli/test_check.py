"""`fleetdistill serve --check`, and that nothing is stored of a run that cannot begin."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.later_version import later_version, schema
from support.processes import COMMAND, free_port
from support.record_schema import make_store, recorded_config
from support.secured import make_pki
from torchvision import models
from typer.testing import CliRunner

from fleetdistill.errors import ConfigurationError
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.cli.app import app
from fleetdistill_server.cli.serve_checks import check_new_run
from fleetdistill_server.config.run_config import RunConfig, load_run_config, run_config
from fleetdistill_server.config.section import as_toml
from fleetdistill_server.config.server_config import RUN_SECTIONS, SETTINGS
from fleetdistill_server.engine.contract import pace_warning
from fleetdistill_server.engine.preflight import range_warnings
from fleetdistill_server.security.pki import SERVER
from fleetdistill_server.service import serve_lock
from fleetdistill_server.service.registration import register
from fleetdistill_server.store.store import Store
from fleetdistill_server.texts import SUMS_UNREVIEWED


def write(folder: Path, **changes: Any) -> Path:
    """A run.toml; changes are `section_key=value`, None leaves a setting out."""
    settings: dict[str, Any] = {
        "run_name": "digits",
        "run_method": "feddkc",
        "contract_classes": 10,
        "contract_input_shape": [1, 8, 8],
        "server_listen": "127.0.0.1:0",
        "server_store": str(folder / "store"),
        "server_torch_device": "cpu",
        **changes,
    }
    lines: dict[str, list[str]] = {}
    for name, value in settings.items():
        section, _, key = name.partition("_")
        lines.setdefault(section, [f"[{section}]"]).append(f"{key} = {value!r}")
    path = folder / "run.toml"
    path.write_text("\n".join(line for section in lines.values() for line in section))
    return path


def check(path: Path, *options: str) -> tuple[int, list[str]]:
    done = CliRunner().invoke(app, ["serve", "--check", str(path), *options])
    return done.exit_code, done.output.splitlines()


def evaluation_file(folder: Path, shape: tuple[int, ...]) -> str:
    path = folder / "evaluation.npz"
    np.savez(path, inputs=np.zeros(shape, np.float32), labels=np.arange(len(np.zeros(shape))) % 10)
    return str(path)


def test_a_private_run_is_told_how_many_rows_a_device_needs(tmp_path: Path) -> None:
    path = write(tmp_path, run_method="classstats_private", run_rounds=1, run_min_devices=4, method_epsilon=1.0)
    code, said = check(path)
    assert code == 0, said
    sentence = "each row of each device is (1, 1e-5)-private against the server"
    assert f"{sentence}; with 4 devices, about 708 rows a device would do" in said


@pytest.mark.parametrize(("given", "missing"), [("", True), ("ab" * 32, False)])
def test_secure_sums_are_told_what_they_do_not_have(tmp_path: Path, given: str, missing: bool) -> None:
    settings = {"method_keys": "roster", "method_roster_key": given}
    code, said = check(write(tmp_path, run_method="classstats_summed", run_rounds=1, run_min_devices=4, **settings))
    assert code == 0, said
    assert "no guarantee for a row: the sums have no noise" in said
    assert SUMS_UNREVIEWED in said
    text = "roster_key is not set: one device that the roster has not endorsed lets every sum fail"
    assert (text in said) == missing


def test_a_file_that_is_right_is_told_in_a_few_lines(tmp_path: Path) -> None:
    path = write(tmp_path, run_rounds=3, evaluation_data=evaluation_file(tmp_path, (20, 1, 8, 8)))
    code, said = check(path)
    assert code == 0
    assert said[:4] == [
        f"{path} can be served",
        "run 'digits': new",
        "not allowed by apps by default: features, logits, labels; to allow it, set Device(allow=["
        '"class_statistics", "counts", "metrics", "features", "logits", "labels"])',
        "feddkc, 3 rounds, at least 2 devices a round",
    ]
    assert said[4].startswith("server half: ")
    assert said[4].endswith("proxy set: none, evaluation: 20 samples")
    assert said[5:] == [f"listens on 127.0.0.1:0 (plain text), store {tmp_path / 'store'}"]


@pytest.mark.parametrize(
    ("method", "rounds", "seconds", "warned"),
    [("fedavg", 0, 0.0, True), ("fedavg", 0, 60.0, False), ("fedavg", 3, 0.0, False), ("classstats", 0, 0.0, False)],
)
def test_a_run_that_trains_without_a_pause_is_warned_of(method: str, rounds: int, seconds: float, warned: bool) -> None:
    sections = {
        "run": {"name": "field", "method": method, "rounds": rounds, "min_round_seconds": seconds},
        "contract": {"classes": 10, "input_shape": [1, 8, 8]},
    }
    text = pace_warning(run_config(sections))
    assert ("set [run] min_round_seconds" in text) == bool(text) == warned


@pytest.mark.long
@pytest.mark.parametrize(("refine", "told"), [("off", False), ("auto", False), ("gradients", True)])
def test_what_apps_must_allow_is_told(tmp_path: Path, refine: str, told: bool) -> None:
    code, said = check(write(tmp_path, run_method="classstats", run_rounds=1, method_refine=refine))
    assert code == 0, said
    assert any(line.startswith("not allowed by apps by default: gradients; to allow it") for line in said) == told
    assert not (tmp_path / "store").exists()


@pytest.mark.long
def test_what_a_pretrained_extractor_does_is_told(tmp_path: Path) -> None:
    settings = {"model_extractor": "torchvision:shufflenet_v2_x0_5", "model_extractor_weights": weights_file(tmp_path)}
    path = write(tmp_path, run_method="classstats", run_rounds=1, contract_input_shape=[3, 32, 300], **settings)
    np.savez(tmp_path / "pictures.npz", inputs=np.full((10, 3, 32, 300), 255, np.float32), labels=np.arange(10))
    path.write_text(f"{path.read_text()}\n[evaluation]\ndata = '{tmp_path / 'pictures.npz'}'")
    code, said = check(path)
    assert code == 0, said
    text = "1024 features of images [3, 32, 300] in [0, 1], resized to 224x224, normalised; 1."
    assert said[2].startswith(f"extractor torchvision:shufflenet_v2_x0_5: {text}")
    assert said[3].startswith("warning: the images are smaller than the 224x224 of the weights")
    assert said[4].startswith("warning: the images are larger than the 224x224 of the weights")
    assert said[5] == "warning: [evaluation] data has values in [255, 255], but the extractor needs images in [0, 1]"


@pytest.mark.parametrize(
    ("low", "high", "is_told"), [(0, 1, False), (-1, 1, True), (-0.01, 0.5, True), (0, 1.01, True)]
)
def test_images_outside_the_unit_range_are_told(tmp_path: Path, low: float, high: float, is_told: bool) -> None:
    path = write(tmp_path, run_method="classstats", run_rounds=1, model_extractor="torchvision:shufflenet_v2_x0_5")
    inputs = np.full((10, 1, 8, 8), high, np.float32)
    inputs[0] = low
    np.savez(tmp_path / "pictures.npz", inputs=inputs, labels=np.arange(10))
    path.write_text(f"{path.read_text()}\n[evaluation]\ndata = '{tmp_path / 'pictures.npz'}'")
    assert bool(range_warnings(load_run_config(path))) == is_told


def weights_file(folder: Path) -> str:
    torch.save(models.shufflenet_v2_x0_5().state_dict(), folder / "weights.pt")
    return str(folder / "weights.pt")


def test_a_factory_is_told_to_normalise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_factories.py").write_text(FACTORIES)
    monkeypatch.syspath_prepend(tmp_path)
    settings = {"run_method": "classstats", "run_rounds": 1, "method_features": "model"}
    code, said = check(write(tmp_path, model_extractor="own_factories:flat", **settings))
    assert code == 0, said
    text = "64 features of inputs [1, 8, 8] as they are: the factory must resize and normalise them"
    assert said[2].startswith(f"extractor own_factories:flat: {text}; ")


FACTORIES = """
from torch import nn
from torch.nn.functional import interpolate

def fails(**options):
    raise ValueError("no such weights")

def flat(input_shape):
    return nn.Flatten()

class Smoothed(nn.Module):
    def forward(self, x):
        return interpolate(x, (4, 4), mode="bilinear", antialias=True).flatten(1)

def smoothed(input_shape):
    return Smoothed()
"""

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a model that is not there": (
        {"model_server": "digist_server"},
        "[model] server: unknown server model 'digist_server'; did you mean 'digits_server'? Expected one of ",
    ),
    "a model that fails": (
        {"model_extractor": "own_factories:fails"},
        "[model] extractor: device model 'own_factories:fails' raised ValueError: no such weights",
    ),
    "an extractor that cannot be exported": (
        {"run_method": "classstats", "method_features": "model", "model_extractor": "own_factories:smoothed"},
        "[model] extractor: it must be exported as ONNX, but tracing the model failed: UnsupportedOperatorError: "
        "Exporting the operator 'aten::_upsample_bilinear2d_aa' to ONNX opset version 18 is not supported; resize with "
        "antialias=False",
    ),
    "vectors for scattering": (
        {"run_method": "classstats", "contract_input_shape": [20]},
        "[contract] input_shape: scattering needs images of at least 8 pixels a side, got inputs [20]; in run.toml, "
        'set features = "model" in [method] and extractor = "identity" in [model]',
    ),
    "vectors with an extractor of images": (
        {"run_method": "classstats", "contract_input_shape": [20], "method_features": "model"},
        "[model] extractor: shape (20,) must be channels, height, width, for instance (3, 32, 32); for vectors set "
        "extractor = \"identity\" in [model], which is 'digits_extractor'",
    ),
    "a method that lacks a model": ({"run_method": "fedavg"}, "this method needs one model for all devices; set"),
    "a method that lacks a proxy set": ({"run_method": "cdkt", "model_device": "cdkt_digits"}, "cdkt needs a labelled"),
    "inputs that fit no model": (
        {"contract_input_shape": [3, 5]},
        "[model] extractor: shape (3, 5) must be channels, height, width",
    ),
    "a proxy set that is not there": (
        {"proxy_data": "none.npz", "proxy_name": "p", "proxy_licence": "MIT"},
        "[proxy] data: 'none.npz' does not exist",
    ),
    "evaluation data that are not there": (
        {"evaluation_data": "none.npz"},
        "[evaluation] data: 'none.npz' does not exist",
    ),
    "fewer devices than a round needs": (
        {"run_min_devices": 5, "limits_devices": 2},
        "[limits] devices is 2, but [run] min_devices is 5",
    ),
    "a torch device that is not there": ({"server_torch_device": "cuda:99"}, "[server] torch_device: 'cuda:99' cannot"),
    "an address of somebody else": ({"server_listen": "192.0.2.1:0"}, "[server] listen is '192.0.2.1:0', which is"),
    "a PKI that is not there": (
        {"server_pki": "none"},
        "none has no server.pem; restore your copy",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_told_and_nothing_is_stored(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, sentence = WRONG[name]
    (tmp_path / "own_factories.py").write_text(FACTORIES)
    monkeypatch.syspath_prepend(tmp_path)
    code, said = check(write(tmp_path, **changes))
    assert code == 1
    assert [line.startswith(f"error: {sentence}") for line in said].count(True) == 1, said
    assert not (tmp_path / "store").exists()


def test_everything_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    wrong = {"model_server": "none", "server_listen": "192.0.2.1:0"}
    code, said = check(write(tmp_path, evaluation_data=evaluation_file(tmp_path, (20, 5)), **wrong))
    assert code == 1
    beginnings = [
        "[server] listen is ",
        "[server] listen: cannot listen on ",
        "[model] server: unknown server model",
        "[evaluation] data",
    ]
    assert [line.startswith(f"error: {begins}") for line, begins in zip(said, beginnings, strict=True)] == [True] * 4
    assert said[-1].endswith("has inputs of shape [5], but [contract] input_shape is [1, 8, 8]")


def test_a_port_in_use_is_told(tmp_path: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        address = f"127.0.0.1:{busy.getsockname()[1]}"
        code, said = check(write(tmp_path, server_listen=address))
    assert (code, said) == (1, [f"error: [server] listen: cannot listen on {address}: Address already in use"])


def test_a_port_in_use_is_told_for_each_setting(tmp_path: Path) -> None:
    with socket.socket() as one, socket.socket() as other:
        for busy in (one, other):
            busy.bind(("127.0.0.1", 0))
            busy.listen()
        listen, metrics = (f"127.0.0.1:{busy.getsockname()[1]}" for busy in (one, other))
        code, said = check(write(tmp_path, server_listen=listen, server_metrics=metrics))
        assert (code, len(said)) == (1, 2)
        assert said[1] == f"error: [server] metrics: cannot listen on {metrics}: Address already in use"
        path = write(tmp_path, server_listen=listen)
        (tmp_path / "store").mkdir()
        (tmp_path / "store" / "served.toml").write_text(as_toml(load_run_config(path)))
        with serve_lock.take(tmp_path / "store", "digits"):
            assert check(path)[0] == 0, "the run's own server listens there"
            assert "the running server has" not in "".join(check(path)[1])
            kept = f"[server] keep_free_bytes = {load_run_config(path).server.keep_free_bytes}, not 7"
            code, said = check(write(tmp_path, server_listen=listen, server_keep_free_bytes=7))
            assert (code, said[-1]) == (0, f"the running server has {kept}; restart it to change this")
            code, said = check(write(tmp_path, server_listen=listen, server_metrics=metrics))
            assert (code, len(said)) == (1, 1)


def test_more_space_to_keep_free_than_there_is_is_told(tmp_path: Path) -> None:
    code, said = check(write(tmp_path, server_keep_free_bytes=10**18))
    assert (code, len(said)) == (1, 1)
    assert said[0].startswith("error: only ")
    assert said[0].endswith("free some space, or lower [server] keep_free_bytes, which is 1000000000.00 GB")


def test_a_store_beyond_its_budget_is_told(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "file").write_bytes(bytes(6_000_000))
    code, said = check(write(tmp_path, server_disk_budget_bytes=5_000_000))
    assert (code, len(said)) == (1, 1)
    assert said[0].startswith("error: the store has 6.00 MB, so uploads are refused: run `fleetdistill runs prune RUN`")
    assert said[0].endswith("or raise [server] disk_budget_bytes, which is 5.00 MB")


@pytest.mark.parametrize("name", ["ca-key.pem", "server.pem"])
def test_a_key_that_others_can_read_is_an_error(tmp_path: Path, name: str) -> None:
    make_pki(tmp_path / "pki")
    key = tmp_path / "pki" / name
    key.chmod(0o644)
    path = write(tmp_path, server_pki=str(tmp_path / "pki"), server_enrol_listen="127.0.0.1:0")
    text = f"error: other users can read the key in {key}; run `chmod 600 {key}`"
    assert check(path) == (1, [text])
    done = CliRunner().invoke(app, ["serve", str(path)])
    assert (done.exit_code, done.stderr.splitlines()) == (1, [text])
    assert not (tmp_path / "store").exists()


def test_a_store_that_is_a_file_and_a_port_named_twice_are_told(tmp_path: Path) -> None:
    place, address = tmp_path / "file", f"127.0.0.1:{free_port()}"
    place.touch()
    path = write(tmp_path, server_store=str(place), server_listen=address, server_metrics=address)
    assert check(path) == (
        1,
        [
            f"error: [server] store is {str(place)!r}, which is a file; name a directory",
            f"error: [server] listen and metrics are both {address!r}; they need two ports",
        ],
    )
    done = CliRunner().invoke(app, ["serve", str(path)])
    assert (done.exit_code, "which is a file" in done.stderr) == (1, True)


def test_settings_without_effect_are_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text(
        f'[server]\nstore = "{tmp_path / "store"}"\nlisten = "127.0.0.1:0"\nkeep_rounds = 7\ntorch_device = "cpu"\n'
        f'enrol_listen = "127.0.0.1:0"\ndata_directories = ["{tmp_path}", "{tmp_path / "data"}"]\n'
    )
    code, said = check(path)
    assert code == 0
    assert [line for line in said if line.startswith("warning: ")] == [
        "warning: [server] torch_device, keep_rounds in the file of a server of many runs has no effect: each run has "
        "its own; set it in [server] of the run's run.toml",
        "warning: [server] enrol_listen has no effect without [server] pki",
        f"warning: [server] data_directories: there is no directory {tmp_path / 'data'}; no run can use its data",
    ]


def test_a_section_that_is_misspelt_is_told_with_other_errors(tmp_path: Path) -> None:
    (tmp_path / "server.toml").write_text("[limts]\ndevices = 3\n[server]\nlisten = 5\n")
    code, said = check(tmp_path / "server.toml")
    assert code == 1
    unknown, listen = said[0].partition("server.toml: ")[2].split("?; ")
    assert unknown == "[limts]: unknown section; did you mean 'limits'"
    assert listen.startswith("[server] listen is 5, must be")


def test_a_misspelt_section_is_not_taken_for_one_of_a_run(tmp_path: Path) -> None:
    assert {*RUN_SECTIONS, *SETTINGS} == set(RunConfig.model_fields)
    for name, meant in {"engines": "did you mean 'engine'", "engine": "[engine] belongs to a run"}.items():
        (tmp_path / "server.toml").write_text(f"[{name}]\nx = 1\n")
        code, said = check(tmp_path / "server.toml")
        assert (code, meant in said[0]) == (1, True), said


@pytest.mark.parametrize("wrong", ["another CA", "expired", "later"])
def test_a_certificate_with_which_nobody_can_connect_is_told(
    tmp_path: Path, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = make_pki(tmp_path / "pki")
    if wrong == "another CA":
        make_pki(tmp_path / "other")
        shutil.copy(tmp_path / "other" / SERVER, tmp_path / "pki" / SERVER)
        text = f"{tmp_path / 'pki' / SERVER}: the certificate is from none of the trusted CAs; run `fleetdistill pki"
    elif wrong == "expired":
        authority.issue_server([], 1e-9)
        text = "the certificate of the server has expired, so nobody can connect; renew it with"
    else:
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now - 365 * 86_400)
        text = "the certificate of the server is valid only from 20"
    code, said = check(write(tmp_path, server_pki=str(tmp_path / "pki"), server_enrol_listen="127.0.0.1:0"))
    assert (code, len(said)) == (1, 1)
    assert said[0].startswith(f"error: {text}")


@pytest.mark.parametrize(
    ("changes", "begins"),
    [
        ({"run_rounds": -1}, ["{path}: [run] method: unknown method 'fedavgg'; did you mean 'fedavg'?"]),
        ({}, ["{path}: [run] method: unknown method 'fedavgg'; did you mean 'fedavg'?"]),
        ({"run_method": "feddkc"}, []),
        ({"server_listen": "nowhere"}, ["{path}: [run] method: unknown method 'fedavgg'; did you mean 'fedavg'?"]),
    ],
)
def test_settings_that_cannot_be_used_hide_no_other_error(
    tmp_path: Path, changes: dict[str, Any], begins: list[str]
) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        listen = f"127.0.0.1:{busy.getsockname()[1]}"
        given = {"run_method": "fedavgg", "model_device": "digits_linnear", "server_listen": listen, **changes}
        path = write(tmp_path, **given)
        code, said = check(path)
    assert code == 1
    begins = [*begins, "[model] device: unknown device model 'digits_linnear'; did"]
    if "server_listen" not in changes:
        begins.append("[server] listen: cannot listen")
    result = sorted(line.removeprefix(f"error: {path}: ").removeprefix("error: ") for line in said)
    wanted = sorted(begin.removeprefix("{path}: ") for begin in begins)
    assert [line.startswith(one) for line, one in zip(result, wanted, strict=True)] == [True] * len(wanted), said


def test_a_run_of_another_configuration_is_told_and_stays(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    register(store, load_run_config(write(tmp_path)))
    store.runs.close_round("digits", store.runs.start_round("digits", []), b"checkpoint", [], {})
    before = store.runs.get("digits")
    code, said = check(write(tmp_path, run_rounds=50))
    assert (code, said[1]) == (0, "run 'digits': preparing, 1 round completed")
    code, said = check(write(tmp_path, run_seed=7))
    assert (code, len(said)) == (1, 1)
    assert said[0].startswith("error: run 'digits' exists with another configuration: run.seed was 0, is 7; ")
    assert store.runs.get("digits") == before, "a check changes nothing"
    store.close()


@pytest.mark.long
def test_serve_stores_nothing_of_a_run_that_cannot_begin(tmp_path: Path) -> None:
    path = write(tmp_path, model_server="no_such_module:make")
    done = subprocess.run([*COMMAND, "serve", str(path)], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "error: [model] server: server model 'no_such_module:make': cannot import "
    )
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "store").exists()


def test_a_run_with_a_contract_is_not_checked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart must not wait for models that are known to work."""
    path = write(tmp_path, model_server="no_such_module:make")
    with pytest.raises(ConfigurationError, match="cannot import 'no_such_module'"):
        check_new_run(path, load_run_config(path), threading.Event())
    store = Store.open(tmp_path / "store")
    register(store, load_run_config(path))
    store.runs.publish_contract("digits", contract_pb2.Contract(run="digits").SerializeToString())
    store.close()
    monkeypatch.setattr(subprocess, "Popen", lambda *given, **more: pytest.fail("no process is needed"))
    check_new_run(path, load_run_config(path), threading.Event())


def test_a_check_can_be_stopped(tmp_path: Path) -> None:
    path = write(tmp_path, model_server="no_such_module:make")
    stopped = threading.Event()
    stopped.set()
    before = len(os.listdir(tmp_path))
    check_new_run(path, load_run_config(path), stopped)
    assert len(os.listdir(tmp_path)) == before


@pytest.fixture
def old(tmp_path: Path) -> Iterator[RunConfig]:
    """A run in the store of an earlier version than this process."""
    make_store(tmp_path / "store")
    config = recorded_config(tmp_path / "store")
    update = {"listen": "127.0.0.1:0", "keep_free_bytes": 0}
    with later_version():
        yield config.model_copy(update={"server": config.server.model_copy(update=update)})


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_store_of_earlier_version_is_checked_not_migrated(old: RunConfig, tmp_path: Path) -> None:
    path, one = tmp_path / "run.toml", tmp_path / "server.toml"
    path.write_text(as_toml(old))
    one.write_text(f'[server]\nlisten = "127.0.0.1:0"\nstore = "{old.server.store}"\nkeep_free_bytes = 0\n')
    before = files(tmp_path)
    code, said = check(path)
    assert code == 0, said
    assert "run 'recorded': running, 2 rounds completed" in said
    code, said = check(one)
    assert code == 0, said
    assert any(line.startswith("runs in the store: recorded") for line in said), said
    assert files(tmp_path) == before


def test_refused_run_leaves_store_of_earlier_version_unchanged(old: RunConfig, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(as_toml(old.model_copy(update={"contract": old.contract.model_copy(update={"classes": 4})})))
    before = files(tmp_path)
    code, said = check(path)
    assert code == 1
    assert "classes" in said[0]
    assert files(tmp_path) == before


def test_doctor_does_not_migrate_store_of_running_older_version(old: RunConfig, tmp_path: Path) -> None:
    path, directory = tmp_path / "run.toml", Path(old.server.store)
    path.write_text(as_toml(old))
    tables = schema(directory)
    with serve_lock.take(directory, old.run.name):
        said = CliRunner().invoke(app, ["doctor", str(path)]).output
    assert "a server serves run 'recorded'" in said
    assert schema(directory) == tables
