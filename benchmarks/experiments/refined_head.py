"""The refined head of class statistics against the closed form, paired by seed: the table of benchmarks/RESULTS.md.

    FLEETDISTILL_DATA=data python benchmarks/experiments/refined_head.py digits mnist-14 fashion-14
    FLEETDISTILL_DATA=data python benchmarks/experiments/refined_head.py fashion-14 --widths 1 --steps 5 --lam n/C D 50
    FLEETDISTILL_DATA=data python benchmarks/experiments/refined_head.py cifar100-10-40 --seeds 100 101

Features, merge, closed form and refined head are the product's; the devices' gradients and the weights are rounded to
float16 as they would be sent. Everything runs in one process, without an exchange. `--widths 2` has twice the usual D.
The closed form has at most df // 15 directions, as the product, or 128. Settings with a number of rows have test rows
from the training part, so that rules can be chosen on them; `cifar100-C-n` has C classes of n rows each.
`cifar100-C` has C classes and the test part.

Accuracies in %: all classes by the general answer / own classes by the personal one, means over devices and seeds; kB
of a device, up and down. `left out`: share of the devices' rows that the general answer tells by leave-one-out. `J`
is per row at the start and at the final weights, `h n a` the effective numbers of a class's weights. `stop`: the closed
form where the first step lowers J by less than 1 %, in the share `stopped` of the fleets. Differences are paired: mean,
deviation, and in brackets the worst seed. FedAvg is that of `one_exchange.py`. The last table has, of all devices of
the call, the personal answer less the device's own closed form on own classes, with each guard that takes the device's
own statistics instead. Results are appended to a file; what is there already is not computed again.
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
from one_exchange import (
    FASHION,
    MIN_SAMPLES,
    SETTINGS,
    Exchange,
    Figures,
    alone,
    bytes_down,
    exchange,
    fedavg_rows,
    read,
)
from one_exchange_fleet import Fleet, Part, Setting, accuracies, make_fleet, own_accuracy

from fleetdistill.knowledge import Array, ClassSpace, LinearHead
from fleetdistill.knowledge.statistics import MIN_ROWS_PER_DIRECTION
from fleetdistill.methods.classstats.class_space import coordinates, leave_one_out, logits, usual_dimensions
from fleetdistill.methods.classstats.config import ClassStatsConfig
from fleetdistill.methods.classstats.exchange import (
    LEAVE_ONE_OUT,
    PersonalVariant,
    class_variants,
    local_variant,
)
from fleetdistill.methods.classstats.refined_head import (
    GradientSum,
    from_wire,
    gradient_sum,
    left_out_logits,
    to_wire,
)
from fleetdistill.methods.classstats.shared_statistics import moments_of
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
MIN_FALL = 0.01
"""By how much of it the first step must lower J, as in the product; else the devices get the closed form."""


def either(setting: Setting) -> list[Setting]:
    """The setting with either α."""
    return [replace(setting, alpha=alpha) for alpha in (0.5, 0.1)]


HELD_OUT = Setting("fashion-mnist", 14, test_limit=2500, held_out=True)
EVERY: dict[str, list[Setting]] = {
    **{
        name: SETTINGS[name]
        for name in ("digits", "fashion-14", "fashion-28", "mnist-28", "mnist-20", "cifar10", "cifar100")
    },
    "mnist-14": either(replace(FASHION, dataset="mnist", image_size=14)),
    "femnist": [Setting("femnist-digits", train_limit=2400, devices=12, alpha=None)],
    **{f"cifar100-{classes}": either(Setting("cifar100", classes=classes)) for classes in (10, 20, 50)},
    "digits-900": either(replace(HELD_OUT, dataset="digits", image_size=None, train_limit=900)),
    **{f"fashion-14-{rows}": either(replace(HELD_OUT, train_limit=rows)) for rows in (300, 600, 1200, 3000)},
    **{
        f"mnist-14-{rows}": either(replace(HELD_OUT, dataset="mnist", train_limit=rows))
        for rows in (300, 600, 1200, 3000)
    },
    **{
        f"cifar10-{rows}": either(replace(HELD_OUT, dataset="cifar10", image_size=None, train_limit=rows))
        for rows in (600, 1200, 2500, 5000)
    },
    **{
        f"cifar100-{classes}-{rows}": either(
            replace(HELD_OUT, dataset="cifar100", image_size=None, train_limit=rows * classes, classes=classes)
        )
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
    return closed_form_of(fleet, exchange(fleet, directions(rows_per_direction)), rows_per_direction)


def closed_form_of(fleet: Fleet, made: Exchange, rows_per_direction: int) -> Figures:
    """The same of an exchange."""
    held, devices, hits = min(1.0, made.merged.df / (rows_per_direction * fleet.dimensions)), [], 0.0
    for number, part in enumerate(fleet.parts):
        counted = made.counted(number)
        variants = class_variants(
            made.space, part.features, part.labels, counted, fleet.classes, None, rows_per_direction
        )
        where = coordinates(made.space, part.features)
        left_out = leave_one_out(made.space, where, part.labels, counted, fleet.classes, held)
        devices.append(device_figures(fleet, part, variants.personal, left_out))
        hits += next(figure.sum for figure in variants.figures if figure.name == LEAVE_ONE_OUT)
    return {
        "all": general_accuracy(fleet, made.space),
        "own": float(np.mean([device["own"] for device in devices])),
        "kb": made.kb,
        "leave_one_out": hits / sum(len(part.labels) for part in fleet.parts),
        "devices": devices,
    }


def general_accuracy(fleet: Fleet, space: ClassSpace) -> float:
    """Accuracy of the general answer on the test part."""
    general = logits(space, coordinates(space, fleet.test.features), fleet.classes)
    return accuracies(fleet, [general] * len(fleet.parts))[0]


def device_figures(fleet: Fleet, part: Part, made: PersonalVariant, left_out: Array) -> Figures:
    """Of a personal answer: accuracy on own classes, and by leave-one-out the share of rows told and nats a row."""
    general = logits(made.space, coordinates(made.space, fleet.test.features), fleet.classes)
    found = general / made.temperature + np.log(made.prior)
    nats = -likelihood(left_out / made.temperature + np.log(made.prior), part.labels)
    return {
        "own": own_accuracy(fleet, part, found),
        "hits": float(made.hits.mean()),
        "nats": nats / len(part.labels),
        "temperature": made.temperature,
        "rows": len(part.labels),
    }


def own_statistics(fleet: Fleet) -> Figures:
    """Figures of each device by its own statistics, as the product's guard has them; empty of a single class."""
    devices: list[Figures] = []
    for part in fleet.parts:
        own = moments_of(part.features, part.labels, MIN_SAMPLES)
        variant = local_variant(own, part.features, part.labels, fleet.classes)
        if variant is None:
            devices.append({})
            continue
        where = coordinates(variant.space, part.features)
        left_out = leave_one_out(variant.space, where, part.labels, set(own.labels), fleet.classes)
        devices.append(device_figures(fleet, part, variant, left_out))
    return {"devices": devices}


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
    devices, hits = [], 0
    for number, part in enumerate(fleet.parts):
        counted = made.counted(number)
        found = logits(space, coordinates(space, part.features), fleet.classes)
        left_out = left_out_logits(space, found, part.labels, counted)
        personal = class_variants(space, part.features, part.labels, counted, fleet.classes, None).personal
        devices.append(device_figures(fleet, part, personal, left_out))
        hits += int((left_out.argmax(axis=1) == part.labels).sum())
    rows, classes, dimensions = objective.rows, len(objective.labels), objective.metric.shape[0]
    return {
        "all": general_accuracy(fleet, space),
        "own": float(np.mean([device["own"] for device in devices])),
        "kb": made.kb + (bytes_of(objective, steps) - bytes_down(classes, dimensions)) / 1e3,
        "leave_one_out": hits / sum(len(part.labels) for part in fleet.parts),
        "temperature": float(np.mean([device["temperature"] for device in devices])),
        "strength": objective.strength,
        "leverage": space.leverage,
        "n": rows,
        "classes": classes,
        "dimensions": dimensions,
        "min_count": int(objective.counts.min()),
        "effective": space.leverage * rows * objective.curvature,
        "signal": signal(objective),
        "devices": devices,
    }


def bytes_of(objective: Objective, steps: int) -> int:
    """Bytes of a device by the exchanges of gradients and the final head."""
    classes, dimensions = len(objective.labels), objective.metric.shape[0]
    weights = 2 * classes * (dimensions + 1)
    return 2 * dimensions + (steps + 1) * weights + steps * (weights + 8)


def signal(objective: Objective) -> float:
    """Mean squared distance of a class mean from m in units of T, less what the means' own noise adds."""
    away = objective.means - objective.mean
    squares = (away * np.linalg.solve(objective.metric, away.T).T).sum(axis=1)
    return float(np.mean(squares - objective.metric.shape[0] / objective.counts))


def measure(fleet: Fleet, steps: Sequence[int], lams: Sequence[str]) -> dict[str, Figures]:
    """The rows of the table for one fleet."""
    trained = fedavg_rows(fleet)
    result: dict[str, Figures] = {
        "alone": alone(fleet),
        "own statistics": own_statistics(fleet),
        "fedavg": {"all": trained["global"][0], "own": trained["with_prior"][1], "kb": trained["kb"]},
    }
    for name, rows in CLOSED.items():
        result[name] = closed_form(fleet, rows)
    made = exchange(fleet, directions(CLOSED["closed form"]))
    for lam in lams:
        for number, found in refined(fleet, made, steps, lam).items():
            result[f"refined, R {number}, {lam}"] = found
            result[f"refined, R {number}, {lam}, stop"] = with_stop(found, result["closed form"])
    return result


def with_stop(refined: Figures, closed: Figures) -> Figures:
    """The closed form after two exchanges of gradients, where the first step lowers J too little."""
    start, first = refined["values"][:2]
    if first <= (1 - MIN_FALL) * start:
        return {**refined, "stopped": False}
    further = 2 * refined["dimensions"] + 8 * refined["classes"] * (refined["dimensions"] + 1) + 16
    return {**closed, "kb": closed["kb"] + further / 1e3, "stopped": True}


def with_width(setting: Setting, width: int) -> Setting:
    """The setting with `width` times the usual D."""
    usual = {"digits": (1, 8, 8)}.get(setting.dataset, (1, setting.image_size or 28, setting.image_size or 28))
    return setting if width == 1 else replace(setting, dimensions=width * usual_dimensions(usual))


def rows_of(given: argparse.Namespace) -> list[str]:
    heads = [f"refined, R {step}, {lam}{stop}" for lam in given.lam for step in given.steps for stop in ("", ", stop")]
    return ["alone", "fedavg", *CLOSED, *heads]


def print_table(setting: Setting, given: argparse.Namespace) -> None:
    known = read(given.results)
    print(f"\n{setting.name}, seeds {given.seeds}\n")
    print("| row | all / own | less the closed form | less FedAvg | kB | left out | stopped | J | lam | h n a |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows_of(given):
        found, closed, trained = (
            [known[setting.name, seed, name] for seed in given.seeds] for name in (row, "closed form", "fedavg")
        )
        means = [100 * float(np.mean([one[what] for one in found])) for what in ("all", "own")]
        less = [f"{_paired(found, other, 'all')} / {_paired(found, other, 'own')}" for other in (closed, trained)]
        more = [
            *(_mean(found, what, form) for what, form in (("kb", "{:.0f}"), ("leave_one_out", "{:.3f}"))),
            _mean(found, "stopped", "{:.1f}"),
            f"{_first(found)} → {_mean(found, 'value', '{:.3f}')}",
            *(_mean(found, what, "{:.3g}") for what in ("strength", "effective")),
        ]
        print(f"| {row} | {means[0]:.1f} / {means[1]:.1f} | {' | '.join([*less, *more])} |")


def print_devices(settings: Sequence[Setting], given: argparse.Namespace) -> None:
    known = read(given.results)
    print("\n| row, guard | mean own | less alone | below | below by 0.5 | worst | own taken |")
    print("|---|---|---|---|---|---|---|")
    for row in rows_of(given)[2:]:
        for guard in ("none", "hits", "likelihood"):
            taken, reached, less = [], [], []
            for setting in settings:
                for seed in given.seeds:
                    found, local, base = (known[setting.name, seed, one] for one in (row, "own statistics", "alone"))
                    used = "hits" if guard == "likelihood" and found.get("stopped") else guard
                    trios = zip(found["devices"], local["devices"], base["devices"], strict=True)
                    for fleets, own, only in trios:
                        taken.append(bool(own) and _takes_own(used, own, fleets))
                        reached.append(100 * (own if taken[-1] else fleets)["own"])
                        less.append(reached[-1] - 100 * only["own"])
            below = [100 * float(np.mean(np.array(less) < -least - 1e-9)) for least in (0.0, 0.5)]
            shares = f"{below[0]:.1f} % | {below[1]:.1f} % | {min(less):+.1f} | {100 * np.mean(taken):.0f} %"
            print(f"| {row}, {guard} | {np.mean(reached):.1f} | {np.mean(less):+.2f} | {shares} |")


def _takes_own(guard: str, own: Figures, fleets: Figures) -> bool:
    """Whether a guard takes the answer of the device's own statistics."""
    if guard == "hits":
        return bool(own["hits"] > fleets["hits"])
    return guard == "likelihood" and bool(own["nats"] < fleets["nats"])


def _paired(found: Sequence[Figures], other: Sequence[Figures], what: str) -> str:
    """Mean, deviation and worst of the differences, in points."""
    differences = [100 * (one[what] - two[what]) for one, two in zip(found, other, strict=True)]
    deviation = np.std(differences, ddof=1) if len(differences) > 1 else 0.0
    return f"{np.mean(differences):+.1f} ± {deviation:.1f} ({min(differences):+.1f})"


def _first(found: Sequence[Figures]) -> str:
    """J per row at the start."""
    values = [one["values"][0] for one in found if one.get("values")]
    return f"{np.mean(values):.3f}" if values else "–"


def _mean(found: Sequence[Figures], what: str, form: str) -> str:
    values = [one[what] for one in found if one.get(what) is not None]
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
    settings = [with_width(one, width) for width in given.widths for name in given.names for one in EVERY[name]]
    for setting in settings:
        for seed in given.seeds:
            known = read(given.results)
            if all((setting.name, seed, row) in known for row in rows_of(given)):
                continue
            result = measure(make_fleet(setting, seed), given.steps, given.lam)
            with given.results.open("a") as file:
                for row, figures in result.items():
                    file.write(json.dumps({"setting": setting.name, "seed": seed, "row": row, **figures}) + "\n")
        print_table(setting, given)
    print_devices(settings, given)


if __name__ == "__main__":
    main()
