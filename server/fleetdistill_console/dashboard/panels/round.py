"""The latest round, open or closed: the number of devices in each state, and a timeline of those furthest behind."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from nicegui import ui

from fleetdistill_console.dashboard.board import Board
from fleetdistill_console.dashboard.layout import panel
from fleetdistill_console.dashboard.readers import round_under_way
from fleetdistill_console.dashboard.units import duration, natural
from fleetdistill_server.store.states import RoundStatus
from fleetdistill_server.views.runs import TableRow

STATES = {
    "asked": ("var(--fd-wait)", "asked"),
    "downloading": ("var(--fd-6)", "downloading"),
    "training": ("var(--fd-1)", "training"),
    "uploading": ("var(--fd-4)", "uploading"),
    "acknowledged": ("var(--fd-good)", "acknowledged"),
    "late": ("var(--fd-bad)", "late"),
    "declined": ("var(--fd-warn)", "declined"),
    "left": ("var(--fd-warn)", "left"),
    "refused": ("var(--fd-bad)", "refused"),
    "out": ("var(--fd-bad)", "out"),
}
"""Colour and name of each state of an ask, in the order of a round."""
MAX_DEVICES = 25
"""Largest number of devices in the timeline."""
_PHASES = (
    ("asked", "asked_at"),
    ("downloading", "download_at"),
    ("training", "downloaded_at"),
    ("uploading", "upload_at"),
)
"""States that take time, and the column with the time at which each begins."""
_DRAWN = (*(state for state, _ in _PHASES), "acknowledged")
"""States that have a colour in the timeline."""


class RoundPanel:
    """The open round, or the newest one if none is open."""

    def __init__(self, board: Board, run: str) -> None:
        self._board, self._run = board, run
        self._shown: object = None
        with panel("Latest round"):
            self._sentence = ui.label("Loading …").props("role=status aria-live=off")
            self._bar = ui.element("div").classes("fd-states").props("role=list")
            self._note = ui.label().classes("fd-muted")
            self._chart = ui.echart(_options(), renderer="svg").classes("fd-chart").props("role=img")
            self._chart.set_visibility(False)

    def update(self) -> None:
        """Shows the newest states."""
        view = self._board.feed.look(round_under_way(self._run)).value
        if view is None:
            return
        asks = newest_asks(view.lists["asks"])
        facts = view.facts
        now = latest_time(asks, facts)
        if (asks, facts, now) == self._shown:
            return
        self._shown = asks, facts, now
        self._sentence.text = sentence(asks, facts, now)
        self._show_counts(Counter(ask["state"] for ask in asks))
        self._show_timeline(furthest_behind(asks), len(asks), facts, now)

    def _show_counts(self, counts: Counter[str]) -> None:
        self._bar.clear()
        with self._bar:
            for state, (colour, name) in STATES.items():
                if counts[state]:
                    with (
                        ui.element("div")
                        .props("role=listitem")
                        .classes("fd-state")
                        .style(f"flex-grow: {counts[state]}")
                    ):
                        ui.element("span").classes("fd-swatch").style(f"background: {colour}")
                        ui.label(f"{counts[state]:,} {name}")

    def _show_timeline(self, asks: Sequence[TableRow], all_asks: int, facts: TableRow, now: float) -> None:
        self._chart.set_visibility(bool(asks))
        self._note.set_visibility(len(asks) < all_asks)
        self._note.text = f"Timeline of the {len(asks)} devices that are furthest behind, of {all_asks:,}."
        if asks:
            self._chart.style(f"height: {4.5 + 1.35 * len(asks):.1f}rem")
            self._chart.props["aria-label"] = (
                f"Timeline of round {facts['round']}: states of {len(asks)} devices by time"
            )
            self._chart.options["yAxis"]["data"] = [ask["device"] for ask in asks]
            self._chart.options["series"] = bars(asks, facts["started_at"], now)
            self._chart.update()


def newest_asks(asks: Sequence[TableRow]) -> list[TableRow]:
    """Returns each device's newest ask, because a method may ask several times in a round."""
    return list({ask["device"]: ask for ask in asks}.values())


def furthest_behind(asks: Sequence[TableRow]) -> list[TableRow]:
    """Returns the devices for the timeline: those without a receipt first, then those that were acknowledged last."""
    order = {state: number for number, state in enumerate(STATES)}
    behind = sorted(
        asks, key=lambda ask: (order[ask["state"]] >= order["acknowledged"], -(ask["acknowledged_at"] or 0))
    )
    return sorted(behind[:MAX_DEVICES], key=lambda ask: natural(ask["device"]), reverse=True)


def latest_time(asks: Sequence[TableRow], facts: TableRow) -> float:
    """Returns where open bars end: now, or the end of the round; never before anything that has happened."""
    known = [ask[name] for ask in asks for _, name in _PHASES if ask[name] is not None]
    known += [ask["acknowledged_at"] for ask in asks if ask["acknowledged_at"] is not None]
    now = facts["ended_at"] or (round(time.time()) if facts["status"] == RoundStatus.OPEN else 0)
    return float(max([now, facts["started_at"] or 0, *known]))


def sentence(asks: Sequence[TableRow], facts: TableRow, now: float) -> str:
    """Returns the state of the round in words."""
    if facts["round"] is None:
        return "No round has begun. A round begins once enough devices are present."
    done = sum(ask["state"] == "acknowledged" for ask in asks)
    text = f"Round {facts['round']} is {facts['status']}: {done:,} of {len(asks):,} devices acknowledged"
    took = duration(now - facts["started_at"])
    if facts["status"] != RoundStatus.OPEN:
        return f"{text}, in {took}."
    deadlines = [ask["deadline_at"] for ask in asks if ask["deadline_at"] is not None]
    text = f"{text}, {took} since its beginning"
    if not deadlines or done == len(asks):
        return f"{text}."
    left = duration(max(max(deadlines) - (facts["paused_at"] or now), 0))
    return f"{text}, deadline in {left}{' of work, once it is started again' if facts['paused_at'] else ''}."


def phases(ask: TableRow, now: float) -> dict[str, tuple[float, float]]:
    """Returns beginning and end of each state of an ask that took time, in seconds since 1970.

    An acknowledged ask whose states were too short to be noted has one bar from the ask to its receipt.
    """
    ended = ask["acknowledged_at"] or (ask["deadline_at"] if ask["state"] == "late" else now)
    begun = [(state, ask[name]) for state, name in _PHASES if ask[name] is not None]
    if ask["state"] == "acknowledged" and len(begun) == 1:
        begun = [("acknowledged", begun[0][1])]
    ends = [at for _, at in begun[1:]] + [ended]
    return {state: (at, max(min(end, now), at)) for (state, at), end in zip(begun, ends, strict=True)}


def bars(asks: Sequence[TableRow], start: float, now: float) -> list[dict[str, Any]]:
    """Returns stacked bars in seconds: an invisible one up to the ask, then one for each state."""
    spans = [phases(ask, now) for ask in asks]
    offsets = [min((begin for begin, _ in span.values()), default=now) - start for span in spans]
    series = [_bar("", "transparent", [round(max(offset, 0), 2) for offset in offsets])]
    for state in _DRAWN:
        colour, name = STATES[state]
        lengths = [round(span[state][1] - span[state][0], 2) if state in span else 0 for span in spans]
        series.append(_bar(name, colour, lengths))
    series[-1]["label"] = {"show": True, "position": "right", "color": "var(--fd-text)", ":formatter": _ENDS}
    series[-1]["data"] = [
        {"value": one, "state": STATES[ask["state"]][1]} for one, ask in zip(series[-1]["data"], asks, strict=True)
    ]
    return series


_ENDS = "item => item.data.state"


def _bar(name: str, colour: str, lengths: list[float]) -> dict[str, Any]:
    look = {"itemStyle": {"color": colour}, "barWidth": "62%", "emphasis": {"disabled": True}}
    return {"type": "bar", "stack": "states", "name": name, "data": lengths, "silent": not name, **look}


def _options() -> dict[str, Any]:
    text = {"color": "var(--fd-muted)"}
    return {
        "animation": False,
        "grid": {"left": 8, "right": 110, "top": 34, "bottom": 30, "containLabel": True},
        "legend": {
            "type": "scroll",  # on one line, also in a narrow window
            "top": 0,
            "left": 0,
            "icon": "roundRect",
            "data": [STATES[state][1] for state in _DRAWN],
            "textStyle": {"color": "var(--fd-text)"},
        },
        "tooltip": {
            "trigger": "item",
            "confine": True,
            "backgroundColor": "var(--fd-panel)",
            "borderColor": "var(--fd-line)",
            "textStyle": {"color": "var(--fd-text)"},
            ":valueFormatter": "value => (+value).toFixed(1) + ' s'",
        },
        "xAxis": {
            "type": "value",
            "name": "seconds since the round began",
            "nameLocation": "middle",
            "nameGap": 26,
            "nameTextStyle": text,
            "axisLabel": text,
            "splitLine": {"lineStyle": {"color": "var(--fd-line)"}},
        },
        "yAxis": {
            "type": "category",
            "data": [],
            "axisLabel": {"color": "var(--fd-text)", "width": 170, "overflow": "truncate"},
            "axisLine": {"lineStyle": {"color": "var(--fd-line)"}},
            "axisTick": {"show": False},
        },
        "series": [],
    }
