"""ONNX of what each method delivers: the server's model, and the model of every device, against PyTorch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from support.fleets import MECHANISMS, RUNS
from support.long import long_except
from support.undisturbed import Undisturbed
from torch import nn

from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import GENERAL, OWN, PERSONAL, Array
from fleetdistill.methods import device_class
from fleetdistill.state.state_file import unpack_state
from fleetdistill_lab.simulation.report.final_models import FinalModels
from fleetdistill_lab.simulation.spec.arrays import load_arrays
from fleetdistill_lab.simulation.spec.device import build_device_model
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_server.engine.contract import build_method
from fleetdistill_server.engine.export import export_server_model


def logits_of(file: Path, inputs: Array) -> Array:
    session = onnxruntime.InferenceSession(str(file))
    return np.asarray(session.run(["logits"], {"input": inputs})[0])


def metadata_of(file: Path) -> dict[str, str]:
    return {prop.key: prop.value for prop in onnx.load(file).metadata_props}


def assert_same(model: nn.Module, file: Path, inputs: Array) -> None:
    with torch.no_grad():
        expected = model.cpu().eval()(torch.from_numpy(inputs)).numpy()
    assert expected.std() > 0, "a model that says the same of everything proves nothing"
    largest = max(1.0, np.abs(expected).max())
    for batch in (inputs, inputs[:3], inputs[:1]):
        np.testing.assert_allclose(logits_of(file, batch), expected[: len(batch)], atol=1e-4 * largest)


@pytest.mark.slow
@pytest.mark.parametrize("name", long_except(RUNS, "classstats", "fedavg", "feddkc", "cdkt", long=MECHANISMS))
def test_server_model_is_exported_as_in_last_checkpoint(name: str, undisturbed: Undisturbed, tmp_path: Path) -> None:
    played = undisturbed(name, durable=True)  # whose answers are on the disk
    store, method = played.store, build_method(played.prepared[0])
    row = store.runs.get(RUN)
    assert row is not None
    method.load_state_dict(unpack_state(store.blobs.get_state(row.checkpoint)))
    exported = method.export()
    if exported is None:
        with pytest.raises(ConfigurationError, match=f"{RUNS[name].method} has no model on the server"):
            export_server_model(store, RUN, tmp_path / "server.onnx")
        assert not (tmp_path / "server.onnx").exists()
    else:
        model, shape = exported
        report = export_server_model(store, RUN, tmp_path / "server.onnx")
        assert_same(model, report.path, np.random.default_rng(0).random((9, *shape), np.float32))
        assert (
            metadata_of(report.path).items()
            >= {"run": RUN, "round": str(RUNS[name].rounds), "method": RUNS[name].method}.items()
        )


@pytest.mark.slow
@pytest.mark.parametrize("durable", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", long_except(RUNS, "classstats", "fedavg", "feddkc", "cdkt", long=MECHANISMS))
def test_every_device_exports_the_model_that_its_app_uses(
    name: str, durable: bool, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Where a method's answers are apart from the network that the app gave, that one is a file of its own.

    A durable run has the devices' states in directories, the other one in its store.
    """
    config, has_own_file = RUNS[name].configuration(), device_class(RUNS[name].method).own_variant == OWN
    played = undisturbed(name, durable=durable)
    models = FinalModels(played.store, played.prepared[0])
    for spec in played.prepared[1]:
        inputs, _ = load_arrays(spec.test_file)
        model = build_device_model(spec, inputs.shape[1:])
        first = [parameter.clone() for parameter in model.parameters()]
        model.load_state_dict(unpack_state(played.files[f"{spec.name}/delivered.safetensors"])["model"])
        kept = all(torch.equal(*pair) for pair in zip(first, model.parameters(), strict=True))
        assert kept is (has_own_file and getattr(config, "own_network", "kept") == "kept")
        exported = models.export(spec, tmp_path, (OWN, PERSONAL))
        assert exported is not None
        assert exported.file == f"onnx/{spec.name}.onnx"
        assert exported.max_difference < 1e-3
        assert all((tmp_path / file).exists() for file in exported.variants.values())
        file, own_file = tmp_path / exported.file, exported.variants.get(OWN, exported.file)
        assert (OWN in exported.variants) == has_own_file
        assert_same(model, tmp_path / own_file, inputs)
        last = max(number for number, _, _, device, *_ in played.record["asks"] if device == spec.name)
        assert metadata_of(file).items() >= {"method": RUNS[name].method, "round": str(last)}.items()
        if has_own_file:
            assert metadata_of(file)["answer"] == GENERAL
            general = tmp_path / exported.variants[GENERAL]
            assert np.array_equal(logits_of(file, inputs), logits_of(general, inputs))
