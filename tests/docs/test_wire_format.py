"""The table of steps in docs/reference/wire-format.md is that of the methods' halves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.outside import fresh_process

from fleetdistill.methods import METHODS, example_config
from fleetdistill_server.methods import server_class
from fleetdistill_server.methods.traffic import Exchange, Sizes

PAGE = (Path(__file__).parents[2] / "docs/reference/wire-format.md").read_text(encoding="utf-8")
FORMS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "classstats_secure": [("classstats_secure", {"keys": "roster"})],
    "classstats": [("classstats", {"refine": "gradients"})],
    "classstats_summed": [("classstats_summed", {"keys": "roster", "refine": "gradients"})],
    "dafkd": [
        ("dafkd", {}),
        ("dafkd", {"discriminator_location": "device", "sync": "exact", "ensemble_space": "probs"}),
    ],
}
"""Names on the page and settings that select its further steps."""


def steps_on_the_page() -> dict[tuple[str, str], set[tuple[str, str]]]:
    """Parts of the answer, name and kind, by method and step."""
    section = PAGE.split("## Parts of each step\n")[1].split("\n## ")[0]
    result: dict[tuple[str, str], set[tuple[str, str]]] = {}
    method = ""
    for line in re.findall(r"^\| (.*) \|$", section, re.MULTILINE):
        first, step, _, answer = (cell.strip() for cell in f"{line} ".split("|"))
        method = re.sub(r"\[(.*)\]\(.*\)", r"\1", first) or method
        if step.startswith("`"):
            result[method, step.strip("`")] = set(re.findall(r"`(\w+)`: (\w+)", answer))
    return result


def all_exchanges() -> Iterator[tuple[str, Exchange]]:
    for name in METHODS:
        for shown, settings in FORMS.get(name, [(name, {})]):
            config = example_config(name, **settings).for_classes(10)
            for exchange in server_class(name).exchanges(config, Sizes()):
                yield shown, exchange


def test_every_answer_has_the_parts_that_the_page_says() -> None:
    page, result = steps_on_the_page(), dict[tuple[str, str], set[tuple[str, str]]]()
    with fresh_process():
        exchanges = list(all_exchanges())
    for method, exchange in exchanges:
        parts = {(name, part.kind.wire_name) for name, part in exchange.up.items()}
        result.setdefault((method, exchange.step), set()).update(parts)
    deliveries = {key: parts for key, parts in page.items() if key[1] == "deliver"}
    assert {key: parts for key, parts in page.items() if key not in deliveries} == result


@pytest.mark.parametrize("method", ["dafkd", "fedavg", "feddkd"])
def test_a_final_model_is_delivered_without_an_answer_part(method: str) -> None:
    assert steps_on_the_page()[method, "deliver"] == set()
