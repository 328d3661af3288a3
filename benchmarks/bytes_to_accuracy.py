"""Bytes that each method needs to reach the accuracy that FedAvg with float32 has after its last round.

All runs of one seed share devices, data, partition, initial weights, model and local training. Each is a simulation
with the real engine and devices. Accuracies are the curves of its report, on the global test set. Bytes are those that
its store counted, per device: up + down without compression, and in brackets on the wire, with Zstandard.

    OMP_NUM_THREADS=1 python benchmarks/bytes_to_accuracy.py
    OMP_NUM_THREADS=1 FLEETDISTILL_DATA=data python benchmarks/bytes_to_accuracy.py --fleets mnist
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fleetdistill_console.commands.methods import method_row
from fleetdistill_lab import FleetReport, Simulation, simulate
from fleetdistill_lab.simulation.report.metrics import rounds_to
from fleetdistill_server.methods.traffic import KnowledgeType, Sizes

LOCAL: dict[str, Any] = {
    "local_epochs": 2,
    "batch_size": 32,
    "optimizer": "sgd",
    "learning_rate": 0.02,
    "momentum": 0.9,
    "weight_decay": 0.0,
}
"""FedAvg's default settings of local training, which every method uses."""
MODEL = "digits_cnn_large"
MNIST_SIZE = 14
ENCODINGS: tuple[KnowledgeType, ...] = ("float32", "float16", "uint8")

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"method": "fedavg"},
    "feddkd": {"method": "feddkd"},
    "dafkd": {"method": "dafkd"},
    # Half of FedD2S's passes learn labels, so that it makes as many of those as the others.
    "fedd2s": {"method": "fedd2s", "settings": {"local_epochs": 2 * LOCAL["local_epochs"]}},
    "feddkc": {"method": "feddkc"},
    "cdkt": {"method": "cdkt", "server_model": MODEL},
    "classstats": {"method": "classstats", "rounds": 1},
    "classstats_private, epsilon 8": {"method": "classstats_private", "rounds": 1, "settings": {"epsilon": 8.0}},
    "classstats_secure, epsilon 8": {"method": "classstats_secure", "rounds": 1, "settings": {"epsilon": 8.0}},
    "classstats_summed": {"method": "classstats_summed", "rounds": 1},
}
"""For each method, the fields of `Simulation` that differ from the fleet's; `settings` are added to `LOCAL`."""
_SAME = Simulation(
    models=(MODEL,),
    extractor="digits_extractor",
    server_model="digits_server",
    proxy_per_class=8,
    with_alone=False,
    with_fedavg=False,
)
FLEETS = {
    "digits": replace(_SAME, devices=5),
    "mnist": replace(_SAME, dataset="mnist", image_size=MNIST_SIZE, devices=10, train_limit=2000, test_limit=1000),
}


Run = tuple[str, KnowledgeType]
"""Method and encoding."""
Columns = tuple[str, ...]
PLAIN: Columns = ("tensor_bytes", "envelope_bytes")
SENT: Columns = ("sent_bytes",)
"""Columns of `FleetReport.traffic` that add up to the bytes without compression, and to those on the wire."""


@dataclass(frozen=True)
class Goals:
    """FedAvg's accuracies after its last round: the mean of its device models, and its global model."""

    devices: float
    global_model: float


def simulation(fleet: Simulation, method: str) -> Simulation:
    """Returns the settings of a method's run on the fleet."""
    changes = METHODS[method]
    settings = LOCAL | changes.get("settings", {})
    if method == "dafkd" and fleet.image_size == MNIST_SIZE:
        settings["generator"] = "digits_generator"  # the default one creates multiples of 4 pixels
    return replace(fleet, **{**changes, "settings": settings})


def encodings(wanted: Simulation) -> list[KnowledgeType]:
    """Returns the knowledge types that differ in bytes; parameters and exact sums have the same bytes in all."""
    result: dict[tuple[int, int], KnowledgeType] = {}
    for encoding in ENCODINGS:
        row = method_row(wanted.method, Sizes(), encoding, wanted.rounds_to_complete, wanted.configuration())
        result.setdefault((row["bytes_up"], row["bytes_down"]), encoding)
    return list(result.values())


def accuracies(report: FleetReport) -> dict[str, list[float | None]]:
    """Returns the accuracy after each round of the device models, by variant, and of the global model."""
    return {curve.name: curve.accuracy for curve in report.curves}


def goals(fedavg: FleetReport) -> Goals:
    """Returns the accuracies that the runs of the same seed must reach."""
    last = {name: accuracy[-1] for name, accuracy in accuracies(fedavg).items()}
    devices, global_model = last["FedAvg devices"], last["FedAvg global"]
    assert devices is not None  # FedAvg scores both in every round
    assert global_model is not None
    return Goals(devices, global_model)


def spent(report: FleetReport, number: int, direction: str, columns: Columns) -> float:
    """Returns the bytes in one direction from the start of the run to the end of a round, mean over the devices."""
    rows = [item for item in report.traffic if item["direction"] == direction and item["round"] <= number]
    return float(sum(row[name] for row in rows for name in columns)) / len(report.devices)


def cell(reports: Sequence[FleetReport], name: str, wanted: Sequence[float]) -> str:
    """Formats the rounds and bytes that a model needs to reach each seed's goal."""
    rounds = [rounds_to(accuracies(one)[name], goal) for one, goal in zip(reports, wanted, strict=True)]
    reached = [(one, number) for one, number in zip(reports, rounds, strict=True) if number is not None]
    if not reached:
        return "never"
    kilobytes = [
        f"{statistics.mean(spent(one, number, direction, columns) for one, number in reached) / 1e3:,.0f}"
        for columns in (PLAIN, SENT)
        for direction in ("up", "down")
    ]
    share = f"{len(reached)} of {len(reports)} seeds: " if len(reached) < len(reports) else ""
    shown = "/".join(str(number) for _, number in reached)
    return f"{share}{kilobytes[0]} + {kilobytes[1]} ({kilobytes[2]} + {kilobytes[3]}), round {shown}"


def lines(key: Run, reports: Sequence[FleetReport], wanted: Sequence[Goals]) -> Iterator[str]:
    """Yields a table row for each of a run's models; `reports` and `wanted` have one entry for each seed."""
    for name in accuracies(reports[0]):
        last = [accuracies(report)[name][-1] for report in reports]
        shown = "/".join("not scored" if item is None else f"{item:.1%}".rstrip("%") for item in last)
        cells = [cell(reports, name, [getattr(item, goal) for item in wanted]) for goal in ("devices", "global_model")]
        yield f"| {key[0]} | {key[1]} | {name} | {shown} | {' | '.join(cells)} |"


def print_table(found: Mapping[Run, Sequence[FleetReport]]) -> None:
    """Prints the table of the seeds so far."""
    wanted = [goals(item) for item in found["fedavg", "float32"]]
    for name in ("devices", "global_model"):
        print(f"goal, {name}: {', '.join(f'{getattr(item, name):.1%}' for item in wanted)}")
    print("| method | encoding | model | accuracy at the end | to FedAvg's device models | to its global model |")
    print("|---|---|---|---|---|---|")
    for key, reports in found.items():
        print(*lines(key, reports, wanted), sep="\n", flush=True)


def measure(fleet: Simulation, seeds: Iterable[int], chosen: Sequence[str]) -> None:
    """Runs every chosen method and encoding with each seed; prints the table after each seed."""
    wanted = {name: simulation(fleet, name) for name in chosen}
    result: dict[Run, list[FleetReport]] = {
        (name, encoding): [] for name in chosen for encoding in encodings(wanted[name])
    }
    for seed in seeds:
        for (name, encoding), reports in result.items():
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "out"
                reports.append(simulate(replace(wanted[name], seed=seed, knowledge_type=encoding, out=out)))
            print(f"seed {seed}, {name}, {encoding}: {reports[-1].seconds:.0f} s", flush=True)
        print_table(result)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fleets", nargs="+", choices=FLEETS, help="default: digits; and mnist with FLEETDISTILL_DATA")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    given, data_dir = parse(words), os.environ.get("FLEETDISTILL_DATA")
    torch.set_num_threads(1)
    chosen = list(dict.fromkeys(["fedavg", *given.methods]))  # its accuracy is the goal
    for name in given.fleets or (["digits", "mnist"] if data_dir else ["digits"]):
        where = Path(data_dir) if data_dir else None
        fleet = replace(FLEETS[name], rounds=given.rounds, data_dir=where, torch_device="cpu")
        print(f"\n{name}: {fleet.devices} devices, {given.rounds} rounds, {MODEL}, alpha {fleet.alpha}", flush=True)
        measure(fleet, given.seeds, chosen)


if __name__ == "__main__":
    main()
