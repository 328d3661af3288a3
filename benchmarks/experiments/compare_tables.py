"""The tables of compare.py: every run beside its controls; paired differences at equal rounds and at equal bytes."""

from __future__ import annotations

import itertools
import statistics
from typing import Any, Literal

Headline = Literal["global", "devices", "c_per", "own"]
Row = dict[str, Any]
"""What was kept of a run; see `compare.figures`."""
Found = dict[tuple[str, int], Row]
"""(run, seed) -> what was kept of it."""
Pairs = list[tuple[Row, Row]]
CONTROLS = (
    "fedavg",
    "local + proxy labels",
    "no correlation",
    "without dropping",
    "server_beta=0",
)
_NAMES = {"global": "global model", "devices": "devices, all classes", "c_per": "C-Per", "own": "own classes"}
_COLUMNS = ("global", "devices", "own", "c_per")
_CURVES = {"global": "global_curve", "devices": "fleet_curve", "own": "own_curve", "c_per": "c_per_curve"}
_NEARLY = 1 + 1e-9
"""Bytes of older rows are a mean times rounds, and that is not exact."""


def print_tables(title: str, found: Found, names: list[str], headline: Headline) -> None:
    """Both tables of one setting; prints nothing where nothing was measured."""
    seeds = sorted({seed for _, seed in found})
    if not seeds:
        return
    print(f"\n{title}, seeds {seeds}: accuracy in %, mean ± deviation over seeds")
    print("| | global model | devices, all classes | own classes | C-Per | kB a device so far | guards |")
    print("|---|---|---|---|---|---|---|")
    _print_alone([row for row in found.values() if row["alone"] is not None])
    for name in names:
        rows = [found[name, seed] for seed in seeds if (name, seed) in found]
        for at in _rounds_shown(rows):
            _print_row(name, rows, at)
        _print_further(name, rows)
    _print_differences(found, names, seeds, headline)
    _print_bytes_to_fedavg(found, names, seeds)
    _print_what_older_rows_lack(list(found.values()))


def _print_alone(rows: list[Row]) -> None:
    cells = [_text([value for row in rows if (value := figure_alone(row, item)) is not None]) for item in _COLUMNS[1:]]
    print(f"| alone | | {' | '.join(cells)} | 0 | |")


def _rounds_shown(rows: list[Row]) -> list[int]:
    if not rows:
        return []
    last = min(row["rounds"] for row in rows)
    return sorted({item for item in (5, 10) if item < last} | {last})


def _print_row(name: str, rows: list[Row], at: int) -> None:
    figures = [_text([value for row in rows if (value := figure_at(row, item, at)) is not None]) for item in _COLUMNS]
    bytes_so_far = statistics.mean(bytes_curve(row)[at - 1] for row in rows) / 1e3
    guards = sum(row["guards"] for row in rows) if at == rows[0]["rounds"] else ""
    print(f"| {name}, round {at} | {' | '.join(figures)} | {bytes_so_far:,.0f} | {guards} |")


def _print_further(name: str, rows: list[Row]) -> None:
    """Second answers of the devices, which have figures of the end of a run only."""
    for answer in sorted({item for row in rows for item in row.get("further", {})}):
        means = [row["further"][answer] for row in rows if answer in row.get("further", {})]
        figures = [_text([mean[figure] for mean in means]) for figure in ("accuracy", "own_accuracy")]
        print(f"| {name}, its {answer} answer | | {' | '.join(figures)} | | | |")


# --- what a row says


def figure_at(row: Row, figure: str, at: int) -> float | None:
    """A figure of a run after a round; None where it was not kept or there is none."""
    curve = row.get(_CURVES[figure])
    if curve:
        value: float | None = curve[at - 1]
        return value
    if figure == "c_per":
        return _halves(figure_at(row, "devices", at), figure_at(row, "own", at))
    return row["fleet_own"] if figure == "own" and at == row["rounds"] else None


def figure_alone(row: Row, figure: str) -> float | None:
    """A figure of training alone, where this run was the one to have it; there is no global model."""
    own, all_classes = row["alone_own"], row["alone"]
    older = _halves(all_classes, own)
    result = {"own": own, "devices": all_classes, "global": all_classes, "c_per": row.get("alone_c_per", older)}
    value: float | None = result[figure]
    return value


def _halves(all_classes: float | None, own: float | None) -> float | None:
    """C-Per of older rows, which do not have the report's: C-Gen there is on all classes alike, as the test part is."""
    return None if all_classes is None or own is None else (all_classes + own) / 2


def bytes_curve(row: Row) -> list[float]:
    """Bytes of a device, up and down, until each round; of older rows the mean times the rounds."""
    known: list[float] | None = row.get("bytes_curve")
    each = row["bytes_up"] + row["bytes_down"]
    return known or [each * number for number in range(1, row["rounds"] + 1)]


def _print_what_older_rows_lack(rows: list[Row]) -> None:
    for name, curve, instead in (
        ("C-Per", "c_per_curve", "(devices on all classes + own classes) / 2, not the report's"),
        ("kB", "bytes_curve", "the run's mean times the rounds, not what was counted"),
    ):
        if older := sum(curve not in row for row in rows):
            print(f"{name} of {older} of {len(rows)} runs, which are older, is {instead}")


# --- differences


def _print_differences(found: Found, names: list[str], seeds: list[int], headline: Headline) -> None:
    controls = [name for name in names if name.startswith(CONTROLS)]
    print(f"\n| {_NAMES[headline]} of a minus b, paired | at equal rounds | at equal bytes |")
    print("|---|---|---|")
    for name in (name for name in names if name not in controls):
        for control in controls:
            pairs = [(found[name, s], found[control, s]) for s in seeds if (name, s) in found and (control, s) in found]
            if pairs:
                print(f"| {name} - {control} | {_equal_rounds(pairs, headline)} | {equal_bytes(pairs, headline)} |")
        _print_against_alone(name, found, seeds, headline)


def _print_bytes_to_fedavg(found: Found, names: list[str], seeds: list[int]) -> None:
    """What others need until their devices are where FedAvg's models end, on all classes: a share of its bytes."""
    if all("fedavg" not in name for name in names) or not any("means only" in name for name in names):
        return
    print("\n| bytes to FedAvg's accuracy after its last round, as a share of its bytes | devices | global model |")
    print("|---|---|---|")
    for name, control in itertools.product((name for name in names if not name.startswith(CONTROLS)), names):
        pairs = [(found[name, s], found[control, s]) for s in seeds if (name, s) in found and (control, s) in found]
        if control.startswith("fedavg") and pairs:
            cells = [", ".join(_share(a, b, figure) for a, b in pairs) for figure in ("devices", "global")]
            print(f"| {name} to {control} | {' | '.join(cells)} |")


def _share(mine: Row, control: Row, figure: str) -> str:
    goal = figure_at(control, figure, control["rounds"])
    reached = (number for number, value in enumerate(mine["fleet_curve"]) if goal is not None and value >= goal)
    first = next(reached, None)
    return "never" if first is None else f"{bytes_curve(mine)[first] / bytes_curve(control)[-1]:.3f}"


def _print_against_alone(name: str, found: Found, seeds: list[int], headline: Headline) -> None:
    alone = {seed: row for (_, seed), row in found.items() if row["alone"] is not None}
    gains = []
    for seed in (seed for seed in seeds if seed in alone and (name, seed) in found):
        mine = found[name, seed]
        value, base = figure_at(mine, headline, mine["rounds"]), figure_alone(alone[seed], headline)
        gains += [value - base] if value is not None and base is not None else []
    if gains:
        print(f"| {name} - alone | {_text(gains, signed=True)} | |")


def _equal_rounds(pairs: Pairs, headline: Headline) -> str:
    at = min(row["rounds"] for pair in pairs for row in pair)
    return f"{_gains(pairs, headline, [(at, at)] * len(pairs))}, round {at}"


def rounds_at_equal_bytes(a: Row, b: Row) -> tuple[int, int]:
    """How far each of a pair gets with what the cheaper one sends and is sent in all its rounds."""
    curves = bytes_curve(a), bytes_curve(b)
    budget = min(curve[-1] for curve in curves) * _NEARLY
    first, second = (sum(so_far <= budget for so_far in curve) for curve in curves)
    return first, second


def equal_bytes(pairs: Pairs, headline: Headline) -> str:
    rounds = [rounds_at_equal_bytes(a, b) for a, b in pairs]
    for name, each in zip("ab", zip(*rounds, strict=True), strict=True):
        if min(each) < 1:
            return f"{name} has not had a round"
    shown = " and ".join(_one_or_all(each) for each in zip(*rounds, strict=True))
    return f"{_gains(pairs, headline, rounds)}, rounds {shown}"


def _one_or_all(rounds: tuple[int, ...]) -> str:
    return str(rounds[0]) if len(set(rounds)) == 1 else "/".join(map(str, rounds))


def _gains(pairs: Pairs, headline: Headline, rounds: list[tuple[int, int]]) -> str:
    result = [
        (figure_at(a, headline, at), figure_at(b, headline, control_at))
        for (a, b), (at, control_at) in zip(pairs, rounds, strict=True)
    ]
    return _text([a - b for a, b in result if a is not None and b is not None], signed=True) or "not kept"


def _text(values: list[float], *, signed: bool = False) -> str:
    if not values:
        return ""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    form = "+.1f" if signed else ".1f"
    each = ", ".join(format(100 * value, form) for value in values)
    return f"{100 * statistics.mean(values):{form}} ± {100 * deviation:.1f} ({each})"
