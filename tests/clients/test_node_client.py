"""The client in Node.js in a cdkt run, beside a device of the SDK, where node and its packages can be had."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.open_device import open_device
from support.outside import EXAMPLES
from support.processes import PATIENCE_SECONDS
from support.served import answers_in, payload_bytes, served

from fleetdistill.models import build_model

pytestmark = pytest.mark.slow

CLIENT = EXAMPLES / "node_client"
PROXY_ROWS, CLASSES = 20, 10


@pytest.fixture(scope="session")
def node(request: pytest.FixtureRequest) -> dict[str, str]:
    """Environment in which node finds the client's packages; they are installed once, into pytest's cache."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    package = (CLIENT / "package.json").read_bytes()
    assert request.config.cache is not None
    folder = request.config.cache.mkdir(f"node-{hashlib.sha256(package).hexdigest()[:12]}")
    if not (folder / "installed").exists():
        (folder / "package.json").write_bytes(package)
        options = ["--ignore-scripts", "--no-package-lock", "--no-audit", "--no-fund"]
        done = subprocess.run(["npm", "install", *options], cwd=folder, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"npm cannot install the client's packages: {done.stderr[-500:]}")
        (folder / "installed").touch()
    return {**os.environ, "NODE_PATH": str(folder / "node_modules")}


def digits(part: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Ten separable classes of images: one column each, bright or very bright."""
    labels = np.arange(rows) % CLASSES
    images = np.random.default_rng(part).random((rows, 1, 8, 8)) * 0.3
    images[np.arange(rows), 0, labels % 8] += 0.5 + labels[:, None] // 8
    return images.astype(np.float32), labels


@pytest.mark.long
def test_payloads_messages_and_checksums_match_vectors(node: dict[str, str]) -> None:
    done = subprocess.run(["node", CLIENT / "check_vectors.js"], env=node, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_it_takes_part_in_cdkt_with_a_device_of_the_sdk(tmp_path: Path, node: dict[str, str]) -> None:
    inputs, labels = digits(9, PROXY_ROWS)
    np.savez(tmp_path / "proxy.npz", inputs=inputs, labels=labels)
    own, own_labels = digits(0, 40)
    (tmp_path / "own.json").write_text(
        json.dumps({"inputs": own.reshape(40, -1).tolist(), "labels": own_labels.tolist()})
    )
    settings: dict[str, dict[str, Any]] = {
        "run": {"method": "cdkt", "rounds": 2},
        "contract": {"classes": CLASSES, "input_shape": [1, 8, 8], "knowledge_type": "float16"},
        "model": {"extractor": "", "server": "cdkt_digits", "device": ""},
        "proxy": {"data": str(tmp_path / "proxy.npz"), "name": "columns", "licence": "CC0-1.0"},
        "method": {"local_epochs": 20, "teacher_guard": False},
    }
    with served(tmp_path, settings) as address:
        command = ["node", CLIENT / "client.js", address, tmp_path / "node", tmp_path / "own.json"]
        client = subprocess.Popen(
            [str(word) for word in command], env=node, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            model = lambda: build_model("cdkt_digits_small")  # noqa: E731
            more: dict[str, Any] = {"data": digits(1, 40), "allow": ["logits", "metrics"], "export": "never"}
            with open_device(
                server=address, model=model, state_dir=tmp_path / "sdk", device_id="sdk", **more
            ) as device:
                device.run()
            output, _ = client.communicate(timeout=PATIENCE_SECONDS)
        finally:
            client.kill()
    assert client.returncode == 0, output
    assert answers_in(tmp_path) == [(number, "train", device) for number in (1, 2) for device in ("node", "sdk")]
    assert payload_bytes(tmp_path, 2, "node") == PROXY_ROWS * CLASSES * 2, "the server's logits in float16"
    accuracies = [float(item) for item in re.findall(r"accuracy ([\d.]+) on the proxy set", output)]
    assert len(accuracies) == 2
    assert accuracies[-1] > 0.5, "chance is 0.1"
