"""The refined head of class statistics against the closed form, paired by seed: the table of benchmarks/RESULTS.md.

    FLEETDISTILL_DATA=data python benchmarks/experiments/refined_head.py digits mnist-14 fashion-14
    FLEETDISTILL_DATA=data python benchmarks/experiments/refined_head.py fashion-14 --widths 1 --steps 5 --lam n/C D 50
    FLEETDISTILL_DATA=data python benchmarks/experiments/refined_head.py cifar100-10-40 --seeds 100 101

Features, merge, closed form and refined head are the product's; the devices' gradients and the weights are rounded to
float16 as they would be sent. Everything runs in one process, without an exchange. `--widths 2` has twice the usual D.
The closed form has at most df // 15 directions, as the product, or 128. Settings with a number of rows have test rows
from the training part, so that rules can be chosen on them; `cifar100-C-n` has C classes of n rows each.

Accuracies in %: all classes by the general answer / own classes by the personal one, means over devices and seeds; kB
of a device, up and down. `left out`: share of the devices' rows that the general answer tells by leave-one-out. `J` and
`loss` per row are at the start and at the final weights, `h n a` the effective numbers of a class's weights. Results
are appended to a file; what is there already is not computed again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from one_exchange import FASHION, SETTINGS, Exchange, Figures, alone, bytes_down, exchange, read
from one_exchange_fleet import Fleet, Setting, accuracies, make_fleet

from fleetdistill.knowledge import Array, ClassSpace, LinearHead
from fleetdistill.knowledge.statistics import MIN_ROWS_PER_DIRECTION
from fleetdistill.methods.classstats.class_space import coordinates, logits
from fleetdistill.methods.classstats.class_variants import LEAVE_ONE_OUT, class_variants
from fleetdistill.methods.classstats.config import ClassStatsConfig
from fleetdistill.methods.classstats.projection import usual_dimensions
from fleetdistill.methods.classstats.refined_head import (
    GradientSum,
    from_wire,
    gradient_sum,
    left_out_logits,
    to_wire,
)
from fleetdistill.training.figures import likelihood
from fleetdistill.wire.codec import decode, encode
from fleetdistill_server.methods.classstats.refinement import (
    Objective,
    Refinement,
    make_objective,
    mean_of_rows,
    space_of_head,
    strength_rule,
    usual_objective,
)

CLOSED = {"closed form": ClassStatsConfig().rows_per_direction, "closed form, rank 128": MIN_ROWS_PER_DIRECTION}
"""Rows -> rows_per_direction."""
LAM, BOUNDED = "min(n/C, D)", "h <= 1"
HELD_OUT = Setting("fashion-mnist", 14, test_limit=2500, alpha=0.5, held_out=True)
EVERY: dict[str, list[Setting]] = {
    **{name: SETTINGS[name] for name in ("digits", "fashion-14", "fashion-28", "mnist-28", "cifar10", "cifar100")},
    "mnist-14": [replace(FASHION, dataset="mnist", image_size=14, alpha=alpha) for alpha in (0.5, 0.1)],
    "digits-900": [replace(HELD_OUT, dataset="digits", image_size=None, train_limit=900)],
    **{f"fashion-14-{rows}": [replace(HELD_OUT, train_limit=rows)] for rows in (300, 600, 1200, 3000)},
    **{f"mnist-14-{rows}": [replace(HELD_OUT, dataset="mnist", train_limit=rows)] for rows in (300, 600, 1200, 3000)},
    **{
        f"cifar10-{rows}": [replace(HELD_OUT, dataset="cifar10", image_size=None, train_limit=rows)]
        for rows in (600, 1200, 2500, 5000)
    },
    **{
        f"cifar100-{classes}-{rows}": [
            replace(HELD_OUT, dataset="cifar100", image_size=None, train_limit=rows * classes, classes=classes)
        ]
        for classes in (10, 20, 50, 100)
        for rows in (40, 60)
    },
}


def strength_of(lam: str, objective_rows: int, classes: int, dimensions: int) -> float:
    """λ of an option, before a bound: `n/C` or `D`, also with a factor, as in `3*n/C`; the rule; or a number."""
    if lam in (LAM, BOUNDED):
        return strength_rule(objective_rows, classes, dimensions)
    factor, _, name = lam.rpartition("*")
    known = {"n/C": objective_rows / classes, "D": float(dimensions)}
    return float(factor or 1) * known[name] if name in known else float(lam)


def directions(rows_per_direction: int) -> Any:
    """Degrees of freedom -> most directions that a device sends."""
    rank = ClassStatsConfig().rank
    return lambda df: min(rank, df // rows_per_direction)


def closed_form(fleet: Fleet, rows_per_direction: int) -> Figures:
    """Figures of the product's general and personal models, without the guard of own statistics."""
    made = exchange(fleet, directions(rows_per_direction))
    general = logits(made.space, coordinates(made.space, fleet.test.features), fleet.classes)
    answers, hits = [], 0.0
    for number, part in enumerate(fleet.parts):
        counted = made.counted(number)
        variants = class_variants(
            made.space, part.features, part.labels, counted, fleet.classes, None, rows_per_direction
        )
        answers.append(general / variants.personal.temperature + np.log(variants.personal.prior))
        hits += next(figure.sum for figure in variants.figures if figure.name == LEAVE_ONE_OUT)
    return {
        "all": accuracies(fleet, [general] * len(answers))[0],
        "own": accuracies(fleet, answers)[1],
        "kb": made.kb,
        "leave_one_out": hits / sum(len(part.labels) for part in fleet.parts),
    }


def summed(fleet: Fleet, made: Exchange, objective: Objective, weights: Array) -> GradientSum:
    """The sum over the devices' messages, each in the types that it is sent in."""
    head = LinearHead(labels=list(objective.labels), counts=objective.counts, mean=objective.mean, weights=weights)
    gradient, loss, rows = np.zeros(weights.shape), 0.0, 0
    for number, part in enumerate(fleet.parts):
        own = gradient_sum(head, part.features, part.labels, made.counted(number))
        sent = to_wire(own, head, fleet.classes)
        received = from_wire(replace(sent, gradient=sent.gradient.astype(np.float16)), head)
        gradient, loss, rows = gradient + received.gradient, loss + received.loss, rows + received.rows
    return GradientSum(gradient, loss, rows)


def refined(fleet: Fleet, made: Exchange, steps: Sequence[int], lam: str) -> dict[int, Figures]:
    """Figures after some numbers of steps, from the product's message of each device."""
    moments = made.merged
    sizes = int(moments.counts.sum()), len(moments.labels), moments.dimensions
    mean, shrinkage = mean_of_rows(moments).astype(np.float16), float(made.space.shrinkage)
    if lam == BOUNDED:
        objective = usual_objective(moments, mean, shrinkage)
    else:
        objective = make_objective(moments, mean, shrinkage, strength_of(lam, *sizes))
    refinement, result = Refinement(objective), {}
    for step in range(max(steps) + 1):
        final = refinement.final().astype(np.float16)
        if step in steps:
            result[step] = {
                **figures(fleet, made, objective, final, step),
                **at_weights(fleet, made, objective, final),
                "values": [value / objective.rows for value in refinement.values],
            }
        sent = refinement.weights.astype(np.float16)
        refinement.step(sent, summed(fleet, made, objective, sent))
    return result


def at_weights(fleet: Fleet, made: Exchange, objective: Objective, weights: Array) -> Figures:
    """J and the loss per row."""
    total = summed(fleet, made, objective, weights)
    value, _ = objective.value_and_gradient(weights.astype(np.float64), total)
    return {"value": value / objective.rows, "loss": total.loss / objective.rows}


def figures(fleet: Fleet, made: Exchange, objective: Objective, weights: Array, steps: int) -> Figures:
    """Accuracies of the head, and what a rule could use."""
    sent = encode({"space": space_of_head(objective, weights, made.merged.df, float(made.space.shrinkage))})
    space = decode(sent)["space"]
    assert isinstance(space, ClassSpace)
    general = logits(space, coordinates(space, fleet.test.features), fleet.classes)
    answers, temperatures, hits, nats = [], [], 0, 0.0
    for number, part in enumerate(fleet.parts):
        counted = made.counted(number)
        found = logits(space, coordinates(space, part.features), fleet.classes)
        left_out = left_out_logits(space, found, part.labels, counted)
        personal = class_variants(space, part.features, part.labels, counted, fleet.classes, None).personal
        answers.append(general / personal.temperature + np.log(personal.prior))
        temperatures.append(personal.temperature)
        nats -= likelihood(left_out / personal.temperature + np.log(personal.prior), part.labels)
        hits += int((left_out.argmax(axis=1) == part.labels).sum())
    rows, classes, dimensions = objective.rows, len(objective.labels), objective.metric.shape[0]
    number = 2 * classes * (dimensions + 1)
    message = 2 * dimensions + (steps + 1) * number + steps * (number + 8)
    return {
        "all": accuracies(fleet, [general] * len(answers))[0],
        "own": accuracies(fleet, answers)[1],
        "kb": made.kb + (message - bytes_down(classes, dimensions)) / 1e3,
        "leave_one_out": hits / sum(len(part.labels) for part in fleet.parts),
        "temperature": float(np.mean(temperatures)),
        "strength": objective.strength,
        "leverage": space.leverage,
        "n": rows,
        "classes": classes,
        "dimensions": dimensions,
        "min_count": int(objective.counts.min()),
        "effective": space.leverage * rows * objective.curvature,
        "signal": signal(objective),
        "left_out_nats": nats / sum(len(part.labels) for part in fleet.parts),
    }


def signal(objective: Objective) -> float:
    """Mean squared distance of a class mean from m in units of T, less what the means' own noise adds."""
    away = objective.means - objective.mean
    squares = (away * np.linalg.solve(objective.metric, away.T).T).sum(axis=1)
    return float(np.mean(squares - objective.metric.shape[0] / objective.counts))


def measure(fleet: Fleet, steps: Sequence[int], lams: Sequence[str]) -> dict[str, Figures]:
    """The rows of the table for one fleet."""
    result: dict[str, Figures] = {"alone": alone(fleet)}
    for name, rows in CLOSED.items():
        result[name] = closed_form(fleet, rows)
    made = exchange(fleet, directions(CLOSED["closed form"]))
    for lam in lams:
        for number, figures in refined(fleet, made, steps, lam).items():
            result[f"refined, R {number}, {lam}"] = figures
    return result


def with_width(setting: Setting, width: int) -> Setting:
    """The setting with `width` times the usual D."""
    usual = {"digits": (1, 8, 8)}.get(setting.dataset, (1, setting.image_size or 28, setting.image_size or 28))
    return setting if width == 1 else replace(setting, dimensions=width * usual_dimensions(usual))


def rows_of(given: argparse.Namespace) -> list[str]:
    return ["alone", *CLOSED, *(f"refined, R {step}, {lam}" for lam in given.lam for step in given.steps)]


def print_table(setting: Setting, given: argparse.Namespace) -> None:
    known = read(given.results)
    print(f"\n{setting.name}, seeds {given.seeds}\n")
    print("| row | all / own | less the closed form | kB | left out | J | loss | lam | h n a |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows_of(given):
        both = [(known[setting.name, seed, row], known[setting.name, seed, "closed form"]) for seed in given.seeds]
        means = [100 * float(np.mean([one[what] for one, _ in both])) for what in ("all", "own")]
        ahead = [[100 * (one[what] - closed[what]) for one, closed in both] for what in ("all", "own")]
        less = " ; ".join(f"{np.mean(item):+.1f} ({', '.join(f'{one:+.1f}' for one in item)})" for item in ahead)
        more = [_mean(both, what, f) for what, f in (("kb", "{:.0f}"), ("leave_one_out", "{:.3f}"))]
        if "value" in both[0][0]:
            more += [
                f"{_first(both)} → {_mean(both, 'value', '{:.3f}')}",
                *(_mean(both, what, "{:.3g}") for what in ("loss", "strength", "effective")),
            ]
        print(f"| {row} | {means[0]:.1f} / {means[1]:.1f} | {less} | {' | '.join(more)} |")


def _first(both: Sequence[tuple[Figures, Figures]]) -> str:
    """J per row at the start."""
    return f"{np.mean([(one['values'] or [one['value']])[0] for one, _ in both]):.3f}"


def _mean(both: Sequence[tuple[Figures, Figures]], what: str, form: str) -> str:
    values = [one[what] for one, _ in both if one.get(what) is not None]
    return form.format(np.mean(values)) if values else "–"


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=list(EVERY), metavar="SETTINGS", help=f"of {', '.join(EVERY)}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2], help="multiples of the usual D")
    parser.add_argument("--steps", type=int, nargs="+", default=[3, 5], help="R, gradients")
    parser.add_argument(
        "--lam", nargs="+", default=[BOUNDED], help=f"n/C, D, numbers, factors as 3*n/C, '{LAM}', or '{BOUNDED}'"
    )
    parser.add_argument("--results", type=Path, default=Path("out/experiments/refined_head.jsonl"))
    given = parser.parse_args()
    given.results.parent.mkdir(parents=True, exist_ok=True)
    for width in given.widths:
        for setting in (with_width(one, width) for name in given.names for one in EVERY[name]):
            for seed in given.seeds:
                known = read(given.results)
                if all((setting.name, seed, row) in known for row in rows_of(given)):
                    continue
                result = measure(make_fleet(setting, seed), given.steps, given.lam)
                with given.results.open("a") as file:
                    for row, figures in result.items():
                        file.write(json.dumps({"setting": setting.name, "seed": seed, "row": row, **figures}) + "\n")
            print_table(setting, given)


if __name__ == "__main__":
    main()
