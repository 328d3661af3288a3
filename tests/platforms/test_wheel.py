"""The wheel has what the author of a client in another language needs, and nothing of the source tree is missing."""

from __future__ import annotations

from pathlib import Path
from zipfile import ZipFile

from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[2]


def test_the_wheel_has_the_protocol_its_vectors_and_every_module(tmp_path: Path) -> None:
    (built,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with ZipFile(built) as wheel:
        result = {name: wheel.read(name) for name in wheel.namelist()}
    protos = [*(ROOT / "protos").rglob("*.proto"), ROOT / "protos" / "vectors.json"]
    assert len(protos) > 5
    for file in protos:
        assert result[f"fleetdistill/{file.relative_to(ROOT).as_posix()}"] == file.read_bytes()
    for package in (ROOT / "client_sdk", ROOT / "server"):
        modules = {file.relative_to(package).as_posix() for file in package.rglob("*.py")}
        assert modules <= result.keys()
