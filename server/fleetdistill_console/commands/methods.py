"""`fleetdistill methods`: a comparison of the methods, computed from their server halves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import NamedTensors, Weights
from fleetdistill.methods import example_config, known_methods
from fleetdistill.methods.outside import import_modules
from fleetdistill_console.tables import show
from fleetdistill_server.cli.options import ImportOption, JsonOption, report_errors
from fleetdistill_server.methods import server_class
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
    tensor_columns,
    usual_exchanges,
)
from fleetdistill_server.texts import readable_bytes
from fleetdistill_server.views.runs import TableRow, View

if TYPE_CHECKING:
    from fleetdistill_server.engine.run_sizes import RunSizes

__all__ = ["NOT_MEASURED", "linked"]

LABELS = "labels"
ROUNDS = 30
"""Default number of rounds for the byte counts; the default of run.toml."""
_ABOUT_SAMPLES = ("features", "logits", LABELS)
_SIZES = Sizes()


@report_errors
def _sizes_of_run(context: typer.Context, config: Path | None) -> Path | None:
    """Sets the default sizes of `methods` from a run.toml."""
    if config is None:
        return None
    from fleetdistill_server.config.run_config import load_run_config
    from fleetdistill_server.engine.run_sizes import measure_run

    loaded = load_run_config(config)
    context.obj = measure_run(loaded)
    sizes = context.obj.fleet
    context.default_map = {
        **{name: getattr(sizes, name) for name in ("features", "channels", "classes", "proxy_samples", "embedding")},
        "parameters": sizes.model.parameters,
        "buffer_bytes": sizes.model.buffer_bytes,
        "rounds": loaded.run.rounds or None,
        "knowledge_type": loaded.contract.knowledge_type,
    }
    return config


@report_errors
def methods(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Argument(
            help="Path of a run.toml. Its models and data set the default sizes; its settings apply to its method.",
            is_eager=True,
            callback=_sizes_of_run,
        ),
    ] = None,
    samples: Annotated[int, typer.Option(help="Samples per device.")] = _SIZES.samples,
    features: Annotated[
        int, typer.Option(help="Features per sample: at the extractor's output, or FedD2S's first layer.")
    ] = _SIZES.features,
    classes: Annotated[int, typer.Option(help="Number of classes.")] = _SIZES.classes,
    parameters: Annotated[int, typer.Option(help="Trainable parameters of the model.")] = _SIZES.model.parameters,
    buffer_bytes: Annotated[int, typer.Option(help="Size of the model's batch-norm statistics in bytes.")] = 0,
    proxy_samples: Annotated[int, typer.Option(help="Samples in the proxy set.")] = _SIZES.proxy_samples,
    embedding: Annotated[int, typer.Option(help="Inputs of the model's last layer.")] = _SIZES.embedding,
    rounds: Annotated[int, typer.Option(help="Rounds of the run, for methods whose rounds differ.")] = 30,
    generator_parameters: Annotated[
        int, typer.Option(help="Trainable parameters of DaFKD's generator.")
    ] = _SIZES.generator.parameters,
    channels: Annotated[
        int | None,
        typer.Option(help="Channels of the features, each with its own uint8 scale; default: one per feature."),
    ] = None,
    layer_features: Annotated[
        int | None, typer.Option(help="Features per sample at FedD2S's distillation layer; default: the last layer.")
    ] = None,
    layer_channels: Annotated[
        int | None, typer.Option(help="Channels at FedD2S's distillation layer; default: one per feature.")
    ] = None,
    head_parameters: Annotated[int, typer.Option(help="Trainable parameters above FedD2S's distillation layer.")] = 0,
    knowledge_type: Annotated[
        str, typer.Option(help="Type of features and logits: float16, float32 or uint8.")
    ] = "float16",
    import_: ImportOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compares the methods by needs, data sent and bytes. Example: fleetdistill methods run.toml --samples 500"""
    import_modules(import_ or (), "--import")

    sizes = Sizes(
        samples=samples,
        features=features,
        classes=classes,
        model=Weights(parameters, buffer_bytes),
        proxy_samples=proxy_samples,
        embedding=embedding,
        generator=Weights(generator_parameters),
        channels=channels,
        layer_features=layer_features,
        layer_channels=layer_channels,
        head=Weights(head_parameters),
    )
    show(compare_methods(sizes, knowledge_type, rounds, context.obj), as_json, method_tables)


def method_tables(view: View) -> list[Table | str]:
    """Returns two tables, one on needs and one on costs, and the assumptions behind the figures."""
    rows = view.lists["methods"]
    what = _table("methods and their needs", [_what(row) for row in rows], right=())
    costs = _table("cost of a round for one device", [_costs(row) for row in rows], right=("linked", "up", "down"))
    chosen = [f"Recommended: {row['method']}, {row['recommended']}." for row in rows if row["recommended"]]
    return [what, costs, _assume(view.facts), *chosen]


def compare_methods(sizes: Sizes, knowledge_type: str, rounds: int = ROUNDS, run: RunSizes | None = None) -> View:
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
    known = _check(knowledge_type)
    rows = [
        method_row(name, run.of_method(sizes), known, rounds, run.config)
        if run is not None and name == run.method
        else method_row(name, sizes, known, rounds)
        for name in known_methods()
    ]
    facts: dict[str, Any] = {"knowledge_type": knowledge_type, "rounds": rounds, "sizes": sizes.numbers()}
    if run is not None:
        facts["settings_of"] = run.method
    return View({"methods": rows}, facts)


def method_row(
    name: str, sizes: Sizes, knowledge_type: KnowledgeType, rounds: int = ROUNDS, config: Any = None
) -> TableRow:
    """Returns one method as plain data, with default settings if `config` is None.

    Exchanges and bytes are per round, or for the whole run if the method ends early.
    """
    usual = example_config(name).for_classes(sizes.classes)
    config = usual if config is None else config.for_classes(sizes.classes)
    half = server_class(name)
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
        "server_proxy_set": needs.server_proxy_set,
        "exchanges": sum(item.times for item in counted),
        "exchanges_formula": exchange_formula(exchanges),
        "bytes_up": cost[UP],
        "bytes_down": cost[DOWN],
        "recommended": half.recommended,
    }


def _leaves(exchanges: Sequence[Exchange]) -> str:
    about = ", ".join(column for column in columns_of(exchanges) if column in _ABOUT_SAMPLES)
    parts = [part for exchange in exchanges if exchange.times for part in exchange.up.values() if part.sent]
    tensors = f" ({', '.join(tensor_columns(exchanges))})"  # only their schema says what they contain
    words = {part.kind: part.kind.description.format(columns=about) for part in parts}
    return ", ".join(dict.fromkeys(text + tensors * (kind is NamedTensors) for kind, text in words.items()))


def _check(knowledge_type: str) -> KnowledgeType:
    for known in KNOWLEDGE_TYPES:
        if known == knowledge_type:
            return known
    raise ConfigurationError(f"--knowledge-type is {knowledge_type!r}, expected one of {', '.join(KNOWLEDGE_TYPES)}")


def _what(row: TableRow) -> dict[str, str]:
    models = f"{row['models']}, one extractor" if row["same_extractor"] else row["models"]
    return {
        "method": row["method"],
        "summary": row["summary"],
        "models": models,
        "proxy": "yes" if row["proxy_set"] else "server" if row["server_proxy_set"] else "no",
    }


def _costs(row: TableRow) -> dict[str, str]:
    count = str(row["exchanges"])
    formula = row["exchanges_formula"]
    return {
        "method": row["method"],
        "leaves the device": row["leaves_the_device"],
        "linked": _linked(row["linked"]),
        "exchanges": formula if formula in (count, f"{count} in all") else f"{count} = {formula}",
        "up": readable_bytes(row["bytes_up"]),
        "down": readable_bytes(row["bytes_down"]),
    }


def _linked(share: float | str) -> str:
    if isinstance(share, float):
        return f"{share:.3f}"
    return "-" if share == NOT_MEASURED else share


def _assume(facts: Mapping[str, Any]) -> str:
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
    "be asked about a row; -: not measured, run `fleetdistill audit`. See docs/reference/methods/index.md."
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


# --- Measured figures of the methods' audits; benchmarks/experiments/audit_methods.py writes the JSON file.

NOT_MEASURED = "not measured"
AUDIT_FILE = Path(__file__).with_name("audit_figures.json")


@cache
def audit_figures() -> Mapping[str, Any]:
    """Returns the file: data sets, seeds, and results by form, which is a method's name or a name with settings."""
    loaded: Mapping[str, Any] = json.loads(AUDIT_FILE.read_text(encoding="utf-8"))
    return loaded


def worst(form: str) -> Mapping[str, Any] | None:
    """Returns the attack on a form with the largest `linked`; None if nothing can be tested for single rows.

    Raises:
        KeyError: The form was not measured.
    """
    attacks = [item for item in audit_figures()["forms"][form]["attacks"] if item["attack"] is not None]
    return max(attacks, key=lambda one: (one["linked"], one["auc"]), default=None)


def linked(method: str) -> float | str:
    """Returns the largest `linked` of a method with its defaults; `none` if nothing can be tested for single rows.

    For a method that is not in the file, such as an app's own, returns `NOT_MEASURED`.
    """
    if method not in audit_figures()["forms"]:
        return NOT_MEASURED
    result = worst(method)
    return "none" if result is None else float(result["linked"])
