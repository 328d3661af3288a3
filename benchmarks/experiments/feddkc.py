"""FedDKC against its controls: alone, no refinement, KKR, SKR, `server_beta = 0` and without labels, paired.

    python benchmarks/experiments/feddkc.py --dataset fashion-mnist --train-limit 3000 --rounds 10 --seeds 0 1 2

Every run of one (alpha, seed) shares partition, first weights and batches, so differences are paired. Results are
appended to a file as they come; a run that is there already is not repeated. Print the table again with `--rounds` and
the rest unchanged.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fleetdistill_lab.simulation.fleet import simulate
from fleetdistill_lab.simulation.spec.settings import Simulation

VARIANTS: dict[str, dict[str, Any]] = {
    "none": {"refinement": "none"},
    "kkr": {"refinement": "kkr"},
    "skr": {"refinement": "skr"},
    "server_beta=0": {"server_beta": 0.0},
    "no labels, none": {"labels": False, "refinement": "none"},
    "no labels, skr": {"labels": False},
    "no labels, none, no guard": {"labels": False, "refinement": "none", "teacher_guard": False},
}
"""Settings by name; `none` comes first, because the control of training alone runs with it."""


def runs(given: argparse.Namespace) -> Iterator[tuple[str, Simulation]]:
    """Every run with its key, seeds outermost so that a stopped experiment has whole seeds."""
    for seed in given.seeds:
        for alpha in given.alphas:
            for name, settings in ((name, VARIANTS[name]) for name in given.variants):
                key = f"{given.dataset}/{given.train_limit}/{given.test_limit}/{given.rounds}/{alpha}/{seed}/{name}"
                yield (
                    key,
                    Simulation(
                        method="feddkc",
                        dataset=given.dataset,
                        data_dir=given.data_dir,
                        train_limit=given.train_limit,
                        test_limit=given.test_limit,
                        rounds=given.rounds,
                        alpha=alpha,
                        seed=seed,
                        settings=settings,
                        with_alone=name == "none",
                        with_fedavg=False,
                        torch_device=given.torch_device,
                        out=given.out,
                    ),
                )


def measure(given: argparse.Namespace, known: dict[str, Any]) -> None:
    """Runs what is missing and appends it to the results."""
    for key, simulation in runs(given):
        if key in known:
            continue
        report = simulate(simulation, if_there="overwrite")
        known[key] = {
            "alone": report.mean_accuracy_alone,
            "alone_own": report.mean_own_accuracy_alone,
            "fleet": report.mean_accuracy_fleet,
            "own": report.mean_own_accuracy_fleet,
            "bytes_up": [device.bytes_up for device in report.devices],
            "bytes_down": [device.bytes_down for device in report.devices],
            "samples": [device.samples for device in report.devices],
            "parameters": [device.parameters for device in report.devices],
            "guards": report.guards_fired,
            "seconds": report.seconds,
        }
        with given.results.open("a") as file:
            file.write(json.dumps({"key": key, **known[key]}) + "\n")
        print(f"{key}: fleet {report.mean_accuracy_fleet:.4f}, {report.seconds:.0f} s", flush=True)


def print_table(given: argparse.Namespace, known: dict[str, Any]) -> None:
    """Mean and deviation over seeds for each alpha, and the paired difference to alone."""
    for alpha in given.alphas:
        result: dict[tuple[str, int], Any] = {}
        for key, simulation in runs(given):
            if key in known and simulation.alpha == alpha:
                result[key.split("/")[-1], simulation.seed] = known[key]
        seeds = [seed for seed in given.seeds if ("none", seed) in result]
        if seeds:
            _print_alpha(result, seeds, f"{given.dataset}, alpha {alpha}, {given.rounds} rounds")


def _print_alpha(found: dict[tuple[str, int], Any], seeds: list[int], title: str) -> None:
    alone = {seed: found["none", seed]["alone"] for seed in seeds}
    own = _spread([found["none", seed]["alone_own"] for seed in seeds])
    print(f"\n{title}, seeds {seeds}: mean device accuracy in %, global test part and own classes")
    print(f"| alone | {_spread(list(alone.values()))} | | {own} |")
    for name in dict.fromkeys(name for name, _ in found):
        have = [seed for seed in seeds if (name, seed) in found]
        gains = [found[name, seed]["fleet"] - alone[seed] for seed in have]
        each = ", ".join(f"{100 * gain:+.1f}" for gain in gains)
        fleet = _spread([found[name, seed]["fleet"] for seed in have])
        own = _spread([found[name, seed]["own"] for seed in have])
        print(f"| {name} | {fleet} | {_spread(gains)} over alone ({each}) | {own} |")
    _print_bytes([found["skr", seed] for seed in seeds if ("skr", seed) in found], title)


def _print_bytes(measured: list[Any], title: str) -> None:
    if not measured:
        return
    rounds = int(title.split(", ")[-1].split()[0])
    up = statistics.mean(statistics.mean(run["bytes_up"]) for run in measured) / rounds
    down = statistics.mean(statistics.mean(run["bytes_down"]) for run in measured) / rounds
    fedavg = 4 * max(measured[0]["parameters"])
    print(f"bytes per device and round: {up:,.0f} up, {down:,.0f} down; FedAvg on the largest device model")
    print(f"{fedavg:,} each way: {up / fedavg:.2f} and {down / fedavg:.2f} of it")


def _spread(values: list[float]) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{100 * statistics.mean(values):.1f} ± {100 * deviation:.1f}"


def main() -> None:
    """Measures what is missing and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--train-limit", type=int)
    parser.add_argument("--test-limit", type=int)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--alphas", type=float, nargs="+", default=[0.5, 0.1])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS), help="none is needed")
    parser.add_argument("--torch-device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("out/experiments/work"))
    parser.add_argument("--results", type=Path, default=Path("out/experiments/feddkc.jsonl"))
    given = parser.parse_args()
    given.results.parent.mkdir(parents=True, exist_ok=True)
    lines = given.results.read_text().splitlines() if given.results.exists() else []
    known = {row.pop("key"): row for row in map(json.loads, lines)}
    measure(given, known)
    print_table(given, known)


if __name__ == "__main__":
    main()
