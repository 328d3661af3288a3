"""`fleetdistill methods`: a comparison of the methods, computed from their server halves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fleetdistill.errors import ConfigurationError
from fleetdistill.methods import config_class, known_methods
from fleetdistill_server.methods import server_class
from fleetdistill_server.methods.audit_figures import NOT_MEASURED, linked
from fleetdistill_server.methods.traffic import (
    DOWN,
    KNOWLEDGE_TYPES,
    UP,
    Exchange,
    KnowledgeType,
    Sizes,
    all_exchanges,
    columns_of,
    exchange_formula,
    is_over_early,
    mean_round_bytes,
    round_bytes,
    usual_exchanges,
)
from fleetdistill_server.store.database import Row
from fleetdistill_server.views.runs import View
from fleetdistill_server.views.units import readable_bytes

if TYPE_CHECKING:
    from fleetdistill_server.engine.run_sizes import RunSizes

LABELS = "labels"
ROUNDS = 30
"""Default number of rounds for the byte counts; the default of run.toml."""

_ABOUT_SAMPLES = ("features", "logits", LABELS)


@dataclass(frozen=True)
class MethodsView(View):
    """The rows of `methods` with the sizes that the byte counts assume."""

    def tables(self) -> list[Table | str]:
        """Returns two tables, one on needs and one on costs, and the assumptions behind the figures."""
        rows = self.lists["methods"]
        what = _table("methods and their needs", [_what(row) for row in rows], right=())
        costs = _table("cost of a round for one device", [_costs(row) for row in rows], right=("linked", "up", "down"))
        chosen = [f"Recommended: {row['method']}, {row['recommended']}." for row in rows if row["recommended"]]
        return [what, costs, _assumed(self.facts), *chosen]


def methods(sizes: Sizes, knowledge_type: str, rounds: int = ROUNDS, run: RunSizes | None = None) -> MethodsView:
    """Returns a table of all methods with their default settings and the bytes of their rounds.

    Args:
        sizes: Model and data of one device.
        knowledge_type: float16, float32 or uint8.
        rounds: Rounds of the run, at least 1; bytes are the mean over them for methods whose rounds differ.
        run: A run whose method is shown with its own settings and sizes.

    Raises:
        ConfigurationError: `knowledge_type` is unknown, or `rounds` is below 1.
    """
    if rounds < 1:
        raise ConfigurationError(f"rounds is {rounds}, must be at least 1")
    known = _checked(knowledge_type)
    rows = [
        method_row(name, run.of_method(sizes), known, rounds, run.config)
        if run is not None and name == run.method
        else method_row(name, sizes, known, rounds)
        for name in known_methods()
    ]
    facts: dict[str, Any] = {"knowledge_type": knowledge_type, "rounds": rounds, "sizes": sizes.numbers()}
    if run is not None:
        facts["settings_of"] = run.method
    return MethodsView({"methods": rows}, facts)


def method_row(name: str, sizes: Sizes, knowledge_type: KnowledgeType, rounds: int = ROUNDS, config: Any = None) -> Row:
    """Returns one method as plain data, with default settings if `config` is None.

    Exchanges and bytes are per round, or for the whole run if the method ends early.
    """
    usual = config_class(name)().for_classes(sizes.classes)
    config = usual if config is None else config.for_classes(sizes.classes)
    half = server_class(name, config)
    exchanges, needs = half.exchanges(config, sizes), half.needs(config)
    columns = columns_of(exchanges)
    once = is_over_early(exchanges)
    counted = all_exchanges(exchanges) if once else usual_exchanges(exchanges)
    cost = round_bytes(counted, knowledge_type) if once else mean_round_bytes(exchanges, knowledge_type, rounds)
    return {
        "method": name,
        "summary": half.summary,
        "leaves_the_device": _leaves(exchanges),
        "columns": columns,
        "labels_leave": LABELS in columns,
        "linked": linked(name) if config == usual else NOT_MEASURED,
        "models": "same" if needs.same_architecture else "different",
        "same_extractor": needs.same_extractor,
        "proxy_set": needs.proxy_set,
        "exchanges": sum(one.times for one in counted),
        "exchanges_formula": exchange_formula(exchanges),
        "bytes_up": cost[UP],
        "bytes_down": cost[DOWN],
        "recommended": half.recommended,
    }


def _leaves(exchanges: Sequence[Exchange]) -> str:
    about = ", ".join(column for column in columns_of(exchanges) if column in _ABOUT_SAMPLES)
    parts = [part for one in exchanges if one.times for part in one.up.values() if part.sent]
    return ", ".join(dict.fromkeys(part.kind.description.format(columns=about) for part in parts))


def _checked(knowledge_type: str) -> KnowledgeType:
    for known in KNOWLEDGE_TYPES:
        if known == knowledge_type:
            return known
    raise ConfigurationError(f"--knowledge-type is {knowledge_type!r}, expected one of {', '.join(KNOWLEDGE_TYPES)}")


def _what(row: Row) -> dict[str, str]:
    models = f"{row['models']}, one extractor" if row["same_extractor"] else row["models"]
    return {
        "method": row["method"],
        "summary": row["summary"],
        "models": models,
        "proxy": "yes" if row["proxy_set"] else "no",
    }


def _costs(row: Row) -> dict[str, str]:
    count = str(row["exchanges"])
    formula = row["exchanges_formula"]
    return {
        "method": row["method"],
        "leaves the device": row["leaves_the_device"],
        "linked": row["linked"] if isinstance(row["linked"], str) else f"{row['linked']:.3f}",
        "exchanges": formula if formula in (count, f"{count} in all") else f"{count} = {formula}",
        "up": readable_bytes(row["bytes_up"]),
        "down": readable_bytes(row["bytes_down"]),
    }


def _assumed(facts: Mapping[str, Any]) -> str:
    sizes = {"rounds": facts["rounds"]}
    sizes |= {name: value for name, value in facts["sizes"].items() if value is not None}
    assumed = [f"{name.replace('_', ' ')} {_number(value)}" for name, value in sizes.items() if _number(value) != "0"]
    own = f"{facts['settings_of']} has the settings and sizes of its run.toml.\n" if "settings_of" in facts else ""
    return f"Assumes {facts['knowledge_type']} and, per device: {', '.join(assumed)}.\n{own}{_LEFT_OUT}"


_LEFT_OUT = (
    'Default settings. Figures are for one round, or the mean over a run whose rounds differ; "in all" means for the '
    "whole run. Not included: payload headers (about 0.5 kB each), the first round's initial weights or proxy set, "
    "the end result, and figures on test data. linked: share of rows that a curious server tells from 999 others, by "
    "the strongest attack of `fleetdistill audit` on MNIST 8x8 with default settings (chance 0.001); none: no part can "
    "be asked about a row; not measured: run `fleetdistill audit`. See docs/reference/methods/index.md."
)


def _number(size: int | Mapping[str, int]) -> str:
    if isinstance(size, int):
        return f"{size:,}"
    buffers = f" + {size['buffer_bytes']:,} bytes" if size["buffer_bytes"] else ""
    return f"{size['parameters']:,}{buffers}"


def _table(title: str, rows: Sequence[Mapping[str, str]], right: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in rows[0]:
        table.add_column(name, justify="right" if name in right else "left")
    for row in rows:
        table.add_row(*row.values())
    return table
