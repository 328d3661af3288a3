"""`make chaos`: seeded runs in which processes are killed and connections spoiled, and what became of every upload.

python -m chaos.run --seed 7               one run, whose folder out/chaos/7 is kept
python -m chaos.run --seed 1 --runs 200    seeds 1 to 200, two at a time; folders of runs that went well are removed
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import shutil
import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from chaos.mutations import MUTATIONS
from chaos.scenario import Scenario, beyond_one_machine, scenario

Row = dict[str, Any]


def run_seed(seed: int, out: Path, mutation: str = "", length: int = 1, *, keep: bool = False) -> Row:
    """Runs one seed, so many times as long; its folder stays if something was found, or if it is to be kept."""
    work = out / str(seed)
    shutil.rmtree(work, ignore_errors=True)
    try:
        row = run_scenario(scenario(seed, length), work, mutation)
    except Exception:  # a fault of the harness is a finding too, and the other seeds go on
        row = {"seed": seed, "method": "", "acknowledged": 0, "lost": [], "doubled": [], "kills": 0, "faults": {}}
        row |= {"wrong": [traceback.format_exc()], "figures": {}, "seconds": 0.0}
    if is_good(row) and not keep:
        shutil.rmtree(work, ignore_errors=True)
    return row


def run_scenario(wanted: Scenario, work: Path, mutation: str = "") -> Row:
    """Runs a scenario in a new folder."""
    from chaos.arena import Arena, as_row

    work.mkdir(parents=True)
    return as_row(asyncio.run(Arena(wanted, work, mutation).fight()))


def run_beyond_one_machine(seed: int, work: Path) -> Row:
    """Runs a seed with several fronts, PostgreSQL and an object store of its own, in a new folder."""
    from chaos.arena import Arena, as_row
    from chaos.services import Services
    from support.object_store import ObjectStore
    from support.postgres import Postgres

    work.mkdir(parents=True)
    with Postgres.start() as postgres, ObjectStore.start() as objects, postgres.schema() as database:
        services = Services(postgres, database, objects)
        try:
            return as_row(asyncio.run(Arena(beyond_one_machine(seed), work, services=services).fight()))
        finally:
            services.wait()


def is_good(row: Row) -> bool:
    """Nothing lost, nothing doubled, nothing else wrong."""
    return not (row["lost"] or row["doubled"] or row["wrong"])


def run_seeds(seeds: Sequence[int], out: Path, jobs: int, mutation: str, length: int = 1) -> Iterator[Row]:
    """Runs many seeds, several at a time; each of the processes has a fork server of its own."""
    if jobs == 1:
        yield from (run_seed(seed, out, mutation, length, keep=len(seeds) == 1) for seed in seeds)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(run_seed, seed, out, mutation, length) for seed in seeds]):
            yield done.result()


def last_line(rows: Iterable[Row]) -> str:
    """The sums of all runs."""
    rows = list(rows)
    acknowledged, kills = sum(row["acknowledged"] for row in rows), sum(row["kills"] for row in rows)
    lost, doubled = sum(len(row["lost"]) for row in rows), sum(len(row["doubled"]) for row in rows)
    return f"chaos: {acknowledged} acknowledged, {lost} lost, {doubled} doubled, {kills} kills"


def summary(rows: Sequence[Row]) -> str:
    """The figures as Markdown, for docs/explanation/durability.md."""
    figures: Counter[str] = Counter()
    for row in rows:
        figures.update(row["figures"])
        figures.update({f"faults {kind}": count for kind, count in row["faults"].items()})
    methods = Counter(row["method"] for row in rows)
    facts = {
        "runs": len(rows),
        **{f"runs of {method}": count for method, count in sorted(methods.items())},
        "acknowledged uploads": sum(row["acknowledged"] for row in rows),
        "lost": sum(len(row["lost"]) for row in rows),
        "doubled": sum(len(row["doubled"]) for row in rows),
        "processes killed (SIGKILL)": sum(row["kills"] for row in rows),
        "fewest kills in a run": min(row["kills"] for row in rows),
        "seconds of all runs together": round(sum(row["seconds"] for row in rows)),
        **dict(sorted(figures.items())),
    }
    failed = [row["seed"] for row in rows if not is_good(row)]
    lines = ["| what | number |", "|---|---|", *(f"| {name} | {count:,} |" for name, count in facts.items())]
    return "\n".join([*lines, "", f"Seeds with findings: {', '.join(map(str, failed)) or 'none'}.", ""])


def main() -> int:
    """Entry point of `make chaos`."""
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--runs", type=int, default=1, help="how many seeds to run from there on")
    parser.add_argument("--length", type=int, default=1, help="times as many rounds, kills and faults in each run")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--out", type=Path, default=Path("out/chaos"))
    parser.add_argument("--beyond", action="store_true", help="several fronts over PostgreSQL and an object store")
    parser.add_argument("--mutation", choices=sorted(MUTATIONS), default="", help="break the server on purpose")
    given = parser.parse_args()
    seeds = range(given.seed, given.seed + given.runs)
    given.out.mkdir(parents=True, exist_ok=True)
    if given.beyond:
        beyond = []
        for seed in seeds:
            beyond.append(run_beyond_one_machine(seed, given.out.resolve() / f"beyond-{seed}"))
            _say(beyond[-1], len(beyond), len(seeds))
        print(summary(beyond), last_line(beyond), sep="\n")
        return 0 if all(is_good(row) for row in beyond) else 1
    rows = []
    with (given.out / "runs.jsonl").open("w") as file:
        for row in run_seeds(seeds, given.out.resolve(), min(given.jobs, len(seeds)), given.mutation, given.length):
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
            _say(row, len(rows), len(seeds))
    (given.out / "summary.md").write_text(summary(rows))
    print(last_line(rows))
    return 0 if all(is_good(row) for row in rows) else 1


def _say(row: Row, number: int, count: int) -> None:
    good = "well" if is_good(row) else "BADLY"
    text = f"{row['acknowledged']} acknowledged, {row['kills']} kills, {row['seconds']:g} s"
    print(f"[{number}/{count}] seed {row['seed']} ({row['method']}) went {good}: {text}", flush=True)
    for name in ("lost", "doubled", "wrong"):
        for finding in row[name][:10]:
            print(f"    {name}: {finding}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
