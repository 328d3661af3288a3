"""Methods from outside: modules that a configuration names, and installed packages; over both links."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.outside import EXAMPLES, fresh_process, install, write_module
from typer.testing import CliRunner

from fleetdistill.errors import ConfigurationError, RunError
from fleetdistill.methods import config_class, config_of_contract, known_methods, outside
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_lab import Simulation, simulate
from fleetdistill_server.cli.app import app
from fleetdistill_server.config.run_config import load_run_config, run_config
from fleetdistill_server.methods import modules_of, server_class

SETTINGS = ("train_limit=60", "test_limit=20", "torch_device=cpu")
OPTIONS = [word for setting in SETTINGS for word in ("--set", f"simulation.{setting}")]
OPTIONS += ["--devices", "2", "--rounds", "2"]
OPTIONS += ["--model", "digits_linear", "--no-controls"]
NOTES_ITSELF = "from pathlib import Path\nPath(__file__).with_suffix('.imported').touch()\n"


@pytest.fixture(autouse=True)
def process(tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    with fresh_process("own_method", "spy", "broken", "silent", "half", "faulty") as patch:
        patch.syspath_prepend(str(tmp_path))
        yield patch


@pytest.fixture
def with_own_method(process: pytest.MonkeyPatch) -> None:
    process.syspath_prepend(str(EXAMPLES))


def simulated(out: Path, *options: str) -> dict[str, Any]:
    told = CliRunner().invoke(app, ["simulate", "--out", str(out), *OPTIONS, *options])
    assert told.exit_code == 0, told.stderr
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report


def small(method: str, out: Path | str, *modules: str) -> Simulation:
    """A round of two devices over gRPC, without controls; many write `out` as a string."""
    return Simulation(
        method=method,
        modules=modules,
        link="grpc",
        devices=2,
        rounds=1,
        train_limit=60,
        test_limit=20,
        models=("digits_linear",),
        with_alone=False,
        with_fedavg=False,
        out=out,  # type: ignore[arg-type]
    )


# --- [run] import and --import


@pytest.mark.slow
@pytest.mark.long
def test_an_imported_method_gives_the_same_over_both_links(with_own_method: None, tmp_path: Path) -> None:
    options = ["--import", "own_method", "--method", "proximal", "--set", "method.mu=0.1"]
    memory, grpc = (simulated(tmp_path / link, "--link", link, *options) for link in ("memory", "grpc"))
    assert memory["method"] == "proximal"
    assert memory["accuracy_by_round"] == grpc["accuracy_by_round"]
    assert memory["global_accuracy_by_round"] == grpc["global_accuracy_by_round"]
    assert all(len(curve) == 2 for curve in grpc["accuracy_by_round"].values())


def test_imported_method_simulation_resumes_without_being_named(with_own_method: None, tmp_path: Path) -> None:
    before = simulated(tmp_path / "out", "--import", "own_method", "--method", "proximal")
    with fresh_process("own_method"):
        after = simulated(tmp_path / "out", "--resume")
    assert after["accuracy_by_round"] == before["accuracy_by_round"]


def test_the_table_of_methods_has_imported_ones(with_own_method: None) -> None:
    told = CliRunner().invoke(app, ["methods", "--import", "own_method", "--json"])
    rows = {row["method"]: row for row in json.loads(told.stdout)["methods"]}
    assert rows["proximal"]["summary"] == "FedAvg with a proximal term in local training"
    assert rows["proximal"]["bytes_up"] == rows["fedavg"]["bytes_up"]


RUN_TOML = """
[run]
name = "own"
method = "{method}"
import = {modules}
[contract]
classes = 10
input_shape = [1, 8, 8]
[model]
device = "digits_linear"
[server]
store = "{store}"
listen = "127.0.0.1:0"
"""


def run_toml(tmp_path: Path, modules: list[str], method: str = "proximal") -> Path:
    file = tmp_path / "run.toml"
    file.write_text(RUN_TOML.format(method=method, modules=json.dumps(modules), store=tmp_path / "store"))
    return file


def test_run_toml_names_modules_that_register_methods(with_own_method: None, tmp_path: Path) -> None:
    config = load_run_config(run_toml(tmp_path, ["own_method"]))
    assert config.run.modules == ["own_method"]
    assert config.method_config().mu == 0.1
    assert config.fixed_part()["run"]["import"] == ["own_method"], "export builds the method from what the store has"
    assert server_class("proximal").__name__ == "FedProxServer"


def test_serve_check_covers_imports(with_own_method: None, tmp_path: Path) -> None:
    write_module(tmp_path, "silent", "x = 1\n")
    told = CliRunner().invoke(app, ["serve", "--check", str(run_toml(tmp_path, ["own_method"]))])
    assert told.exit_code == 0, told.stderr
    assert "proximal, 30 rounds" in told.stdout
    for modules, sentence in WRONG_MODULES.items():
        told = CliRunner().invoke(app, ["serve", "--check", str(run_toml(tmp_path, [modules]))])
        assert (told.exit_code, told.stdout) == (1, "")
        assert f"[run] import: {sentence}" in told.stderr
        assert not (tmp_path / "store").exists()


WRONG_MODULES = {
    "not_there": "cannot import 'not_there': ModuleNotFoundError: No module named 'not_there'; install its package, or",
    "silent": "module 'silent' registers no method; call fleetdistill.methods.register and",
    "../silent.py": "'../silent.py' is not a module name; write it as in Python's import, package.module",
}


@pytest.mark.parametrize("name", WRONG_MODULES)
@pytest.mark.parametrize("command", ["simulate", "methods"])
def test_module_missing_or_registering_nothing_is_refused(name: str, command: str, tmp_path: Path) -> None:
    write_module(tmp_path, "silent", "x = 1\n")
    out = ["--out", str(tmp_path / "out")] if command == "simulate" else []
    told = CliRunner().invoke(app, [command, *out, "--import", name])
    assert (told.exit_code, told.stdout) == (1, "")
    assert WRONG_MODULES[name] in told.stderr
    assert not (tmp_path / "out").exists()


def test_what_a_module_raises_is_one_sentence(tmp_path: Path) -> None:
    write_module(tmp_path, "broken", "1 / 0\n")
    with pytest.raises(ConfigurationError, match=r"cannot import 'broken': ZeroDivisionError: division by zero$"):
        outside.import_modules(["broken"], "--import")


def test_a_half_that_lacks_a_member_is_no_missing_package(tmp_path: Path, process: pytest.MonkeyPatch) -> None:
    text = """
import fleetdistill_server.methods
from fleetdistill_server.methods.base import ServerMethod

fleetdistill_server.methods.register("half", ServerMethod)
"""
    write_module(tmp_path, "half_a_method", text)
    with pytest.raises(ConfigurationError, match=r"^--import: 'half_a_method': ServerMethod, .* says of it$"):
        outside.import_modules(["half_a_method"], "--import")


def test_method_without_server_half_is_refused_naming_the_call(tmp_path: Path) -> None:
    text = """
from fleetdistill import methods
from fleetdistill.methods.fedavg.config import FedAvgConfig
from fleetdistill.methods.fedavg.device import FedAvgDevice

methods.register("half", FedAvgConfig, FedAvgDevice)
"""
    write_module(tmp_path, "half", text)
    outside.import_modules(["half"], "--import")
    with pytest.raises(ConfigurationError, match=r"'half' has no server half: .*fleetdistill_server.methods.register"):
        server_class("half")


@pytest.mark.slow
@pytest.mark.long
def test_method_registered_only_in_this_process_runs_over_grpc(with_own_method: None, tmp_path: Path) -> None:
    import own_method  # type: ignore[import-not-found]  # noqa: F401

    assert modules_of("proximal") == ["own_method"]
    assert modules_of("fedavg") == []
    assert simulate(small("proximal", tmp_path / "out")).completed_rounds == 1


@pytest.mark.slow
def test_an_engine_that_cannot_import_the_method_says_so(tmp_path: Path, process: pytest.MonkeyPatch) -> None:
    fails = "import sys\nif 'engine' in sys.argv[0]: raise RuntimeError('not in the engine')\n"
    write_module(tmp_path, "broken", fails + (EXAMPLES / "own_method.py").read_text().replace("from __future__", "#"))
    with pytest.raises(RunError, match=r"cannot run: .*'broken': RuntimeError: not in the engine"):
        simulate(small("proximal", tmp_path / "out", "broken"))


FAULTY = """
from fleetdistill import methods
from fleetdistill.methods.fedavg.config import FedAvgConfig
from fleetdistill.methods.fedavg.device import FedAvgDevice
from fleetdistill.methods.base import answers
import fleetdistill_server.methods
from fleetdistill_server.methods.fedavg import FedAvgServer


class FaultyDevice(FedAvgDevice):
    @answers("train")
    def train(self, ask):
        raise ValueError("a fault of the method")


methods.register("faulty", FedAvgConfig, FaultyDevice)
fleetdistill_server.methods.register("faulty", FedAvgServer)
"""


def test_the_same_fault_of_all_devices_ends_a_simulation(tmp_path: Path, process: pytest.MonkeyPatch) -> None:
    """The second round shows that another try fails alike."""
    write_module(tmp_path, "faulty", FAULTY)
    alike = "2 rounds in a row fell short of the quorum; all devices failed with the same error; the last event is from"
    with pytest.raises(RunError, match=f"^{alike} round 2: .*ValueError: a fault of the method"):
        simulate(small("faulty", str(tmp_path / "out"), "faulty"))


@pytest.mark.slow
@pytest.mark.long
def test_a_faulty_device_half_over_grpc_leaves_its_traceback(tmp_path: Path, process: pytest.MonkeyPatch) -> None:
    write_module(tmp_path, "faulty", FAULTY)
    with pytest.raises(RunError, match=r"2 rounds in a row fell short .* the devices' log is (.*)") as error:
        simulate(small("faulty", str(tmp_path / "out"), "faulty"))
    log = Path(str(error.value).rpartition("the devices' log is ")[2])
    assert "ValueError: a fault of the method" in log.read_text()
    assert "Traceback" in log.read_text()


# --- installed packages


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.cold_start
def test_installed_method_runs_over_both_links_without_naming_it(with_own_method: None, tmp_path: Path) -> None:
    install(tmp_path, "own-methods", {"proximal": "own_method"})
    memory, grpc = (
        simulated(tmp_path / link, "--link", link, "--method", "proximal", "--set", "method.mu=0.1")
        for link in ("memory", "grpc")
    )
    assert memory["accuracy_by_round"] == grpc["accuracy_by_round"]
    told = CliRunner().invoke(app, ["methods", "--json"])
    assert "proximal" in [row["method"] for row in json.loads(told.stdout)["methods"]]
    checked = CliRunner().invoke(app, ["serve", "--check", str(run_toml(tmp_path, []))])
    assert checked.exit_code == 0, checked.stderr


def test_an_entry_point_may_name_a_function_that_registers(with_own_method: None, tmp_path: Path) -> None:
    write_module(tmp_path, "half", "def add():\n    import own_method\n")
    install(tmp_path, "own-methods", {"proximal": "half:add"})
    assert config_class("proximal").__name__ == "FedProxConfig"
    assert server_class("proximal").__name__ == "FedProxServer"
    assert modules_of("proximal") == [], "other processes find it themselves"


def contract(method: str) -> contract_pb2.Contract:
    return contract_pb2.Contract(method=method, classes=["a", "b"])


def test_contract_imports_only_code_declared_under_method_name(tmp_path: Path) -> None:
    write_module(tmp_path, "spy", NOTES_ITSELF)
    install(tmp_path, "others", {"another": "spy"})
    for name in ("spy", "spy:main", "others", f"{outside.GROUP}.another", "another:spy"):
        with pytest.raises(ConfigurationError, match="unknown method"):
            config_of_contract(contract(name))
    assert "another" in known_methods()
    assert not (tmp_path / "spy.imported").exists()
    assert "spy" not in sys.modules


def test_a_built_in_method_is_never_taken_from_a_package(tmp_path: Path) -> None:
    write_module(tmp_path, "spy", NOTES_ITSELF)
    install(tmp_path, "others", {"fedavg": "spy"})
    assert config_class("fedavg").__module__ == "fleetdistill.methods.fedavg.config"
    assert not (tmp_path / "spy.imported").exists()


def test_a_package_that_does_not_do_what_it_declares_is_named(tmp_path: Path) -> None:
    write_module(tmp_path, "silent", "x = 1\n")
    install(tmp_path, "silent-methods", {"quiet": "silent", "gone": "not_there:add"})
    with pytest.raises(ConfigurationError, match=r"package 'silent-methods' declares method 'quiet' as 'silent'"):
        config_class("quiet")
    with pytest.raises(ConfigurationError, match=r"'gone' of package 'silent-methods': cannot load .* or uninstall"):
        run_config({"run": {"name": "r", "method": "gone"}, "contract": {"classes": 2, "input_shape": [1]}})
    install(tmp_path, "more-methods", {"quiet": "spy"})
    with pytest.raises(ConfigurationError, match=r"several packages declare method 'quiet' \(package 'more-methods', "):
        config_class("quiet")
