"""The figures of the page on privacy are those that were measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fleetdistill_console.commands.methods import audit_figures, linked, worst

PAGE = (Path(__file__).parents[2] / "docs/explanation/privacy.md").read_text(encoding="utf-8")
FORMS = audit_figures()["forms"]


def rows_below(heading: str) -> list[list[str]]:
    """The cells of the table whose first column is `method`, below a heading, without its head."""
    text = PAGE[PAGE.index(heading) :]
    table = re.search(r"^\| method \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert table, heading
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1].splitlines()]


def test_the_table_has_the_strongest_attack_of_every_form() -> None:
    rows = rows_below("## What a curious server learns")
    assert [row[0] for row in rows] == list(FORMS)
    for form, attack, *numbers, classes in rows:
        result = worst(form)
        assert classes == ("–" if FORMS[form]["classes"] is None else f"{FORMS[form]['classes']:.2f}")
        if result is None:
            assert (attack, set(numbers)) == ("none", {""})
            continue
        low, high = result["interval"]
        expected = [
            f"{result['linked']:.3f}",
            f"{low:.3f} to {high:.3f}",
            f"{result['auc']:.3f}",
            f"{result['tpr1']:.3f}",
        ]
        assert (attack, numbers) == (f"{result['part']}: {result['attack']}", expected)


def test_the_table_of_pictures_has_measured_figures() -> None:
    measured = {
        (form, item["source"]): [f"{item['ssim']:.2f}", f"{item['psnr']:.1f}", f"{item['reidentified']:.2f}"]
        for form, found in FORMS.items()
        for item in found["pictures"]
    }
    rows = rows_below("### Images from messages")
    assert rows
    for form, source, *numbers in rows:
        assert numbers == measured[form, source]


def test_the_readme_has_the_same_figures() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    section = readme[readme.index("## What leaves a device") :]
    forms, _, figures_of = (
        line.strip("| ").split(" | ") for line in re.findall(r"^\|.*\|$", section, re.MULTILINE)[:3]
    )
    for form, figure in zip(forms, figures_of, strict=True):
        result = worst(form)
        assert figure == ("none" if result is None else f"{result['linked']:.3f}"), form


def test_an_apps_own_method_is_not_measured() -> None:
    assert linked("an app's own") == "not measured"
    assert linked("cdkt") == "none"
    with pytest.raises(KeyError):
        worst("an app's own")
