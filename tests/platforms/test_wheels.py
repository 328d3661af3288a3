"""The table of `make wheels`, without an index."""

from __future__ import annotations

import pytest
from platforms import wheels
from platforms.wheels import BASE, SYSTEMS, Resolved, as_table, extras, reason, reasons, uv_command, versions

FOUND = {
    ("light", "Linux arm64", "3.11"): Resolved({"numpy": "2.4.6"}),
    ("light", "Linux arm64", "3.13"): Resolved({"numpy": "2.5.5"}),
    ("light", "macOS x86-64", "3.11"): Resolved({"numpy": "2.4.6"}),
    ("light", "macOS x86-64", "3.13"): Resolved({}, "no wheel of onnxruntime"),
    ("train", "Linux arm64", "3.11"): Resolved({"torch": "2.11.0"}),
    ("train", "Linux arm64", "3.13"): Resolved({"torch": "2.11.0"}),
    ("train", "macOS x86-64", "3.11"): Resolved({}, "no wheel of torch"),
    ("train", "macOS x86-64", "3.13"): Resolved({}, "no wheel of torch"),
}


def test_the_table_names_what_is_missing() -> None:
    assert as_table(FOUND).splitlines()[2:] == [
        "| light | ok | no wheel for 3.13 |",
        "| train | ok | no wheel |",
    ]
    assert versions(FOUND).splitlines() == ["* numpy 2.4.6, 2.5.5", "* torch 2.11.0"]
    assert list(reasons(FOUND)) == [
        "light on macOS x86-64 with Python 3.13: no wheel of onnxruntime",
        "train on macOS x86-64 with Python 3.11; train on macOS x86-64 with Python 3.13: no wheel of torch",
    ]


def test_a_reason_has_no_address() -> None:
    assert reason("  × No solution\n  ╰─▶ cause: torch has no\n  wheels at https://index.example/simple/") == (
        "torch has no wheels at (address)"
    )


def test_every_extra_and_system_is_resolved_to_wheels_only() -> None:
    assert extras()[0] == BASE
    assert {"train", "onnx", "light", "tls", "zstd", "server"} <= set(extras())
    for system in SYSTEMS:
        command = uv_command("light", system, "3.12")
        assert command[command.index("--only-binary") + 1] == ":all:"
        assert command[-2:] == ["--extra", "light"]


def test_the_command_prints_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(wheels, "resolve", lambda *key: Resolved({"numpy": "2.4.6"}))
    assert wheels.main(["--extras", "light", "--systems", "Linux arm64"]) == 0
    assert "| light | ok |" in capsys.readouterr().out
