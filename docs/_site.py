"""What the site has besides docs/: the commands, from the code, the fields of report.json, from their schema, and files
of the repository that pages link to."""

from __future__ import annotations

import json
import os
import posixpath
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = (
    "benchmarks/RESULTS.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "LICENSE",
    "protos/README.md",
    "examples/*.*",
    "deploy/README.md",
)
COMMANDS = "<!-- commands -->"
FIELDS = "<!-- fields -->"
TYPES = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "null": "null",
}


def on_files(files: Files, config: Any) -> Files:
    """Adds the files of `OUTSIDE` under their path in the repository."""
    for path in (path for pattern in OUTSIDE for path in sorted(ROOT.glob(pattern))):
        name = path.relative_to(ROOT).as_posix()
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Puts in commands and fields; makes links between docs/ and the rest of the repository lead within the site."""
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, commands())
    if FIELDS in markdown:
        markdown = markdown.replace(FIELDS, fields())
    return re.sub(r"\]\(([^)\s:]+)\)", lambda link: f"]({within_site(link[1], page.file.src_uri)})", markdown)


def within_site(target: str, page: str) -> str:
    """A relative link as the site needs it, where docs/ is the root and everything else of the repository is in it."""
    inside = page.startswith(OUTSIDE[0].split("/")[0]) or page in OUTSIDE
    path, hash_sign, anchor = target.partition("#")
    if not path:
        return target
    in_repository = posixpath.normpath(posixpath.join(posixpath.dirname(page if inside else f"docs/{page}"), path))
    to = in_repository.removeprefix("docs/")
    return posixpath.relpath(to, posixpath.dirname(page) or ".") + hash_sign + anchor


def commands() -> str:
    """The reference of the command line by Typer, with the headings one level down."""
    command = [sys.executable, "-m", "typer", "fleetdistill_server.cli.app", "utils", "docs", "--name", "fleetdistill"]
    paths = [str(ROOT / "client_sdk"), str(ROOT / "server"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    made = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    return made.split("\n", 1)[1]  # the page has a title of its own


def fields() -> str:
    """The fields of report.json by object, from the JSON Schema; those of the same type and meaning are in one row."""
    schema = json.loads((ROOT / "docs/reference/report.schema.json").read_text(encoding="utf-8"))
    lines = []
    for name, part in {schema["title"]: schema, **schema["$defs"]}.items():
        lines += [f"## {name}", "", part["description"], "", "| field | type | meaning |", "|---|---|---|"]
        rows: dict[tuple[str, str], list[str]] = {}
        for field, one in part["properties"].items():
            rows.setdefault((type_of(one), one["description"]), []).append(f"`{field}`")
        lines += [f"| {', '.join(names)} | {kind} | {meaning} |" for (kind, meaning), names in rows.items()]
        lines.append("")
    return "\n".join(lines)


def type_of(one: dict[str, Any]) -> str:
    """A field's type, with links to the types of objects."""
    if "$ref" in one:
        name = one["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in one:
        return " or ".join(map(type_of, one["anyOf"]))
    if one.get("type") not in ("array", "object"):
        return TYPES.get(one.get("type", ""), "any")
    kind, content = ("list", one["items"]) if one["type"] == "array" else ("map", one["additionalProperties"])
    if not isinstance(content, dict):
        return f"{kind} of any"
    return f"{kind} of ({type_of(content)})" if "anyOf" in content else f"{kind} of {type_of(content)}"
