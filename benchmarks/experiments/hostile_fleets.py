"""What hostile devices do to a run, with `robust` off and on: real engine, store, messages and device halves.

    python benchmarks/experiments/hostile_fleets.py fedavg feddkc --robust off gross
    python benchmarks/experiments/hostile_fleets.py --table

Digits, 10 devices. Printed are the mean accuracy of the honest devices on all classes, and that of the
global or operator's model where the method has one, in %; and the devices that were named. "run ends": no round of the
last ones had a result. Results are appended to a file as they come; one that is there is not repeated.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fleetdistill.errors import RunError
from fleetdistill_lab.simulation.fleet import simulate
from fleetdistill_lab.simulation.links import links
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.event_kinds import LEFT_OUT

DEVICES = 10
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"method": "fedavg", "rounds": 8},
    "feddkd": {"method": "feddkd", "rounds": 6},
    "dafkd": {"method": "dafkd", "rounds": 6},
    "feddkc": {"method": "feddkc", "rounds": 8},
    "cdkt": {"method": "cdkt", "rounds": 6},
}
ATTACKS: dict[str, tuple[int, str]] = {
    "no attacker": (0, ""),
    "1 flips labels": (1, "flips"),
    "2 flip labels": (2, "flips"),
    "1 sends update x -5": (1, "reversed"),
    "2 send update x -5": (2, "reversed"),
    "1 sends all x 1,000": (1, "scaled"),
    "2 send all x 1,000": (2, "scaled"),
    "1 declares most samples and flips": (1, "declares"),
}
_KEY = ("name", "attack", "robust", "seed", "alpha")
ENDED = "run ends"
SHORT_ROUNDS = 5  # in a row are the end; a simulation by itself would try 100


def run(name: str, attack: str, robust: str, seed: int, alpha: float) -> dict[str, Any]:
    """One fleet; what is printed of it."""
    method = dict(METHODS[name])
    hostile, what = ATTACKS[attack]
    out = Path(tempfile.mkdtemp(prefix="hostile-"))
    wanted = Simulation(
        method=method["method"],
        settings={**method.get("settings", {}), "robust": robust},
        rounds=method["rounds"],
        devices=DEVICES,
        alpha=alpha,
        seed=seed,
        hostile=hostile,
        attack=what,
        with_alone=False,
        with_fedavg=False,
        torch_device="cpu",
        out=out,
    )
    row = {
        "name": name,
        "attack": attack,
        "robust": robust,
        "seed": seed,
        "alpha": alpha,
        "settings": asdict(wanted)["settings"],
    }
    try:
        return {**row, **figures(wanted, hostile)}
    except RunError as error:
        return {**row, "result": ENDED, "why": str(error)[:300]}
    finally:
        shutil.rmtree(out, ignore_errors=True)


def figures(wanted: Simulation, hostile: int) -> dict[str, Any]:
    report = simulate(wanted)
    left_out = {device for device, kinds in report.named.items() if set(kinds) & set(LEFT_OUT)}
    accuracies = [values[-1] for _, values in sorted(report.accuracy_by_round.items())]
    honest = accuracies[hostile:]
    devices = [f"device-{number}" for number in range(hostile)]
    return {
        "honest": 100 * sum(honest) / len(honest),
        "global": _percent(report.global_accuracy_by_round[-1]),
        "hostile_named": len(report.named.keys() & set(devices)),
        "honest_left_out": len(left_out - set(devices)),
        "seconds": report.seconds,
    }


def _percent(accuracy: float | None) -> float | None:
    return None if accuracy is None else 100 * accuracy


def print_table(rows: list[dict[str, Any]]) -> None:
    """A row for each method and setting; hostile devices that were named of those there were, in brackets."""
    print("| | robust | " + " | ".join(ATTACKS) + " |")
    print("|---" * (len(ATTACKS) + 2) + "|")
    for name in METHODS:
        for robust in ("off", "gross", "strict"):
            result = {row["attack"]: row for row in rows if (row["name"], row["robust"]) == (name, robust)}
            if result:
                cells = [_cell(result.get(attack), ATTACKS[attack][0]) for attack in ATTACKS]
                print(f"| {name} | {robust} | " + " | ".join(cells) + " |")


def _cell(row: dict[str, Any] | None, hostile: int) -> str:
    if row is None:
        return ""
    if "result" in row:
        return f"**{row['result']}**"
    shown = f"{row['honest']:.1f}" + ("" if row["global"] is None else f" / {row['global']:.1f}")
    wrongly = f", {row['honest_left_out']} honest" if row["honest_left_out"] else ""
    return f"{shown} ({row['hostile_named']}{wrongly})" if hostile or wrongly else shown


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--robust", nargs="+", default=["off", "gross"])
    parser.add_argument("--attacks", nargs="+", choices=list(ATTACKS), default=list(ATTACKS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--alpha", type=float, default=0.5, help="of the Dirichlet partition")
    parser.add_argument("--results", type=Path, default=Path("out/experiments/hostile_fleets.jsonl"))
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    given.results.parent.mkdir(parents=True, exist_ok=True)
    known = [json.loads(line) for line in given.results.read_text().splitlines()] if given.results.exists() else []
    links.MAX_SHORT_ROUNDS = SHORT_ROUNDS
    for name in () if given.table else given.names or METHODS:
        for attack in given.attacks:
            for robust in given.robust:
                key = (name, attack, robust, given.seed, given.alpha)
                if any(tuple(row[item] for item in _KEY) == key for row in known):
                    continue
                known.append(run(*key))
                with given.results.open("a") as file:
                    file.write(json.dumps(known[-1]) + "\n")
                print({**known[-1], "settings": ""}, flush=True)
    print_table([row for row in known if (row["seed"], row["alpha"]) == (given.seed, given.alpha)])


if __name__ == "__main__":
    main()
