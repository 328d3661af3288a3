"""Experiments that run: results, repetition, kills, failures and the report."""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path

import pandas
import pytest
from typer.testing import CliRunner

from fleetdistill.errors import ConfigurationError, DataError
from fleetdistill.state.file_lock import lock_file
from fleetdistill_lab.experiments.changes import changed_definition, changed_results, changed_versions
from fleetdistill_lab.experiments.definition import Claim, Experiment, MethodEntry, Tune, read_experiment
from fleetdistill_lab.experiments.metrics import Target
from fleetdistill_lab.experiments.notes import model_notes
from fleetdistill_lab.experiments.page import Written, write_report
from fleetdistill_lab.experiments.results import Results, open_results
from fleetdistill_lab.experiments.runner import Progress, Times, run_experiment
from fleetdistill_lab.experiments.summary import holm, paired_p
from fleetdistill_lab.simulation.fleet import simulate
from fleetdistill_lab.simulation.options import merge_settings, read_settings
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.cli.app import app

TINY = {"devices": 2, "rounds": 2, "train_limit": 60, "test_limit": 40, "score": "devices"}


def experiment(**changes) -> Experiment:
    methods = {
        "FedAvg": MethodEntry(method="fedavg"),
        "FedProx": MethodEntry(method="fedprox"),
        "the same": MethodEntry(method="fedavg", settings={"batch_size": 32}),
    }
    known = {
        "name": "tiny",
        "title": "Tiny",
        "seeds": [0, 1],
        "methods": methods,
        "sections": {"simulation": TINY},
        "metrics": ["accuracy", "rounds_to_target"],
        "target": Target(metric="global", level=0.0),
    }
    return Experiment(**{**known, **changes})


def figures(folder: Path) -> dict[str, object]:
    """Returns everything in the results that must not depend on how a run came to its end."""
    with open_results(folder) as results:
        metrics = results.table("metrics").sort_values(["run", "metric", "label"])
        rounds = results.table("rounds").drop(columns=["seconds"]).sort_values(["run", "label", "round"])
    return {
        "metrics": metrics[metrics["metric"] != "seconds"].to_csv(index=False),
        "rounds": rounds.to_csv(index=False),
    }


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Progress]]:
    """An experiment that ran undisturbed with two workers, and its progress."""
    folder, seen = tmp_path_factory.mktemp("experiment"), list[Progress]()
    run_experiment(experiment(), folder, workers=2, on_progress=seen.append)
    assert [one.error for one in seen if one.error] == []
    return folder, seen


def test_every_cell_has_results_and_equal_ones_share_a_run(done) -> None:
    folder, _ = done
    with open_results(folder) as results:
        cells, runs = results.cells(), results.runs()
        assert len(cells) == 6
        assert len(runs) == 4
        assert {run.status for run in runs.values()} == {"finished"}
        values = results.values("accuracy")[""]
        assert values["FedAvg"] == values["the same"]
        assert results.values("rounds_to_target")[""]["FedProx"] == {0: 1.0, 1: 1.0}
        assert [row.model for row in results.models("")][:2] == ["devices", "global"]


def test_results_are_those_of_the_reports(done) -> None:
    folder, _ = done
    with open_results(folder) as results:
        run = results.cells()[0].run
        devices, partitions = results.table("devices"), results.table("partitions")
        rounds, traffic = results.table("rounds"), results.table("traffic")
    report = json.loads((folder / "runs" / run / "report.json").read_text())
    own = devices[(devices["run"] == run) & (devices["label"] == "FedAvg")]
    assert own["accuracy"].tolist() == [device["accuracy_fleet"] for device in report["devices"]]
    counts = partitions[(partitions["run"] == run) & (partitions["label"] == "FedAvg")]["samples"]
    assert counts.tolist() == [count for device in report["devices"] for count in device["samples_by_class"]]
    of_run = rounds[(rounds["run"] == run) & (rounds["label"] == "FedAvg")]
    assert of_run["global"].tolist() == report["global_accuracy_by_round"]
    assert of_run["bytes_up"].tolist() == [sent["up"] for sent in report["bytes_by_round"]]
    assert of_run["seconds"].is_monotonic_increasing
    assert of_run["exchanges"].tolist() == [1.0, 2.0]
    assert of_run["steps"].tolist() == [spent["steps"] for spent in report["curves"][0]["spent"]]
    sent = traffic[(traffic["run"] == run) & (traffic["label"] == "FedAvg") & (traffic["direction"] == "up")]
    assert sent["bytes"].sum() == pytest.approx(2 * of_run["bytes_up"].sum())


@pytest.mark.pictures
def test_equal_bytes_are_those_of_the_reports(done, tmp_path: Path) -> None:
    """FedAvg's devices have the global model; were they to keep their own, it would be that after local training."""
    folder, _ = done
    with open_results(folder) as results:
        run, key = results.cells()[0].run, ("", "FedAvg")
        of_global, of_devices = results.curves(["FedAvg"])[key][0], results.curves([])[key][0]
        written = write_report(experiment(), results, tmp_path)
    report = json.loads((folder / "runs" / run / "report.json").read_text())
    spent = list(itertools.accumulate(sent["up"] + sent["down"] for sent in report["bytes_by_round"]))
    assert of_global == list(zip(spent, report["global_accuracy_by_round"], strict=True))
    assert of_devices[-1][1] == pytest.approx(report["mean_accuracy_trained"])
    with (tmp_path / "tables" / "equal-bytes.csv").open() as file:
        rows = {row["label"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["FedProx", "the same"]
    assert {(row["rounds"], row["reference_rounds"], row["seeds"]) for row in rows.values()} == {("2", "2", "2")}
    assert float(rows["the same"]["difference"]) == 0
    assert "The model is the global one with FedAvg; FedProx; the same, and" in written.page.read_text()


@pytest.mark.pictures
def test_notes_of_a_latex_table_are_whole(done, tmp_path: Path) -> None:
    """Data, devices, rounds, seeds, what the reader is warned of, and the file's note."""
    folder, _ = done
    given = experiment(note="Our own note.")
    with open_results(folder) as results:
        written = write_report(given, results, tmp_path)
    text = (tmp_path / "tables" / "metric-accuracy.tex").read_text()
    for part in (
        "Data digits;",
        "rounds 2;",
        "seeds 0, 1.",
        "Rates: defaults",
        "A control is missing",
        "Our own note.",
    ):
        assert part in text, part
    assert "Bytes are of tensors" not in text
    assert "Data digits;" in written.page.read_text()


@pytest.mark.pictures
def test_accuracy_by_class_is_in_results_and_page(done, tmp_path: Path) -> None:
    folder, _ = done
    with open_results(folder) as results:
        classes, written = results.table("classes"), write_report(experiment(), results, tmp_path)
    run = classes["run"].iloc[0]
    report = json.loads((folder / "runs" / run / "report.json").read_text())
    of_run = classes[(classes["run"] == run) & (classes["label"] == "FedAvg")]
    assert of_run["class"].tolist() == report["class_names"]
    assert of_run["global"].tolist() == report["global_accuracy_by_class"]
    assert of_run["devices"].tolist() == report["mean_accuracy_by_class"]
    assert of_run["global"].mean() == pytest.approx(report["global_accuracy_by_round"][-1]), "4 test rows of each class"
    with (tmp_path / "tables" / "classes.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if (row["label"], row["model"]) == ("FedAvg", "global")]
    means = classes[classes["label"] == "FedAvg"].groupby("class")["global"].mean()
    assert {row["name"]: float(row["accuracy"]) for row in rows} == pytest.approx(means.to_dict())
    assert "Accuracy by class" in written.page.read_text()
    assert "devices&#39; models at the end" in written.page.read_text()


def test_progress_counts_runs_and_estimates_the_time_left(done) -> None:
    _, seen = done
    ended = [one for one in seen if one.cell is not None]
    assert [(one.finished, one.total, one.failed) for one in ended] == [(1, 4, 0), (2, 4, 0), (3, 4, 0), (4, 4, 0)]
    assert ended[-1].seconds_left == 0.0
    assert all(one.seconds_left is not None and one.seconds_left >= 0 for one in ended[:-1])


def test_time_left_contains_the_starts_of_processes() -> None:
    """Runs of 10 and 20 s whose processes took 4 and 6 s more, 2.5 runs left and two workers."""
    left, labels = {"x": 1.0, "y": 1.0, "z": 0.5}, {"x": "a", "y": "b", "z": "b"}
    times = Times(left, labels, {"a": [10.0], "b": [20.0]}, [4.0, 6.0])
    assert times.estimate(2) == (15 + 25 + 12.5) / 2
    assert Times(left, labels, {"a": [10.0], "b": [20.0]}).estimate(2) == 20, "nothing ended in this call"
    assert Times(left, labels, {}).estimate(2) is None


@pytest.mark.long
def test_processes_take_longer_than_their_runs(tmp_path: Path) -> None:
    """The other run is estimated to take as long as the first, and its process has to start."""
    seen = list[Progress]()
    run_experiment(experiment(methods={"fedavg": MethodEntry()}), tmp_path, on_progress=seen.append)
    first = next(one for one in seen if one.cell is not None)
    assert first.seconds_left is not None
    assert first.seconds_left > first.seconds


def test_finished_runs_are_not_repeated(done) -> None:
    folder, _ = done
    before, seen = figures(folder), list[Progress]()
    run_experiment(experiment(seeds=[0]), folder, on_progress=seen.append)
    run_experiment(experiment(), folder, on_progress=seen.append)
    assert [(one.finished, one.total, one.cell) for one in seen] == [(2, 2, None), (4, 4, None)]
    assert figures(folder) == before


@pytest.mark.long
def test_changed_target_needs_no_new_run(done) -> None:
    folder, _ = done
    seen = list[Progress]()
    try:
        changed = experiment(target=Target(metric="global", level=2.0))
        run_experiment(changed, folder, on_progress=seen.append)
        with open_results(folder) as results:
            assert results.values("rounds_to_target")[""]["FedAvg"] == {}, "no accuracy reaches 2"
    finally:
        run_experiment(experiment(), folder, on_progress=seen.append)
    assert all(one.cell is None for one in seen)


@pytest.mark.long
def test_run_without_its_report_is_repeated(done, tmp_path: Path) -> None:
    """As after a kill while --overwrite repeats the runs: the database knows a run whose folder is gone."""
    folder, _ = done
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    with open_results(tmp_path) as results:
        run = results.cells()[0].run
    shutil.rmtree(tmp_path / "runs" / run)
    seen = list[Progress]()
    run_experiment(experiment(), tmp_path, on_progress=seen.append)
    assert [one.cell.run for one in seen if one.cell is not None] == [run]
    assert figures(tmp_path) == figures(folder)


@pytest.mark.long
def test_finished_run_keeps_the_versions_that_made_it(done, tmp_path: Path) -> None:
    folder, _ = done
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    with sqlite3.connect(tmp_path / "results.sqlite") as database:
        database.execute('UPDATE runs SET versions = \'{"torch": "1.0"}\'')
    run_experiment(experiment(), tmp_path)
    with open_results(folder) as now, open_results(tmp_path) as earlier:
        assert {run.versions["torch"] for run in earlier.runs().values()} == {"1.0"}
        assert any(sentence.startswith("torch was 1.0, is ") for sentence in changed_versions(earlier, now))


def test_experiment_stopped_while_tuning_has_a_report(tmp_path: Path) -> None:
    def stop(done: Progress) -> None:
        raise KeyboardInterrupt

    tuned = experiment(seeds=[0], tune=Tune(setting="method.learning_rate", values=[0.01, 0.1]))
    with pytest.raises(KeyboardInterrupt):
        run_experiment(tuned, tmp_path, on_progress=stop)
    with open_results(tmp_path) as results:
        assert "3 cells not run yet" in " ".join(write_report(tuned, results, tmp_path / "report").warnings)


@pytest.mark.long
def test_time_left_is_estimated_from_earlier_calls(done, tmp_path: Path) -> None:
    """FedAvg's other run took 1,000 seconds until its last round, those before it was interrupted included."""
    folder, _ = done
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    with open_results(tmp_path) as results:
        runs = {cell.seed: cell.run for cell in results.cells() if cell.label == "FedAvg"}
    (tmp_path / "runs" / runs[0] / "seconds.jsonl").write_text("1.0\n1000.0\n")
    shutil.rmtree(tmp_path / "runs" / runs[1])
    seen = list[Progress]()
    run_experiment(experiment(), tmp_path, workers=2, on_progress=seen.append)
    assert (seen[0].finished, seen[0].total, seen[0].seconds_left) == (3, 4, 1000.0)
    assert seen[-1].seconds_left == 0.0
    with open_results(tmp_path) as results:
        assert results.values("seconds")[""]["FedAvg"][0] == 1000.0


@pytest.mark.long
def test_compare_says_how_many_cells_are_shared(done, tmp_path: Path) -> None:
    folder, _ = done
    (tmp_path / "other").mkdir()
    shutil.copy(folder / "results.sqlite", tmp_path / "other")
    with sqlite3.connect(tmp_path / "other/results.sqlite") as database:
        database.execute("UPDATE cells SET point = 'alpha 1'")
    assert "no metric differs in the 6 cells that both have" in call("compare", str(folder), str(folder)).stdout
    said = call("compare", str(folder), str(tmp_path / "other")).stdout
    assert "grid point alpha 1 is only in the second" in said
    assert "nothing is shared: no method, grid point and seed has finished in both" in said
    assert "no metric differs" not in said


@pytest.mark.long
@pytest.mark.pictures
def test_page_says_settings_by_point_and_kinds_in_words(done, tmp_path: Path) -> None:
    """Seed 1 of the results becomes a second grid point whose runs had another learning rate."""
    folder, _ = done
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    with sqlite3.connect(tmp_path / "results.sqlite") as database:
        database.execute("UPDATE cells SET point = 'alpha ' || (seed + 1), seed = 0")
        database.execute("UPDATE runs SET method_settings = json_set(method_settings, '$.learning_rate', 0.7 + seed)")
        database.execute("UPDATE runs SET settings = json_set(settings, '$.simulation.top_k', 3)")
        columns = "run, method, seed, status, error, seconds, devices, partition, partition_parameters, settings"
        database.execute(
            f"INSERT INTO runs ({columns}, method_settings, versions) SELECT 'other', "
            f"{columns.removeprefix('run, ')}, method_settings, '{{}}' FROM runs LIMIT 1"
        )
    grid = {"alpha": {f"alpha {alpha}": {"simulation.alpha": float(alpha)} for alpha in (1, 2)}}
    of_paper = {"scale": "small", "printed": {"accuracy": {"FedAvg": {"alpha 1": 61.5}}}}
    of_paper["printed_elsewhere"] = {"accuracy": {"FedAvg": {"MNIST": 97.5}, "FedProx": {"MNIST": 98, "SVHN": 80}}}
    changed = experiment(seeds=[0], grid=grid, metrics=["accuracy", "top_k"], **of_paper)
    with open_results(tmp_path) as results:
        written = write_report(changed, results, tmp_path / "report")
    text, said = written.page.read_text(), " ".join(written.warnings)
    assert "<caption>Top-3 accuracy of the devices" in text
    assert written.tables[1].title.endswith("as the source prints it")
    assert list(written.tables[1].header) == ["", "MNIST", "SVHN"]
    assert written.tables[1].rows == [["FedAvg", "97.5", ""], ["FedProx", "98", "80"]]
    assert "<th>MNIST</th><th>SVHN</th>" in text
    lines = (tmp_path / "report" / "tables" / "source-accuracy.csv").read_text().splitlines()
    assert lines == ["label,point,value", "FedAvg,MNIST,97.5", "FedProx,MNIST,98", "FedProx,SVHN,80"]
    assert "97.5" in (tmp_path / "report" / "tables" / "source-accuracy.tex").read_text()
    assert written.tables[2].title.startswith("Top-3 accuracy")
    assert "Not all runs" not in said, "a run of no cell, such as one of an earlier definition, has other versions"
    assert "<th>in the source, at its scale</th>" in text
    assert "Values in the source are of its own data sets, networks and rounds; these runs have the scale small" in said
    assert "learning_rate = 0.7 (alpha 1) or 1.7 (alpha 2), " in text
    assert "batch_size = 32, " in text
    assert "<th></th><th>headers</th><th>model</th>" in text
    assert "model_parameters" not in text
    assert "docs/explanation/privacy.md says what each kind reveals" in text
    assert "The best mean of a grid point whose runs have all finished is bold." in text
    is_checkout = (Path(__file__).parents[2] / ".git").exists()
    for name in ("python", "numpy", "torch", "processor", *["commit"] * is_checkout):
        assert re.search(f"<td>{name}</td><td>[^<]+</td>", text), name


@pytest.mark.long
@pytest.mark.pictures
def test_report_counts_shared_runs_of_a_grid_once(done, tmp_path: Path) -> None:
    """No method has the grid's setting: two grid points, two seeds, and two pairs of runs."""
    folder, _ = done
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    with sqlite3.connect(tmp_path / "results.sqlite") as database:
        database.execute("INSERT INTO cells SELECT label, 'T 4', seed, run FROM cells")
        database.execute("UPDATE cells SET point = 'T 1' WHERE point = ''")
        database.commit()
        (tmp_path / "before").mkdir()
        shutil.copy(tmp_path / "results.sqlite", tmp_path / "before")
        database.execute("UPDATE metrics SET value = value + 0.1 * rowid * rowid WHERE metric = 'accuracy'")
    proto = MethodEntry(method="fedproto", simulation={"models": ["cdkt_digits_small"]})
    gridded = experiment(
        methods={**experiment().methods, "the same": proto, "not run": MethodEntry(method="feddkc")},
        grid={"T": {"T 1": {}, "T 4": {}}},
        claims=[Claim(order=["FedAvg", "FedProx"])],
    )
    with open_results(tmp_path) as results:
        written = write_report(gridded, results, tmp_path / "report")
        with open_results(tmp_path / "before") as before:
            found = {change.label: change.p for change in changed_results(before, results, ["accuracy"])}
            old, new = before.values("accuracy")["T 1"], results.values("accuracy")["T 1"]
    p_values = [paired_p([new[one][seed] - old[one][seed] for seed in (0, 1)]) for one in ("FedAvg", "FedProx")]
    assert [found["FedAvg"], found["FedProx"]] == pytest.approx(holm(p_values)), "two changes of runs, not six"
    claim = pandas.read_csv(tmp_path / "report/tables/claim-1.csv").iloc[0]
    assert claim["pairs"] == 2
    table = pandas.read_csv(tmp_path / "report/tables/metric-accuracy.csv").set_index(["label", "point"])
    assert table.loc["FedProx", "T 1"]["p"] == pytest.approx(claim["p"]), "one comparison: Holm changes nothing"
    assert table.loc["FedProx", "T 4"]["p"] == pytest.approx(claim["p"])
    assert "2 seeds and 1 comparison a metric" in " ".join(written.warnings)
    assert "Tensors of the same are declared to contain counts, features of the device." in written.page.read_text()
    assert "learning_rate is 0.02 with FedAvg and FedProx and the same, 0.01 with not run" in written.page.read_text()


@pytest.mark.long
@pytest.mark.long
@pytest.mark.pictures
def test_page_counts_devices_that_had_not_yet_taken_part(tmp_path: Path) -> None:
    few = {**TINY, "devices": 3, "devices_per_round": 1, "min_devices": 1, "train_limit": 90}
    one = {"FedAvg": MethodEntry(method="fedavg")}
    small = experiment(methods=one, seeds=[0], sections={"simulation": few})
    run_experiment(small, tmp_path)
    with open_results(tmp_path) as results:
        written = write_report(small, results, tmp_path / "report")
    said = "not yet taken part: up to 2 after round 1 and 2 in one of the last 20 rounds."
    assert said in " ".join(written.warnings)
    assert said in written.page.read_text()


def test_parquet_files_equal_the_database(done) -> None:
    folder, _ = done
    with sqlite3.connect(folder / "results.sqlite") as database:
        names = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        assert {file.stem for file in (folder / "parquet").iterdir()} == set(names)
        for name in names:
            stored = pandas.read_sql_query(f"SELECT * FROM {name}", database)
            pandas.testing.assert_frame_equal(pandas.read_parquet(folder / "parquet" / f"{name}.parquet"), stored)


@pytest.mark.long
def test_run_can_be_repeated_by_simulate(done, tmp_path: Path) -> None:
    folder, _ = done
    with open_results(folder) as results:
        cell = results.cells()[1]
        accuracy = results.values("accuracy")[""][cell.label][cell.seed]
    sections = read_settings(folder / "runs" / cell.run / "simulation.toml", ())
    assert simulate(merge_settings(Simulation(out=tmp_path), sections)).mean_accuracy_fleet == accuracy


@pytest.mark.long
def test_killed_experiment_continues_to_the_same_results(done, tmp_path: Path) -> None:
    """The runner is killed in the second run; its process ends, and the next call takes up what is there."""
    folder, _ = done
    code = (
        "import sys; from pathlib import Path; from experiments.test_runner import experiment; "
        "from fleetdistill_lab.experiments.runner import run_experiment; "
        "run_experiment(experiment(), Path(sys.argv[1]), on_progress=lambda done: print(done.finished, flush=True))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert any(line.strip() == "1" for line in process.stdout)
        process.kill()
    with open_results(tmp_path) as results:
        assert 1 <= len(results.finished()) < 4
    until = time.monotonic() + 60
    while (lock := lock_file(tmp_path / "lock")) is None:  # the killed runner's process still ends
        assert time.monotonic() < until
        time.sleep(0.1)
    lock.close()
    run_experiment(experiment(), tmp_path)
    assert figures(tmp_path) == figures(folder)


@pytest.mark.long
@pytest.mark.cold_start
def test_run_ends_with_its_killed_experiment(tmp_path: Path) -> None:
    """Its round lasts for years; a run holds the experiment's lock until its process has ended."""
    code = (
        "import sys; from pathlib import Path; from experiments.test_runner import TINY, experiment; "
        "from fleetdistill_lab.experiments.runner import run_experiment; "
        "long = experiment(sections={'simulation': TINY, 'method': {'local_epochs': 10**9}}); "
        "run_experiment(long, Path(sys.argv[1]), on_progress=lambda done: print(done.total, flush=True))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            assert [process.stdout.readline() for _ in range(2)] == ["4\n", "4\n"], "the run's process is in its round"
            process.kill()
            until = time.monotonic() + 60
            while (lock := lock_file(tmp_path / "lock")) is None:
                assert time.monotonic() < until, "the run's process has not ended"
                time.sleep(0.1)
            lock.close()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_with_a_sentence_and_continues(number: int, tmp_path: Path) -> None:
    start = "from fleetdistill_server.start import main; main()"
    command = [sys.executable, "-c", start, "compare", "--method", "fedavg", "--seeds", "0-3"]
    small = [word for name, value in TINY.items() for word in ("--set", f"simulation.{name}={value}")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [*command, *small, "--out", str(tmp_path)], stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stderr is not None
        assert any("1 of 4" in line for line in process.stderr)
        process.send_signal(number)
        said = process.stderr.read()
        assert (process.wait(), "the same command continues the comparison" in said) == (130, True)
    with open_results(tmp_path) as results:
        assert 1 <= len(results.finished()) < 4
        assert {run.status for run in results.runs().values()} == {"finished"}


@pytest.mark.long
@pytest.mark.pictures
def test_failed_run_is_told_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its data set is missing; the other run is not concerned."""
    monkeypatch.delenv("FLEETDISTILL_DATA", raising=False)
    monkeypatch.setattr("fleetdistill_lab.experiments.runner.check_cells", lambda *_: None)
    (tmp_path / "data").mkdir()
    bad = MethodEntry(method="fedavg", simulation={"dataset": "femnist-digits", "data_dir": str(tmp_path / "data")})
    two = experiment(seeds=[0], methods={"good": MethodEntry(method="fedavg"), "bad": bad})
    for _ in range(2):
        seen = list[Progress]()
        run_experiment(two, tmp_path / "out", on_progress=seen.append)
        assert [(one.cell.label, one.failed) for one in seen if one.cell is not None and one.error] == [("bad", 1)]
    with open_results(tmp_path / "out") as results:
        by_status = {run.status: run for run in results.runs().values()}
    assert by_status.keys() == {"finished", "failed"}
    assert "femnist-digits" in by_status["failed"].error
    with open_results(tmp_path / "out") as results:
        written = write_report(two, results, tmp_path / "report")
    assert written.tables[0].rows[1] == ["bad", "failed (1 of 1 seeds)"]
    assert f"Failed: bad, seed 0: {by_status['failed'].error}" in written.warnings
    assert "1 finished, 1 failed" in written.page.read_text()


@pytest.mark.long
def test_two_calls_do_not_run_in_one_folder(done) -> None:
    folder, _ = done
    code = (
        "import sys, time; from pathlib import Path; from fleetdistill.state.file_lock import lock_file; "
        "lock = lock_file(Path(sys.argv[1]) / 'lock'); print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "locked"
        with pytest.raises(DataError, match="the experiment is running in"):
            run_experiment(experiment(), folder)
        process.communicate("")


def test_each_grid_point_is_checked_before_the_first_run(tmp_path: Path) -> None:
    """The last one cannot be partitioned; a finished experiment needs no check."""
    methods, seen = {"alone": MethodEntry(method="no_transfer")}, list[Progress]()
    one = experiment(seeds=[0], methods=methods, grid={"devices": {"2": {}, "9": {"simulation.devices": 9}}})
    with pytest.raises(ConfigurationError, match=r"nothing was run: alone, 9, seed 0: .* 9 devices need 90 rows"):
        run_experiment(one, tmp_path, on_progress=seen.append)
    assert not seen


def test_results_of_another_schema_version_are_refused(tmp_path: Path) -> None:
    run_experiment(experiment(seeds=[0], methods={"x": MethodEntry(method="no_transfer")}), tmp_path)
    with sqlite3.connect(tmp_path / "results.sqlite") as database:
        database.execute("UPDATE experiment SET schema_version = 2")
    with pytest.raises(ConfigurationError, match="has schema version 2, this fleetdistill reads 1"):
        run_experiment(experiment(), tmp_path)


def test_damaged_results_and_no_workers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "results.sqlite").write_text("not a database" * 100)
    with pytest.raises(DataError, match=r"results\.sqlite"):
        run_experiment(experiment(), tmp_path)
    with pytest.raises(ConfigurationError, match="workers is 0"):
        run_experiment(experiment(), tmp_path / "other", workers=0)
    with pytest.raises(ConfigurationError, match=r"has no results\.sqlite"), open_results(tmp_path / "other"):
        pass


FILE = """
title = "Tiny <grid>"
source = "A paper"
note = "Smaller."
seeds = [0, 1]
metrics = ["accuracy", "own_accuracy", "bytes"]
reference = "FedAvg"
simulation = { devices = 2, rounds = 2, train_limit = 60, test_limit = 40, score = "devices" }
grid = { alpha = [0.5] }
claims = [{ order = ["FedProx", "FedAvg"], text = "FedProx is better" }]
printed = { accuracy = { FedProx = { "alpha 0.5" = 61.5 } } }

[methods.FedAvg]
method = "fedavg"

[methods.FedProx]
method = "fedprox"
"""


class _References(HTMLParser):
    """Collects what a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded = list[str]()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        self.loaded += [known[name] or "" for name in ("src", "href", "xlink:href") if name in known]

    def handle_data(self, data: str) -> None:
        self.text += data


def call(*words: str):
    return CliRunner().invoke(app, ["experiment", *words])


def test_report_without_its_scale_names_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    there = tmp_path / "out" / "experiments" / "feddkc-tables-5-7-small"
    there.mkdir(parents=True)
    (there / "results.sqlite").touch()
    done = call("report", "feddkc-tables-5-7")
    assert done.exit_code == 1
    assert "feddkc-tables-5-7-paper does not exist; there are results of --scale small" in done.output


def test_notes_name_the_model_that_devices_have_at_the_end() -> None:
    averaged = MethodEntry(method="fedavg")
    for others, methods in (({}, "all methods"), ({"alone": MethodEntry(method="no_transfer")}, "FedAvg")):
        (line,) = model_notes(experiment(methods={"FedAvg": averaged, **others}))
        assert line.startswith(f"The model that a device has at the end is the global one with {methods}. ")
    assert model_notes(experiment(methods={"alone": MethodEntry(method="no_transfer")})) == []


@pytest.mark.long
@pytest.mark.pictures
def test_tuned_value_is_the_best_on_held_out_rows(tmp_path: Path) -> None:
    """A rate of 0 leaves the initial weights, so that the other one is chosen; the page and the runs have it."""
    methods = {"FedAvg": MethodEntry(method="fedavg"), "alone": MethodEntry(method="no_transfer")}
    tune = Tune(setting="method.learning_rate", values=[1e-9, 0.05])
    sections = {"simulation": {**TINY, "rounds": 6, "train_limit": 200, "alpha": 100.0}}
    tuned = experiment(methods=methods, seeds=[0], tune=tune, sections=sections)
    run_experiment(tuned, tmp_path, workers=2)
    with open_results(tmp_path) as results:
        found = results.tuned(tuned)
        assert {key: of[0][0] for key, of in found.items()} == {("FedAvg", ""): 0.05, ("alone", ""): 0.05}
        assert all(of[0][1] > of[1][1] for of in found.values())
        runs = results.runs()
        chosen = [runs[cell.run].settings["method"]["learning_rate"] for cell in results.cells()]
        assert chosen == [0.05, 0.05]
        assert len(runs) == 6
        written = write_report(tuned, results, tmp_path / "report")
    page, edge = written.page.read_text(), "FedAvg: 0.05 is the largest; alone: 0.05 is the largest. Try further"
    assert "learning_rate = 0.05" in page
    assert "Rates: tuned." in page
    assert edge in page
    assert edge in " ".join(written.warnings)
    assert "networks differ between methods: FedAvg: only the largest" in page


@pytest.mark.long
@pytest.mark.pictures
def test_page_stands_alone_and_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(FILE)
    out = tmp_path / "out"
    said = call("run", str(tmp_path / "tiny.toml"), "--out", str(out), "--workers", "2")
    assert said.exit_code == 0, said.output
    assert "(source: 61.5)" in said.stdout
    assert said.stderr.index("A control is missing: training alone") < said.stderr.index("1 of 4: ")
    report = out / "report"
    page = _References()
    page.feed((report / "index.html").read_text())
    assert all(reference.startswith(("#", "data:")) for reference in page.loaded), "everything is in the page"
    for text in (
        "Tiny <grid>",
        "A control is missing: training alone; add [methods.no_transfer].",
        "2 seeds and 1 comparison a metric",
        "FedProx > FedAvg",
        "one lead a seed, its mean over the grid points",
        "4 finished",
    ):
        assert text in page.text, text
    tables = {file.name for file in (report / "tables").iterdir()}
    assert {"metric-accuracy.csv", "metric-accuracy.tex", "claim-1.csv", "models-alpha-0-5.tex"} <= tables
    others = ("leaves-device", "methods", "versions", "runs")
    assert {f"{name}.{suffix}" for name in others for suffix in ("csv", "tex")} <= tables
    runs = (report / "tables" / "runs.csv").read_text().splitlines()
    assert runs[0] == "method,grid point,seed,partition,seconds,versions,repeat with fleetdistill simulate"
    assert len(runs) == 1 + 4
    assert r"; partition dirichlet\_by\_class}" in (report / "tables" / "metric-accuracy.tex").read_text()
    accuracy, *_ = csv.DictReader((report / "tables" / "metric-accuracy.csv").open())
    assert accuracy["partition"] == "dirichlet_by_class"
    drawn = {file.name for file in (report / "figures").iterdir()}
    curves = ("curve-global-round", "curve-global-exchanges", "curve-trained-kilobytes")
    names = (*curves, "devices-own_accuracy", "devices-histogram", "partitions", "models-alpha-0-5")
    assert {f"{name}.{suffix}" for name in names for suffix in ("pdf", "svg")} <= drawn
    again = call("report", str(tmp_path / "tiny.toml"), "--out", str(out))
    assert again.exit_code == 0
    assert re.search(r"FedProx +\d", again.stdout)


@pytest.mark.long
@pytest.mark.pictures
def test_report_follows_an_edited_file(done, tmp_path: Path) -> None:
    """The folder has the runs of FedAvg and FedProx with seeds 0 and 1; the file now has another grid and target."""
    folder, _ = done
    shutil.copytree(folder, tmp_path / "out", dirs_exist_ok=True)
    settings = "simulation = { devices = 2, rounds = 2, train_limit = 60, test_limit = 40, score = 'devices' }"
    file, old = tmp_path / "tiny.toml", tmp_path / "out/report/tables/models-alpha-9.tex"
    old.parent.mkdir(parents=True)
    old.touch()
    file.write_text(
        f"""
        seeds = [0, 1]
        metrics = ["accuracy", "rounds_to_target"]
        target = {{ metric = "global", level = 2.0 }}
        {settings}
        grid = {{ alpha = [0.5, 1.0] }}
        [methods.FedProx]
        method = "fedprox"
        """
    )
    said = call("report", str(file), "--out", str(tmp_path / "out"))
    assert said.exit_code == 0, said.output
    assert not old.exists(), "of a grid point that the file no longer has"
    assert re.search(r"FedProx +\d\S* ± \S+ +not run", said.stdout), "alpha is 0.5 by default"
    assert re.search(r"FedProx +never +not run", said.stdout), "no accuracy reaches 2"
    assert "FedAvg" not in said.stdout.split("Mean ±")[0]
    assert "2 cells not run yet" in said.stdout
    assert "alpha = [0.5, 1.0]" in (tmp_path / "out/report/index.html").read_text()
    assert len(pandas.read_parquet(tmp_path / "out/parquet/cells.parquet")) == 4
    with lock_file(tmp_path / "out/lock") or pytest.fail("locked"):
        assert call("report", str(file), "--out", str(tmp_path / "out")).exit_code == 0, "as it is while it runs"
        file.write_text(file.read_text().replace("[0.5, 1.0]", "[0.5]"))
        assert "the experiment is running in" in call("report", str(file), "--out", str(tmp_path / "out")).stderr
    tuned = "tune = { setting = 'method.learning_rate', values = [0.1, 0.2] }\n"
    file.write_text(tuned + file.read_text())
    said = call("report", str(file), "--out", str(tmp_path / "out"))
    assert "2 runs that tune a setting are missing" in said.stderr
    assert f"the earlier report is still in {tmp_path}/out/report/index.html" in said.stderr.replace("\n", "")


@pytest.mark.long
def test_progress_of_the_tuning_says_that_the_grid_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All runs fail at once, since the data set is missing; nothing checks it before."""
    monkeypatch.setattr("fleetdistill_lab.experiments.runner.check_cells", lambda *_: None)
    (tmp_path / "data").mkdir()
    file = tmp_path / "tuned.toml"
    file.write_text(
        """
        seeds = [0]
        tune = { setting = "method.learning_rate", values = [0.1, 0.2] }
        simulation = { dataset = "femnist-digits", devices = 2 }
        grid = { alpha = [0.1, 1.0] }
        methods = { fedavg = {} }
        """
    )
    words = ("--data-dir", str(tmp_path / "data"), "--workers", "2")
    said = call("run", str(file), "--out", str(tmp_path / "out"), *words).stderr
    assert "4 runs that tune method.learning_rate; a line follows when one ends; 2 runs of the grid follow\n" in said
    assert said.index("4 of 4: ") < said.index("2 runs of the grid; a line follows") < said.index("1 of 2: ")


def test_ctrl_c_says_that_the_report_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def written(*_: object) -> Written:
        print("now it is written", file=sys.stderr)
        return Written(tmp_path, [], [])

    monkeypatch.setattr("fleetdistill_lab.experiments.runner.run_experiment", interrupted)
    monkeypatch.setattr("fleetdistill_lab.experiments.page.write_report", written)
    file, out = tmp_path / "tiny.toml", tmp_path / "out"
    file.write_text(FILE)
    Results(out).close()
    said = call("run", str(file), "--out", str(out))
    assert said.exit_code == 130
    assert said.stderr.splitlines()[1:] == [
        f"writing the report of what has run to {out}/report",
        "now it is written",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, ""), (0.4, "; less than a minute left"), (61.0, "; about 1 min left"), (7200.0, "; about 2.0 h left")],
)
def test_time_left_of_a_running_run_is_never_zero(
    seconds: float, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose last round has ended is still being scored and stored, and no round is left to estimate."""

    def run(*_: object, on_progress: Callable[[Progress], None], **__: object) -> None:
        on_progress(Progress(3, 2, 0, seconds))
        raise KeyboardInterrupt

    monkeypatch.setattr("fleetdistill_lab.experiments.runner.run_experiment", run)
    monkeypatch.setattr("fleetdistill_lab.experiments.page.write_report", lambda *_: Written(tmp_path, [], []))
    Results(tmp_path / "out").close()
    (tmp_path / "tiny.toml").write_text(FILE)
    said = call("run", str(tmp_path / "tiny.toml"), "--out", str(tmp_path / "out")).stderr
    assert f"2 of 3 finished before{text}" in said.splitlines()


def test_packaged_experiments_are_listed_and_shown(tmp_path: Path) -> None:
    assert "FedDKC, Tables 5 to 7" in call("list").stdout
    shown = call("show", "one-exchange").stdout
    (tmp_path / "mine.toml").write_text(shown)
    assert next(iter(read_experiment(tmp_path / "mine.toml").methods)) == "class statistics"


@pytest.mark.long
def test_compare_says_what_changed(done, tmp_path: Path) -> None:
    folder, _ = done
    methods = {
        "FedAvg": MethodEntry(method="fedavg", settings={"local_epochs": 1}),
        "alone": MethodEntry(method="no_transfer"),
    }
    run_experiment(experiment(methods=methods), tmp_path)
    with open_results(folder) as first, open_results(tmp_path) as second:
        assert changed_results(first, first, []) == []
        changes = {change.metric: change for change in changed_results(first, second, ["accuracy", "exchanges"])}
        assert changed_definition(first, second) == [
            "method FedProx is only in the first",
            "method the same is only in the first",
            "method alone is only in the second",
            "FedAvg: method.local_epochs was the default, is 1",
        ]
        assert changed_versions(first, second) == []
        old, new = (one.values("accuracy")[""]["FedAvg"] for one in (first, second))
    assert changes.keys() == {"accuracy"}, "the number of exchanges is the same"
    change = changes["accuracy"]
    assert [change.before, change.after] == pytest.approx([sum(of.values()) / 2 for of in (old, new)])
    assert (change.seeds, change.same_settings) == (2, False)
    said = call("compare", str(folder), str(tmp_path))
    assert said.exit_code == 0
    assert "FedAvg: method.local_epochs was the default, is 1" in said.stdout
    machine = json.loads(call("compare", str(folder), str(tmp_path), "--metric", "accuracy", "--json").stdout)
    assert [change["metric"] for change in machine["metrics"]] == ["accuracy"]
    assert "unknown metric" in call("compare", str(folder), str(tmp_path), "--metric", "no").stderr
