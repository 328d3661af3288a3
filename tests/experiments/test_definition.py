"""Definitions of experiments: files, scales, grids, and what is refused before anything runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.long import long_except

from fleetdistill.errors import ConfigurationError
from fleetdistill_lab.experiments.definition import (
    Experiment,
    MethodEntry,
    find_experiment,
    packaged,
    parse_seeds,
    read_experiment,
)
from fleetdistill_lab.simulation.data.partition import partition

TEXT = """
title = "Three methods"
seeds = "0-1"
metrics = ["accuracy", "rounds_to_target"]
target = { metric = "global", level = 0.5 }

[simulation]
devices = 3

[method]
local_epochs = 1

[grid]
alpha = [0.1, 1.0]
"fedprox.mu" = [0.1]

[grid.fleet]
all = { rounds = 4 }
half = { devices = 6, "simulation.devices_per_round" = 3, "method.batch_size" = 8 }

[methods.FedAvg]
method = "fedavg"

[methods.fedprox]
settings = { mu = 0.5 }

[methods."one exchange"]
method = "classstats"
simulation = { rounds = 1 }

[[claims]]
order = ["fedprox", "FedAvg"]

[printed.accuracy.FedAvg]
"alpha 0.1, all" = 61.5

[scales.small]
seeds = [7]
grid.alpha = [0.5]
methods.FedAvg.settings = { learning_rate = 0.1 }
""".replace('"fedprox.mu" = [0.1]\n', "")


def write(folder: Path, text: str = TEXT) -> Path:
    file = folder / "three.toml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "seeds"), [("0", [0]), ("0-2", [0, 1, 2]), ("4,1", [4, 1]), ("1-2, 7", [1, 2, 7]), ("3-3", [3])]
)
def test_seeds_are_numbers_and_ranges(text: str, seeds: list[int]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,1", "0-2,1", "-1", "1-", "1.5"])
def test_other_seeds_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="seeds is"):
        parse_seeds(text)


def test_grid_is_the_product_of_its_axes(tmp_path: Path) -> None:
    experiment = read_experiment(write(tmp_path))
    assert list(experiment.points) == ["alpha 0.1, all", "alpha 0.1, half", "alpha 1.0, all", "alpha 1.0, half"]
    cells = experiment.cells()
    assert len(cells) == 2 * 4 * 3
    assert [(cell.simulation.seed, cell.point, cell.label) for cell in cells[:7]] == [
        (0, "alpha 0.1, all", "FedAvg"),
        (0, "alpha 0.1, all", "fedprox"),
        (0, "alpha 0.1, all", "one exchange"),
        (1, "alpha 0.1, all", "FedAvg"),
        (1, "alpha 0.1, all", "fedprox"),
        (1, "alpha 0.1, all", "one exchange"),
        (0, "alpha 0.1, half", "FedAvg"),
    ], "a p value needs all seeds of a grid point, and no other point"
    half = next(cell.simulation for cell in cells if cell.point == "alpha 1.0, half" and cell.label == "fedprox")
    assert (half.method, half.alpha, half.devices, half.devices_per_round) == ("fedprox", 1.0, 6, 3)
    assert dict(half.settings) == {"local_epochs": 1, "batch_size": 8, "mu": 0.5}
    assert (half.with_alone, half.with_fedavg) == (False, False)


def test_settings_of_a_method_precede_those_of_all(tmp_path: Path) -> None:
    cells = read_experiment(write(tmp_path)).cells()
    assert {cell.simulation.rounds for cell in cells if cell.label == "one exchange"} == {1}
    assert {cell.simulation.rounds for cell in cells if cell.label == "FedAvg"} == {4, None}


def test_a_seed_that_occurs_twice_in_a_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"seeds is \[3, 3\]; each seed must occur once"):
        read_experiment(write(tmp_path, TEXT.replace('seeds = "0-1"', "seeds = [3, 3]")), "")


@pytest.mark.parametrize("modules", ["5", '"own"', "[5]"])
def test_modules_of_a_wrong_type_are_named(tmp_path: Path, modules: str) -> None:
    text = TEXT.replace("devices = 3", f"devices = 3\nmodules = {modules}")
    with pytest.raises(ConfigurationError, match="modules"):
        read_experiment(write(tmp_path, text), "").cells()


def test_methods_of_own_modules_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "import fleetdistill.methods as device, fleetdistill_server.methods as server\n"
    module += "device.register('own_of_experiments', device.config_class('fedavg'), device.device_class('fedavg'))\n"
    module += "server.register('own_of_experiments', server.server_class('fedavg'))\n"
    (tmp_path / "experiments_own.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    text = TEXT.replace("devices = 3", 'devices = 3\nmodules = ["experiments_own"]')
    text = text.replace("[methods.fedprox]\nsettings = { mu = 0.5 }", "[methods.own_of_experiments]")
    text = text.replace('order = ["fedprox", "FedAvg"]', 'order = ["own_of_experiments", "FedAvg"]')
    read_experiment(write(tmp_path, text), "").check_names()


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    """Also those of a grid point and of one method; a name is no path."""
    for name in ("all.npz", "half.npz"):
        np.savez(tmp_path / name, inputs=np.zeros((20, 1, 8, 8), np.float32), labels=np.arange(20) % 2)
    (tmp_path / "phones.csv").write_text("device,start,end\na,0,100\n")
    text = TEXT.replace("devices = 3", 'devices = 3\ndataset = "all.npz"\ndata_dir = "sets"')
    text = text.replace("[grid]", '[fleet]\ntraces = "phones.csv"\n[grid]')
    text = text.replace("{ rounds = 4", '{ dataset = "half.npz", rounds = 4').replace(
        "{ dev", '{ dataset = "digits", dev'
    )
    text = text.replace("{ rounds = 1 }", '{ rounds = 1, dataset = "all.npz" }')
    cells = read_experiment(write(tmp_path, text)).cells()
    found = {(cell.label, cell.sections["simulation"]["dataset"]) for cell in cells if cell.label != "fedprox"}
    own, other = str(tmp_path / "all.npz"), str(tmp_path / "half.npz")
    assert found == {("FedAvg", other), ("FedAvg", "digits"), ("one exchange", own)}
    assert {cell.sections["fleet"]["traces"] for cell in cells} == {str(tmp_path / "phones.csv")}
    assert {cell.sections["simulation"]["data_dir"] for cell in cells} == {str(tmp_path / "sets")}


def test_missing_file_is_named_with_its_grid_point(tmp_path: Path) -> None:
    text = TEXT.replace("{ rounds = 4", '{ dataset = "none.npz", rounds = 4')
    with pytest.raises(ConfigurationError, match=r"FedAvg, alpha 0\.1, all: there is no file .*/none\.npz"):
        read_experiment(write(tmp_path, text))


def test_scale_replaces_parts_of_the_file(tmp_path: Path) -> None:
    experiment = read_experiment(write(tmp_path), "small")
    assert (experiment.scale, list(experiment.seeds)) == ("small", [7])
    assert list(experiment.points) == ["alpha 0.5, all", "alpha 0.5, half"]
    assert dict(experiment.cells()[0].simulation.settings) == {"local_epochs": 1, "learning_rate": 0.1}
    assert experiment.printed == {"accuracy": {}}, "the source has no alpha 0.5"
    assert experiment.printed_elsewhere == {"accuracy": {"FedAvg": {"alpha 0.1, all": 61.5}}}


def test_note_of_a_scale_is_added_to_that_of_the_file(tmp_path: Path) -> None:
    text = TEXT.replace("[scales.small]", '[scales.large]\n[scales.small]\nnote = "3 rounds."')
    file = write(tmp_path, 'note = "Rates are not printed: 0.1."\n' + text)
    notes = [read_experiment(file, scale).note for scale in ("small", "large")]
    assert notes == ["Rates are not printed: 0.1. Scale small: 3 rounds.", "Rates are not printed: 0.1."]


def test_cells_with_the_same_settings_share_a_run() -> None:
    """FedAvg has no mu, so its cells of both grid points are one run, and so are settings that equal the defaults."""
    experiment = Experiment(
        name="x",
        title="x",
        seeds=[0],
        methods={
            "fedavg": MethodEntry(),
            "fedprox": MethodEntry(),
            "the same": MethodEntry(method="fedavg", settings={"batch_size": 32}),
            "another": MethodEntry(method="fedavg", settings={"batch_size": 16}),
        },
        grid={"mu": {"mu 0.1": {"method.mu": 0.1}, "mu 1": {"method.mu": 1.0}}},
    )
    runs = {(cell.label, cell.point): cell.run for cell in experiment.cells()}
    assert runs["fedavg", "mu 0.1"] == runs["fedavg", "mu 1"] == runs["the same", "mu 1"]
    assert runs["fedprox", "mu 0.1"] != runs["fedprox", "mu 1"]
    assert len(set(runs.values())) == 4


TUNE = """
[tune]
setting = "method.learning_rate"
values = [0.01, 0.1]
"""


def test_tuning_tries_each_value_on_held_out_rows(tmp_path: Path) -> None:
    experiment = read_experiment(write(tmp_path, TEXT + TUNE))
    tried = experiment.tuning_cells()
    assert len(tried) == 4 * 3 * 2
    assert [value for value, _ in tried[:2]] == [0.01, 0.1]
    assert {cell.simulation.seed for _, cell in tried} == {0}
    assert {cell.simulation.test_part for _, cell in tried} == {"local_split"}
    assert {cell.simulation.settings["learning_rate"] for _, cell in tried} == {0.01, 0.1}
    chosen = experiment.cells({("FedAvg", "alpha 0.1, all"): 0.1})
    rates = {(cell.label, cell.point): cell.simulation.settings.get("learning_rate") for cell in chosen}
    assert rates["FedAvg", "alpha 0.1, all"] == 0.1
    assert rates["FedAvg", "alpha 1.0, all"] is None
    assert {cell.simulation.test_part for cell in chosen} == {"global"}
    assert read_experiment(write(tmp_path)).tuning_cells() == []


def test_method_without_the_setting_is_not_tuned(tmp_path: Path) -> None:
    text = (TEXT + TUNE).replace("method.learning_rate", "method.mu")
    assert {cell.label for _, cell in read_experiment(write(tmp_path, text)).tuning_cells()} == {"fedprox"}


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('seeds = "0-1"', 'seeds = "1-0"', "seeds is '1-0'"),
        ("devices = 3", "device = 3", "unknown setting 'device'"),
        ("devices = 3", "devices = -1", "devices is -1"),
        ("local_epochs = 1", "local_epoch = 1", "method.local_epoch: none of"),
        ("local_epochs = 1", "local_epochs = -1", "local_epochs"),
        ('method = "fedavg"', 'method = "gossip"', "unknown method 'gossip'"),
        ("[methods.fedprox]", "[methods.gossip]", "unknown method 'gossip'"),
        ("settings = { mu = 0.5 }", "settings = { nu = 0.5 }", "nu"),
        ("settings = { mu = 0.5 }", "setting = { mu = 0.5 }", "methods.fedprox.setting"),
        ('"accuracy", "rounds', '"acuracy", "rounds', "unknown metric 'acuracy'"),
        ("target = {", "nothing = {", "nothing"),
        ('target = { metric = "global", level = 0.5 }', "", "rounds_to_target needs a [target]"),
        ("level = 0.5", "level = { mnist = 0.5 }", "[target] level: unknown data set 'digits', expected one of mnist"),
        ("level = 0.5", 'level = "high"', "target.level: Input should be a valid number"),
        ("rounds_to_target", "rounds_to_second_target", "needs a [target] with metric and second_level"),
        ('order = ["fedprox"', 'order = ["FedProx"', "unknown label of a method 'FedProx'"),
        ('order = ["fedprox", "FedAvg"]', 'order = ["fedprox"]', "claims.0.order"),
        ("printed.accuracy.FedAvg", "printed.accuracy.FedAvgM", "unknown label of a method 'FedAvgM'"),
        ("printed.accuracy", "printed.acuracy", "unknown metric 'acuracy'"),
        ('"alpha 0.1, all" = 61.5', '"alpha 0.2, all" = 61.5', "unknown grid point 'alpha 0.2, all'"),
        ('"method.batch_size"', '"method.batch"', "method.batch: none of"),
        ('"simulation.devices_per_round" = 3', '"simulation.devices_per_round" = 7', "devices_per_round is 7"),
        ("alpha = [0.1, 1.0]", "alpha = 0.1", "grid.alpha"),
        ('title = "Three methods"', "title = ", "three.toml"),
        ('"simulation.devices_per_round" = 3', '"fedprox.mu" = 3', "unknown section 'fedprox'"),
        (
            "[methods.fedprox]",
            'tune = { setting = "method.mu", values = [1] }\n[methods.fedprox]',
            "methods.FedAvg.tune",
        ),
    ],
)
def test_what_cannot_run_is_refused(old: str, new: str, sentence: str, tmp_path: Path) -> None:
    assert old in TEXT
    with pytest.raises(ConfigurationError) as caught:
        read_experiment(write(tmp_path, TEXT.replace(old, new, 1))).cells()
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("alpha = [0.1, 1.0]", "alpha = [0.1, 0]", "FedAvg, alpha 0, all: alpha is 0.0, must be a finite number > 0"),
        ("alpha = [0.1, 1.0]", 'alpha = ["x"]', "FedAvg, alpha x, all: [simulation] alpha is 'x'"),
        ("rounds = 4", '"partition.min_size" = -1', "FedAvg, alpha 0.1, all: [partition] min_size is -1"),
        ("rounds = 4", '"method.batch_size" = 0', "FedAvg, alpha 0.1, all: [method] batch_size must be >= 1"),
        ("grid.alpha = [0.5]", "grid.alpha = [-1.0]", "FedAvg, alpha -1.0, all: alpha is -1.0"),
        ('order = ["fedprox"', 'order = ["FedProx"', "unknown label of a method 'FedProx'"),
    ],
)
def test_file_with_a_value_out_of_range_is_not_read(old: str, new: str, sentence: str, tmp_path: Path) -> None:
    assert old in TEXT
    changed = TEXT.replace(old, new, 1).replace('"alpha 0.1, all" = 61.5', "")
    with pytest.raises(ConfigurationError, match="^" + re.escape(f"{tmp_path}/three.toml: {sentence}")):
        read_experiment(write(tmp_path, changed), "small" if "-1.0" in new else "")


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("[grid]", "[grd]", "three.toml: grd: unknown key 'grd'; did you mean 'grid'?"),
        ("[scales.small]", "[scale.small]", "scale: unknown key 'scale'; did you mean 'scales'?"),
        ("settings = {", "setting = {", "methods.fedprox.setting: unknown key 'setting'; did you mean 'settings'?"),
        ('order = ["fedprox"', 'metrc = "x"\norder = ["fedprox"', "claims.0.metrc: unknown key 'metrc'; did you mean"),
        ("level = 0.5", "level = 0.5, lvel = 1", "target.lvel: unknown key 'lvel'; did you mean 'level'?"),
        (
            'title = "Three',
            'tune = { valus = [1] }\ntitle = "Three',
            "tune.valus: unknown key 'valus'; did you mean 'values'?",
        ),
    ],
)
def test_misspelt_key_of_a_file_has_a_suggestion(old: str, new: str, sentence: str, tmp_path: Path) -> None:
    assert old in TEXT
    text = TEXT.replace(old, new, 1) if "valus" not in new else "tune = { valus = [1] }\n" + TEXT
    with pytest.raises(ConfigurationError) as caught:
        read_experiment(write(tmp_path, text))
    assert sentence in str(caught.value)


def refused(folder: Path, text: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        read_experiment(write(folder, text))
    return str(caught.value)


def test_all_problems_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    """First those of its keys, then those of its names and settings, each once for the two methods that have it."""
    keys = TEXT.replace("[grid]", "[grd]").replace('"0-1"', '"1-0"').replace("settings = { mu", "setting = { mu")
    said = refused(tmp_path, keys.replace("[[claims]]", "[[claims]]\nat = 1"))
    parts = ["three.toml: seeds is '1-0'", "grd: unknown key 'grd'", "methods.fedprox.setting: unknown", "claims.0"]
    assert [part in said for part in parts] == [True] * 4
    assert said.count("three.toml") == 1
    values = TEXT.replace("devices = 3", "devises = 3\nalhpa = 1\nquorum = 'x'").replace(
        'order = ["fedprox"', 'order = ["x"'
    )
    said = refused(tmp_path, values.replace('"accuracy", "rounds', '"acuracy", "rounds').replace("mu = 0.5", "mu = -1"))
    parts = ["metric 'acuracy'", "label of a method 'x'", "'devises'", "'alhpa'", "quorum is 'x'"]
    assert [said.count(part) for part in parts] == [1] * 5
    said = refused(tmp_path, TEXT.replace("mu = 0.5", "mu = -1").replace("[0.1, 1.0]", "[0.1, 0]"))
    assert said.count("mu must be >= 0") == said.count("alpha is 0.0") == 1
    assert "fedprox, alpha 0.1, all: [method] mu must be >= 0" in said


def test_problem_of_a_value_is_told_once(tmp_path: Path) -> None:
    assert refused(tmp_path, TEXT.replace("alpha = [0.1, 1.0]", "alpha = 0.1", 1)).count("grid.alpha") == 1


def test_unknown_names_list_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"unknown scale 'large'.*paper, small"):
        read_experiment(write(tmp_path), "large")
    with pytest.raises(ConfigurationError, match=r"unknown experiment 'no'.*feddkc"):
        find_experiment("no")
    with pytest.raises(ConfigurationError, match="there is no file"):
        read_experiment(find_experiment(str(tmp_path / "no.toml")))


@pytest.mark.parametrize("scale", long_except(["paper", "small"], "small"))
@pytest.mark.parametrize("name", packaged())
def test_experiment_of_the_package_is_valid(name: str, scale: str) -> None:
    experiment = read_experiment(find_experiment(name), scale)
    assert experiment.source
    assert len(experiment.seeds) >= 3, "fewer seeds decide nothing"
    assert experiment.cells()


PAPERS = ("cdkt", "dafkd", "fedd2s", "feddkc", "feddkd")


@pytest.mark.parametrize("name", [name for name in packaged() if name.startswith(PAPERS)])
def test_papers_mean_is_not_bounded_at_their_scale(name: str) -> None:
    for scale, robust in (("paper", "off"), ("small", "gross")):
        cells = read_experiment(find_experiment(name), scale).cells()
        assert {cell.simulation.configuration().robust for cell in cells} == {robust}


@pytest.mark.parametrize("name", ["cdkt-tables-1-2", "cdkt-tables-9-11"])
def test_cdkt_has_devices_for_all_classes(name: str) -> None:
    for cell in read_experiment(find_experiment(name), "paper").cells():
        wanted = cell.simulation
        classes = 100 if wanted.dataset == "cifar100" else 10
        labels, given = np.arange(classes).repeat(500), {"classes_per_device": wanted.classes_per_device}
        parts = partition(wanted.partition_path, labels, wanted.devices, 0, **given, **wanted.partition_settings)
        assert len(np.unique(labels[np.concatenate(parts.indices)])) == classes
        assert np.std(parts.sizes) > 0, "the paper's private data sets are unbalanced"
        assert wanted.test_part == "local_split"


@pytest.mark.parametrize("name", [name for name in packaged() if name.startswith("fedd2s")])
def test_fedd2s_is_scored_on_the_devices_own_rows(name: str) -> None:
    """The paper has 20 % of each device's data for the test; its figures' orders are claims, too."""
    experiment = read_experiment(find_experiment(name), "paper")
    assert {cell.simulation.test_part for cell in experiment.cells()} == {"local_split"}
    assert experiment.claims


def test_fedd2s_baselines_have_two_epochs_of_each_kind() -> None:
    """Of four, half distil or train the base, and half learn labels or train the head."""
    cells = read_experiment(find_experiment("fedd2s-table-2"), "paper").cells()
    of = {cell.label: cell.simulation.configuration() for cell in cells}
    assert (of["FedMD"].local_epochs, of["FedMD"].proxy_epochs) == (2, 2)
    assert (of["FedMD"].digest_loss, of["FedMD"].combine) == ("kl", "mean_probs")
    for label in ("FedRep", "FedRep+"):
        assert (of[label].local_epochs, of[label].base_epochs) == (4, 2)


def of_partition(grid: dict[str, Any], **simulation: object) -> Experiment:
    methods = {"fedavg": MethodEntry()}
    return Experiment(name="x", title="x", seeds=[0], methods=methods, sections={"simulation": simulation}, grid=grid)


def test_settings_of_another_partition_are_refused() -> None:
    alphas = {"alpha": {"alpha 1": {"simulation.alpha": 1.0}}}
    of_iid = {"simulation.partition": "iid"}
    mixed = {"fleet": {"even": of_iid, "skewed": {"simulation.partition": "dirichlet_by_class"}}}
    with pytest.raises(
        ConfigurationError, match="fedavg: alpha has no effect with the partition iid; leave it out, or"
    ):
        of_partition({}, partition="iid", alpha=0.3).cells()
    with pytest.raises(ConfigurationError, match="fedavg, alpha 1: alpha has no effect with the partition iid"):
        of_partition(alphas, partition="iid").cells()
    with pytest.raises(ConfigurationError, match="fedavg, even, alpha 1: alpha has no effect"):
        of_partition({**mixed, **alphas}).cells()
    assert len(of_partition(mixed, alpha=0.3).cells()) == 2, "the grid's other partition has it"
    assert of_partition({}, partition="iid").cells()


@pytest.mark.parametrize("partition", ["classes_random", "class_shards"])
def test_more_classes_than_the_data_set_has_are_refused(partition: str) -> None:
    sections = {"simulation": {"partition": partition, "classes_per_device": 40}}
    with pytest.raises(ConfigurationError, match="classes_per_device is 40, must be between 1 and 10"):
        Experiment(name="x", title="x", seeds=[0], methods={"fedavg": MethodEntry()}, sections=sections).cells()


def test_stacked_runs_are_runs_of_their_own() -> None:
    """Their figures round otherwise; those of workers are the same to the bit."""
    methods = {"fedavg": MethodEntry()}
    runs = [
        Experiment(name="x", title="x", seeds=[0], methods=methods, sections={"simulation": given}).cells()[0].run
        for given in ({}, {"workers": 2}, {"backend": "stacked"})
    ]
    assert runs[0] == runs[1] != runs[2]
