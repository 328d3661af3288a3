"""The client in examples/ that is written from the wire format's page, beside a device of the SDK, against `serve`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.open_device import open_device
from support.outside import EXAMPLES
from support.processes import PATIENCE_SECONDS
from support.served import answers_in, payload_bytes, served

from fleetdistill import COLUMNS
from fleetdistill.models import build_model

pytestmark = pytest.mark.slow

CLIENT = EXAMPLES / "minimal_client.py"
PLAIN = """
import runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
sdk = [name for name, module in sys.modules.items() if "client_sdk" in str(getattr(module, "__file__", ""))]
assert not sdk, f"the client imported the SDK: {sdk}"
"""
CONTRACT = {"classes": 10, "input_shape": [1, 8, 8], "knowledge_type": "float16"}
MODELS = {
    "fedavg": {"extractor": "", "server": "", "device": "digits_linear"},
    "feddkc": {"extractor": "digits_extractor", "server": "digits_server"},
}


def digits(part: int) -> tuple[np.ndarray, np.ndarray]:
    """Ten separable classes of images: one bright column or pair of columns each."""
    labels = np.arange(40) % 10
    images = np.random.default_rng(part).random((40, 1, 8, 8)) * 0.3
    images[np.arange(40), 0, labels % 8] += 0.5 + labels[:, None] // 8
    return images.astype(np.float32), labels


def start(address: str, work: Path) -> subprocess.Popen[str]:
    inputs, labels = digits(0)
    np.savez(work / "own.npz", inputs=inputs, labels=labels)
    command = [sys.executable, "-c", PLAIN, CLIENT, address, work / "plain", work / "own.npz"]
    return subprocess.Popen(
        [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def played(method: str, work: Path, **settings: Any) -> str:
    """Output of the client after a run with a device of the SDK."""
    run = {"method": method, "rounds": 2}
    sections: dict[str, dict[str, Any]] = {
        "run": run,
        "contract": CONTRACT,
        "model": MODELS[method],
        "method": settings,
    }
    with served(work, sections) as address:
        client = start(address, work)
        try:
            model = lambda: build_model("digits_linear")  # noqa: E731
            own: dict[str, Any] = {"data": digits(1), "allow": COLUMNS, "export": "never"}
            with open_device(server=address, model=model, state_dir=work / "sdk", device_id="sdk", **own) as device:
                device.run()
            output, _ = client.communicate(timeout=PATIENCE_SECONDS)
        finally:
            client.kill()
    assert client.returncode == 0, output
    return output


def test_it_has_fewer_than_200_lines() -> None:
    assert len(CLIENT.read_text().splitlines()) < 200


@pytest.mark.long
def test_it_takes_part_in_fedavg_with_a_device_of_the_sdk(tmp_path: Path) -> None:
    output = played("fedavg", tmp_path)
    both = ("plain", "sdk")
    assert answers_in(tmp_path) == [
        *[(1, "train", device) for device in both],
        *[(2, step, device) for step in ("deliver", "train") for device in both],
    ]
    assert output.count("round 1: ") == 1
    assert output.count("round 2: ") == 2


@pytest.mark.long
def test_client_takes_part_in_feddkc_and_learns_from_logits(tmp_path: Path) -> None:
    played("feddkc", tmp_path, teacher_guard=False)
    answers = [(number, "train", device) for number in (1, 2) for device in ("plain", "sdk")]
    assert answers_in(tmp_path) == answers
    assert payload_bytes(tmp_path, 1, "plain") == 0
    assert payload_bytes(tmp_path, 2, "plain") == 40 * (10 * 2 + 8), "float16 logits and ids of its own samples"
