"""The methods against their controls on real data: alone, FedAvg's global and device models, and the method's own.

    python benchmarks/experiments/compare.py feddkd-digits --seeds 10 11 12
    python benchmarks/experiments/compare.py cdkt-fashion --data-dir data --results out/experiments/compare.jsonl

Every run of one (setting, seed) shares data, partition and first weights, so differences are paired. Results are
appended to a file as they come; a run that is there already is not repeated. `--table` prints the tables and runs
nothing. Each fleet runs through the product: real engine, store, messages and device halves, over the in-memory link.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from compare_tables import Headline, print_tables

from fleetdistill_server.simulation.fleet import simulate
from fleetdistill_server.simulation.report import FleetReport
from fleetdistill_server.simulation.settings import Simulation


@dataclass(frozen=True)
class Comparison:
    """What is compared.

    Attributes:
        base: What all runs share.
        headline: The figure that the method's claim is about.
        runs: Name to what differs; `with_alone` is set for the first one only, since it is the same for all.
        settings: Name to what differs between the comparison's settings, each a table of its own.
    """

    base: Simulation
    headline: Headline
    runs: dict[str, dict[str, Any]]
    settings: dict[str, dict[str, Any]] = field(default_factory=lambda: {"": {}})


ALPHAS = {"alpha 0.1": {"alpha": 0.1}, "alpha 0.5": {"alpha": 0.5}}

_SGD: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.02, "momentum": 0.9, "weight_decay": 0.0}
_ADAM: dict[str, Any] = {"optimizer": "adam", "learning_rate": 1e-3, "weight_decay": 0.0}


def _feddkd(base: Simulation, rounds: int, steps: tuple[int, ...]) -> Comparison:
    """FedAvg runs as many rounds as FedDKD with J = 3 has exchanges, so that its curve serves for both."""
    fedavg = {"method": "fedavg", "rounds": 4 * rounds, "settings": {"local_epochs": 5}}
    decay = {"learning_rate_round_decay": 0.99}  # of the paper's CIFAR runs
    feddkd = {f"J={j}": {"rounds": rounds, "settings": {"dkd_steps": j, **decay}} for j in steps}
    return Comparison(replace(base, method="feddkd"), "global", {"fedavg": fedavg, **feddkd}, ALPHAS)


def _cdkt(base: Simulation, model: str) -> Comparison:
    base = replace(base, method="cdkt", models=(model,), partition="classes_window", proxy_per_class=8)
    kinds: dict[str, dict[str, Any]] = {name: {"settings": {"knowledge": name}} for name in ("full", "rep", "repfull")}
    as_cdkt = {"local_epochs": 2, "batch_size": 20, "learning_rate": 0.1, "momentum": 0.0}
    controls: dict[str, dict[str, Any]] = {
        "fedavg": {"method": "fedavg", "settings": as_cdkt},
        "fedavg m 0.9": {"method": "fedavg", "settings": {"local_epochs": 2, "batch_size": 20}},
        "local + proxy labels": {"settings": {"exchange": False}},
    }
    return Comparison(base, "c_per", {**kinds, **controls})


def _fedd2s(base: Simulation) -> Comparison:
    """FedD2S learns labels in half of its 4 local epochs, so FedAvg has 2 passes, and the paper's 4 beside them."""
    base = replace(base, method="fedd2s", partition="dirichlet_per_device", models=("fedd2s_digits",), rounds=15)
    return Comparison(
        base,
        "own",
        {
            "fedd2s": {"settings": {"batch_size": 32}},
            "without dropping": {"settings": {"batch_size": 32, "drop_every": 1000}},
            "fedavg, 2 passes": {"method": "fedavg", "settings": {"local_epochs": 2, **_SGD}},
            "fedavg, 4 passes": {"method": "fedavg", "settings": {"local_epochs": 4, **_SGD}},
        },
        ALPHAS,
    )


def _dafkd(base: Simulation) -> Comparison:
    return Comparison(
        replace(base, method="dafkd"),
        "global",
        {
            "dafkd": {},
            "no correlation": {"settings": {"correlation": False}},
            "fedavg, Adam 1e-3": {"method": "fedavg", "settings": {"local_epochs": 5, **_ADAM}},
            "fedavg, SGD 0.02": {"method": "fedavg", "settings": {"local_epochs": 5, **_SGD}},
        },
        ALPHAS,
    )


_FASHION = Simulation(dataset="fashion-mnist", devices=10, train_limit=2000, test_limit=1000)

COMPARISONS = {
    "feddkd-digits": _feddkd(Simulation(devices=10, models=("digits_mlp_small",)), rounds=10, steps=(1, 3, 10)),
    "feddkd-fashion": _feddkd(replace(_FASHION, models=("fedd2s_m1",)), rounds=10, steps=(3, 10)),
    "cdkt-digits": _cdkt(Simulation(devices=10, rounds=30), "cdkt_digits"),
    "cdkt-fashion": _cdkt(replace(_FASHION, rounds=20), "cdkt_fmnist"),
    "fedd2s-digits": _fedd2s(Simulation(devices=10)),
    "fedd2s-fashion": _fedd2s(replace(_FASHION, devices=12, train_limit=1920)),
    "dafkd-digits": _dafkd(Simulation(devices=10, rounds=12, models=("digits_mlp_large",))),
    "dafkd-mnist": _dafkd(replace(_FASHION, dataset="mnist", rounds=10, models=("dafkd_cnn",))),
}


def runs(given: argparse.Namespace) -> Iterator[tuple[tuple[str, str, int], Simulation]]:
    """Every run with its key (setting, name, seed), seeds outermost so that a stopped experiment has whole seeds."""
    comparison = COMPARISONS[given.comparison]
    first = next(iter(comparison.runs))
    for seed in given.seeds:
        for setting, shared in comparison.settings.items():
            for name, own in comparison.runs.items():
                if setting not in (given.settings or [setting]) or name not in (given.runs or [name]):
                    continue
                shape = {"seed": seed, "data_dir": given.data_dir, "out": given.out, "torch_device": given.torch_device}
                wanted = replace(
                    comparison.base, **{**shape, **shared, **own, "with_alone": name == first, "with_fedavg": False}
                )
                yield (setting, name, seed), wanted


def measure(given: argparse.Namespace, known: dict[Any, Any]) -> None:
    """Runs what is missing and appends it to the results."""
    for (setting, name, seed), wanted in runs(given):
        if (setting, name, seed) in known:
            continue
        row = {"comparison": given.comparison, "setting": setting, "run": name, "seed": seed}
        report = simulate(wanted)
        known[setting, name, seed] = row | _figures(report)
        with given.results.open("a") as file:
            file.write(json.dumps(known[setting, name, seed]) + "\n")
        print(f"{row}: {report.mean_accuracy_fleet:.4f}, {report.seconds:.0f} s", flush=True)


def _figures(report: FleetReport) -> dict[str, Any]:
    """What is kept of a run; bytes are of one device and round, the mean over both."""
    per_device_round = report.rounds * len(report.devices)
    return {
        "alone": report.mean_accuracy_alone,
        "alone_own": report.mean_own_accuracy_alone,
        "fleet": report.mean_accuracy_fleet,
        "fleet_own": report.mean_own_accuracy_fleet,
        "fleet_curve": _mean_curve(list(report.accuracy_by_round.values())),
        "own_curve": [figures["c_spec"] for figures in report.figures_by_round],
        "global_curve": report.global_accuracy_by_round,
        "bytes_up": sum(one.bytes_up for one in report.devices) / per_device_round,
        "bytes_down": sum(one.bytes_down for one in report.devices) / per_device_round,
        "guards": report.guards_fired,
        "rounds": report.rounds,
        "method_settings": report.settings,
        "seconds": report.seconds,
    }


def _mean_curve(curves: list[list[float]]) -> list[float]:
    return [statistics.mean(values) for values in zip(*curves, strict=True)]


def main() -> None:
    """Measures what is missing and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", choices=COMPARISONS)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 11, 12])
    parser.add_argument("--settings", nargs="+", help="only these of the comparison, such as 'alpha 0.1'")
    parser.add_argument("--runs", nargs="+", help="only these of the comparison")
    parser.add_argument("--torch-device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("out/experiments/work"))
    parser.add_argument("--results", type=Path, default=Path("out/experiments/compare.jsonl"))
    parser.add_argument("--table", action="store_true", help="run nothing")
    given = parser.parse_args()
    given.results.parent.mkdir(parents=True, exist_ok=True)
    lines = given.results.read_text().splitlines() if given.results.exists() else []
    rows = [row for row in map(json.loads, lines) if row["comparison"] == given.comparison]
    known = {(row["setting"], row["run"], row["seed"]): row for row in rows}
    if not given.table:
        measure(given, known)
    comparison = COMPARISONS[given.comparison]
    for setting in comparison.settings:
        found = {(name, seed): row for (where, name, seed), row in known.items() if where == setting}
        print_tables(f"{given.comparison} {setting}".strip(), found, list(comparison.runs), comparison.headline)


if __name__ == "__main__":
    main()
