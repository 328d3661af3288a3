"""The methods against their controls on real data: alone, FedAvg's global and device models, and the method's own.

    python benchmarks/experiments/compare.py feddkd-digits --seeds 10 11 12
    python benchmarks/experiments/compare.py cdkt-fashion --data-dir data --results out/experiments/compare.jsonl

Every run of one (setting, seed) shares data, partition and first weights, so differences are paired. Results are
appended to a file as they come; a run that is there already, with the settings of today, is not repeated. Rows of other
settings are left out unless `--any-settings` takes them. `--table` prints the tables and runs nothing. Each fleet runs
through the product: real engine, store, messages and device halves, over the in-memory link.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from compare_tables import Headline, print_tables

from fleetdistill.methods import config_class
from fleetdistill_console.tracking.targets import Tracking, read_targets
from fleetdistill_lab.simulation.fleet import simulate
from fleetdistill_lab.simulation.report.results import FleetReport
from fleetdistill_lab.simulation.spec.settings import Simulation


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


def _feddkc(base: Simulation, largest: str) -> Comparison:
    """Five different models, and FedAvg with the largest of them on every device."""
    fedavg = {"method": "fedavg", "models": (largest,)}
    runs: dict[str, dict[str, Any]] = {"feddkc": {}, "server_beta=0": {"settings": {"server_beta": 0.0}}}
    return Comparison(replace(base, method="feddkc"), "c_per", {**runs, "fedavg": fedavg}, ALPHAS)


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


_FEDAVG_RATE = 0.02
_SAME_BYTES: dict[str, Any] = {"rows_per_direction": 2}
"""As many directions as the specification's page has, whatever they say about rows."""
_ONE_EXCHANGE: dict[str, dict[str, Any]] = {
    "one exchange": {"rounds": 1, "settings": {}},
    "one exchange, 2 rows a direction": {"rounds": 1, "settings": _SAME_BYTES},
    "one exchange, the diagonal alone": {"rounds": 1, "settings": {"rank": 0}},
    "one exchange, own predictors": {"rounds": 1, "settings": {"predictor": "trained"}},
}
_ONE_ARCHITECTURE = ("fedd2s", "cdkt", "feddkd", "dafkd")
"""Methods whose devices have one architecture; CDKT's server has it too."""


def _classstats(base: Simulation, fedavg: tuple[str, ...]) -> Comparison:
    """Five different models, and FedAvg with one of them on every device, which is FedDKD without its steps too."""
    settings = dict(base.settings)
    decaying = {"dkd_steps": 0, "local_epochs": 2, "learning_rate_round_decay": 0.1 ** (1 / (base.rounds - 1))}
    rate = {"learning_rate": settings.get("learning_rate", _FEDAVG_RATE), "weight_decay": 0.0}
    runs: dict[str, dict[str, Any]] = {
        "server_beta=0": {"method": "feddkc", "settings": settings | {"server_beta": 0.0}},
        **{name: {"method": name, "models": fedavg[:1], "settings": settings} for name in _ONE_ARCHITECTURE},
        **_ONE_EXCHANGE,
        **{f"fedavg, {item}": {"method": "fedavg", "models": (item,), "settings": settings} for item in fedavg},
        f"fedavg, {fedavg[0]}, decaying": {
            "method": "feddkd",
            "models": fedavg[:1],
            "settings": decaying | rate,
        },
    }
    runs["cdkt"]["server_model"] = fedavg[0]
    return Comparison(replace(base, method="classstats"), "devices", runs, ALPHAS)


_FASHION = Simulation(dataset="fashion-mnist", devices=10, train_limit=2000, test_limit=1000)

_SMALL_FASHION = Simulation(
    dataset="fashion-mnist",
    image_size=14,
    train_limit=3000,
    test_limit=2500,
    rounds=10,
    settings={"learning_rate": 0.02},
)

_HARD: dict[str, Any] = {"dataset": "cifar10", "image_size": None, "test_limit": 2500}

COMPARISONS = {
    "classstats-cifar10": _classstats(replace(_SMALL_FASHION, **_HARD, train_limit=5000), ("resnet12",)),
    "classstats-fashion-100": _classstats(replace(_SMALL_FASHION, train_limit=10_000, devices=100), ("resnet12",)),
    "classstats-digits": _classstats(Simulation(rounds=30), ("digits_cnn_large", "digits_mlp_large")),
    "classstats-fashion": _classstats(_SMALL_FASHION, ("resnet12",)),
    "classstats-mnist-20": _classstats(
        replace(_SMALL_FASHION, dataset="mnist", train_limit=4000, devices=20), ("resnet12",)
    ),
    "classstats-femnist": replace(
        _classstats(
            replace(_SMALL_FASHION, dataset="femnist-digits", train_limit=None, devices=12, partition="by_client"),
            ("resnet12",),
        ),
        settings={"": {}},
    ),
    "feddkc-digits": _feddkc(Simulation(rounds=30), "digits_mlp_large"),
    "feddkd-digits": _feddkd(Simulation(devices=10, models=("digits_mlp_small",)), rounds=10, steps=(1, 3, 10)),
    "feddkd-fashion": _feddkd(replace(_FASHION, models=("fedd2s_m1",)), rounds=10, steps=(3, 10)),
    "cdkt-digits": _cdkt(Simulation(devices=10, rounds=30), "cdkt_digits"),
    "cdkt-fashion": _cdkt(replace(_FASHION, rounds=20), "cdkt_fmnist"),
    "fedd2s-digits": _fedd2s(Simulation(devices=10)),
    "fedd2s-fashion": _fedd2s(replace(_FASHION, devices=12, train_limit=1920)),
    "dafkd-digits": _dafkd(Simulation(devices=10, rounds=12, models=("digits_mlp_large",))),
    "dafkd-mnist": _dafkd(replace(_FASHION, dataset="mnist", rounds=10, models=("dafkd_cnn",))),
}


Key = tuple[str, str, int]
"""(setting, run, seed)"""
_DECIDES_NOTHING = ("out", "data_dir", "torch_device", "link")
"""Settings of a simulation that do not change what comes out of it."""


def simulation_of(given: argparse.Namespace, key: Key) -> Simulation:
    """What is run under a key, scored after each round for the curves. Raises KeyError where there is no such run."""
    comparison = COMPARISONS[given.comparison]
    setting, name, seed = key
    alone = name == next(iter(comparison.runs))
    where = {"seed": seed, "data_dir": given.data_dir, "out": given.out, "torch_device": given.torch_device}
    changed = {**where, **comparison.settings[setting], **comparison.runs[name]}
    return replace(comparison.base, **changed, with_alone=alone, with_fedavg=False, score="devices")


def digest(wanted: Simulation) -> str:
    """Names all that decides the result of a simulation, the method's defaults of today included."""
    shown = {name: value for name, value in asdict(wanted).items() if name not in _DECIDES_NOTHING}
    shown["settings"] = asdict(config_class(wanted.method).from_settings(wanted.settings))
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()[:16]


def keys(given: argparse.Namespace) -> Iterator[Key]:
    """Every run that is wanted, seeds outermost so that a stopped experiment has whole seeds."""
    comparison = COMPARISONS[given.comparison]
    for seed, setting, name in itertools.product(given.seeds, comparison.settings, comparison.runs):
        if setting in (given.settings or [setting]) and name in (given.runs or [name]):
            yield setting, name, seed


def read_results(given: argparse.Namespace) -> dict[Key, dict[str, Any]]:
    """The rows of this comparison that still say something about it; prints how many do not."""
    lines = given.results.read_text().splitlines() if given.results.exists() else []
    rows = [row for row in map(json.loads, lines) if row["comparison"] == given.comparison]
    used = rows if given.any_settings else [row for row in rows if _fits(given, row)]
    if len(used) < len(rows):
        bare = sum("digest" not in row for row in rows)
        print(
            f"{len(rows) - len(used)} of {len(rows)} rows of {given.results} are not of today's settings and ignored; "
            f"{bare} of all have no digest to tell by; --any-settings takes them"
        )
    return {_key(row): row for row in used}


def _key(row: dict[str, Any]) -> Key:
    return row["setting"], row["run"], row["seed"]


def _fits(given: argparse.Namespace, row: dict[str, Any]) -> bool:
    try:
        return bool(row.get("digest") == digest(simulation_of(given, _key(row))))
    except KeyError:  # the comparison had such a run once
        return False


def measure(given: argparse.Namespace, known: dict[Key, dict[str, Any]]) -> None:
    """Runs what is missing and appends it to the results."""
    for key in keys(given):
        if key in known:
            continue
        wanted = simulation_of(given, key)
        row = {"comparison": given.comparison, **dict(zip(("setting", "run", "seed"), key, strict=True))}
        report = simulate(wanted, if_there="overwrite", tracking=_tracking(given, key))
        known[key] = row | {"digest": digest(wanted)} | figures(report)
        with given.results.open("a") as file:
            file.write(json.dumps(known[key]) + "\n")
        print(f"{row}: {report.mean_accuracy_trained:.4f}, {report.seconds:.0f} s", flush=True)


def _tracking(given: argparse.Namespace, key: Key) -> Tracking:
    """An MLflow experiment for each comparison, in it a run for each simulation."""
    setting, name, seed = key
    title = ", ".join(word for word in (setting, name, f"seed {seed}") if word)
    return Tracking(read_targets(given.track), given.comparison, title)


def figures(report: FleetReport) -> dict[str, Any]:
    """What is kept of a run.

    `bytes_up` and `bytes_down` are of one device and round, the mean over both; `bytes_curve` has what a device sent
    and was sent until each round, the mean over devices. C-Per is the report's, in the devices' mix of classes.
    """
    per_device_round = report.rounds * len(report.devices)
    alone = report.scores.get("alone")
    return {
        "alone": report.mean_accuracy_alone,
        "alone_own": report.mean_own_accuracy_alone,
        "alone_c_per": alone["accuracy"]["c_per"] if alone else None,
        "fleet": report.mean_accuracy_trained,
        "fleet_own": report.mean_own_accuracy_trained,
        "fleet_curve": _mean_curve(list(report.accuracy_by_round.values())),
        "own_curve": [item["c_spec"] for item in report.figures_by_round],
        "c_per_curve": [item["c_per"] for item in report.figures_by_round],
        "global_curve": report.global_accuracy_by_round,
        "bytes_up": sum(device.bytes_up for device in report.devices) / per_device_round,
        "bytes_down": sum(device.bytes_down for device in report.devices) / per_device_round,
        "bytes_curve": list(itertools.accumulate(item["up"] + item["down"] for item in report.bytes_by_round)),
        "guards": report.guards_fired,
        "further": report.further,
        "rounds": report.rounds,
        "method_settings": report.settings,
        "seconds": report.seconds,
    }


def _mean_curve(curves: list[list[float]]) -> list[float]:
    return [statistics.mean(values) for values in zip(*curves, strict=True)]


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """What was asked for on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", choices=COMPARISONS)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 11, 12])
    parser.add_argument("--settings", nargs="+", help="only these of the comparison, such as 'alpha 0.1'")
    parser.add_argument("--runs", nargs="+", help="only these of the comparison; an unknown name lists them")
    parser.add_argument("--torch-device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("out/experiments/work"))
    parser.add_argument("--results", type=Path, default=Path("out/experiments/compare.jsonl"))
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--any-settings", action="store_true", help="take results whatever settings they are of")
    parser.add_argument("--track", action="append", default=[], help="mlflow:URI or tensorboard:DIR, as for simulate")
    given = parser.parse_args(words)
    comparison = COMPARISONS[given.comparison]
    for option, known in (("settings", comparison.settings), ("runs", comparison.runs)):
        if unknown := set(getattr(given, option) or ()) - known.keys():
            names = ", ".join(map(repr, known))
            parser.error(
                f"--{option}: {given.comparison} has no {', '.join(map(repr, sorted(unknown)))}; it has {names}"
            )
    return given


def main(words: Sequence[str] | None = None) -> None:
    """Measures what is missing and prints the tables."""
    given = arguments(words)
    given.results.parent.mkdir(parents=True, exist_ok=True)
    known = read_results(given)
    if not given.table:
        measure(given, known)
    comparison = COMPARISONS[given.comparison]
    for setting in comparison.settings:
        result = {(name, seed): row for (where, name, seed), row in known.items() if where == setting}
        print_tables(f"{given.comparison} {setting}".strip(), result, list(comparison.runs), comparison.headline)


if __name__ == "__main__":
    main()
