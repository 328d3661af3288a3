"""The tables of compare.py: every run beside its controls; paired differences at equal rounds and at equal bytes."""

from __future__ import annotations

import statistics
from typing import Any, Literal

Headline = Literal["global", "c_per", "own"]
Found = dict[tuple[str, int], dict[str, Any]]
"""(run, seed) -> what was kept of it."""
ALONE, CONTROLS = "alone", ("fedavg", "local + proxy labels", "no correlation", "without dropping")
_NAMES = {"global": "global model", "c_per": "C-Per", "own": "own classes"}


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
    _print_differences(found, names, seeds, headline)


def _print_alone(rows: list[dict[str, Any]]) -> None:
    per = [(row["alone"] + row["alone_own"]) / 2 for row in rows]
    own, all_classes = ([row[figure] for row in rows] for figure in ("alone_own", "alone"))
    print(f"| alone | | {_text(all_classes)} | {_text(own)} | {_text(per)} | 0 | |")


def _rounds_shown(rows: list[dict[str, Any]]) -> list[int]:
    if not rows:
        return []
    last = min(row["rounds"] for row in rows)
    return sorted({one for one in (5, 10) if one < last} | {last})


def _print_row(name: str, rows: list[dict[str, Any]], at: int) -> None:
    figures = [_text([value for row in rows if (value := _figure(row, one, at)) is not None]) for one in _COLUMNS]
    bytes_so_far = statistics.mean(at * _bytes_a_round(row) for row in rows) / 1e3
    guards = sum(row["guards"] for row in rows) if at == rows[0]["rounds"] else ""
    print(f"| {name}, round {at} | {' | '.join(figures)} | {bytes_so_far:,.0f} | {guards} |")


_COLUMNS = ("global", "devices", "own", "c_per")


def _figure(row: dict[str, Any], figure: str, at: int) -> float | None:
    """A figure of a run after a round; None where it was not kept or there is none."""
    if figure == "c_per":
        generic, own = _figure(row, "devices", at), _figure(row, "own", at)
        return None if generic is None or own is None else (generic + own) / 2
    curve = row.get({"global": "global_curve", "devices": "fleet_curve", "own": "own_curve"}[figure])
    if curve:
        value: float | None = curve[at - 1]
        return value
    return row["fleet_own"] if figure == "own" and at == row["rounds"] else None


def _bytes_a_round(row: dict[str, Any]) -> float:
    total: float = row["bytes_up"] + row["bytes_down"]
    return total


def _print_differences(found: Found, names: list[str], seeds: list[int], headline: Headline) -> None:
    controls = [name for name in names if name.startswith(CONTROLS)]
    print(f"\n| {_NAMES[headline]} of a minus b, paired | at equal rounds | at equal bytes |")
    print("|---|---|---|")
    for name in (one for one in names if one not in controls):
        for control in controls:
            pairs = [(found[name, s], found[control, s]) for s in seeds if (name, s) in found and (control, s) in found]
            if pairs:
                print(f"| {name} - {control} | {_equal_rounds(pairs, headline)} | {_equal_bytes(pairs, headline)} |")
        _print_against_alone(name, found, seeds, headline)


def _print_against_alone(name: str, found: Found, seeds: list[int], headline: Headline) -> None:
    alone = {seed: row for (_, seed), row in found.items() if row["alone"] is not None}
    gains = []
    for seed in (one for one in seeds if one in alone and (name, one) in found):
        mine, own = found[name, seed], alone[seed]["alone_own"]
        base = {"own": own, "c_per": (alone[seed]["alone"] + own) / 2, "global": alone[seed]["alone"]}[headline]
        value = _figure(mine, headline, mine["rounds"])
        gains += [value - base] if value is not None else []
    if gains:
        print(f"| {name} - alone | {_text(gains, signed=True)} | |")


def _equal_rounds(pairs: list[tuple[dict[str, Any], dict[str, Any]]], headline: Headline) -> str:
    at = min(row["rounds"] for pair in pairs for row in pair)
    return f"{_gains(pairs, headline, at, at)}, round {at}"


def _equal_bytes(pairs: list[tuple[dict[str, Any], dict[str, Any]]], headline: Headline) -> str:
    """Both as far as they get with what the cheaper one sends and is sent in all its rounds."""
    a, b = pairs[0]
    budget = min(row["rounds"] * _bytes_a_round(row) for row in (a, b))
    rounds = [int(budget / _bytes_a_round(row) + 1e-9) for row in (a, b)]
    if min(rounds) < 1:
        return f"{['a', 'b'][rounds.index(min(rounds))]} has not had a round"
    return f"{_gains(pairs, headline, *rounds)}, rounds {rounds[0]} and {rounds[1]}"


def _gains(pairs: list[tuple[dict[str, Any], dict[str, Any]]], headline: Headline, at: int, control_at: int) -> str:
    found = [(_figure(a, headline, at), _figure(b, headline, control_at)) for a, b in pairs]
    return _text([a - b for a, b in found if a is not None and b is not None], signed=True) or "not kept"


def _text(values: list[float], *, signed: bool = False) -> str:
    if not values:
        return ""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    form = "+.1f" if signed else ".1f"
    each = ", ".join(format(100 * value, form) for value in values)
    return f"{100 * statistics.mean(values):{form}} ± {100 * deviation:.1f} ({each})"
