"""Prints the JSON Schema of report.json, made from the types of its fields and the descriptions in their docstrings.

python tools/report_schema.py            prints docs/reference/report.schema.json
python tools/report_schema.py --write    writes it
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from fleetdistill_lab import FleetReport

FILE = Path(__file__).parents[1] / "docs" / "reference" / "report.schema.json"
ATTRIBUTE = re.compile(r"^    (\w[\w, ]*):(.*(?:\n     .*)*)", re.MULTILINE)
IN_JSON = {"None": "null", "True": "true", "False": "false"}


class Generator(GenerateJsonSchema):
    """Writes no titles of fields, which repeat their names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Returns whether a field gets a title."""
        return False


def report_schema() -> dict[str, Any]:
    """Returns the JSON Schema (draft 2020-12) of report.json, in which each field has a description."""
    schema = TypeAdapter(FleetReport).json_schema(mode="serialization", schema_generator=Generator)
    for part in (schema, *schema["$defs"].values()):
        describe(part)
    return {"$schema": Generator.schema_dialect, **schema}


def describe(part: dict[str, Any]) -> None:
    """Requires all fields of an object and no others, and divides its class's docstring among it and its fields."""
    part |= {"required": list(part["properties"]), "additionalProperties": False}
    text, _, attributes = part["description"].partition("\n\nAttributes:\n")
    part["description"] = in_json(text)
    for names, meaning in ATTRIBUTE.findall(attributes):
        for name in names.split(", "):
            part["properties"][name]["description"] = in_json(meaning)


def in_json(text: str) -> str:
    """Returns a docstring's text in one line, with JSON's names of values."""
    return re.sub(r"\b(None|True|False)\b", lambda name: IN_JSON[name[0]], " ".join(text.split()))


def main(arguments: Sequence[str]) -> None:
    """Prints or writes the schema."""
    text = json.dumps(report_schema(), indent=2) + "\n"
    if "--write" in arguments:
        FILE.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main(sys.argv[1:])
