"""With validation data an app keeps the model that it had before the fleet, whatever its method starts devices from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from numpy.testing import assert_allclose
from support.fleets import EVERY_METHOD, RUN, RUNS, prepare, run_in_memory
from support.long import long_except
from torch import Tensor, nn

from fleetdistill.knowledge import PERSONAL
from fleetdistill.methods import device_class
from fleetdistill.replacement import REPLACEMENT_METRICS, SPLIT
from fleetdistill.state.state_file import unpack_state
from fleetdistill_lab.simulation.report.final_models import FinalModels
from fleetdistill_lab.simulation.spec.arrays import load_arrays
from fleetdistill_lab.simulation.spec.device import DeviceSpec, build_device_model
from fleetdistill_server.views import runs as views

every_method = pytest.mark.parametrize("method", long_except(EVERY_METHOD, "classstats", "fedavg", "feddkc"))


def first_model(spec: DeviceSpec) -> nn.Module:
    model: nn.Module = build_device_model(spec, load_arrays(spec.test_file)[0].shape[1:])
    return model.eval()


def logits_of(model: nn.Module, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return model(inputs)


def with_unbeatable_data(spec: DeviceSpec, work: Path) -> DeviceSpec:
    """Validation data that the device's first model answers without a mistake, if only just."""
    shape = load_arrays(spec.test_file)[0].shape[1:]
    inputs = torch.rand(1000, *shape, generator=torch.Generator().manual_seed(1))
    sure = logits_of(first_model(spec), inputs).sort(dim=1)
    close = (sure.values[:, -1] - sure.values[:, -2]).argsort()[:40]
    file = work / f"{spec.name}-validation.npz"
    np.savez(file, inputs=inputs[close].numpy(), labels=sure.indices[close, -1].numpy())
    return replace(spec, validation_file=str(file))


@every_method
def test_app_keeps_its_model_if_no_fleet_answer_is_as_good(method: str, tmp_path: Path) -> None:
    config, specs, work = prepare(RUNS[method], tmp_path / "work")
    specs = [with_unbeatable_data(spec, work) for spec in specs]
    store = run_in_memory((config, specs, work), durable=True)  # with the files that an app's device has
    verdicts = [row.sum for name in REPLACEMENT_METRICS for row in store.history.figures(RUN, name, SPLIT)]
    assert not any(verdict > 0 for verdict in verdicts)
    rounds = 1 if RUNS[method].one_exchange else RUNS[method].rounds_to_complete
    facts = views.run(store, RUN).facts
    assert (facts["models_kept"], facts["models_replaced"]) == (len(verdicts), 0)
    if not RUNS[method].configuration().hides_rows:
        assert len(verdicts) >= len(specs) * rounds
    else:
        assert not verdicts, "a device that hides its rows does not report it"
    assert {row.sum for row in store.history.figures(RUN, "picked/personal", "validation")} <= {0.0}
    models = FinalModels(store, config)
    for spec in specs:
        own, (inputs, _) = first_model(spec), load_arrays(spec.test_file)
        delivered = unpack_state((Path(spec.state_dir) / "delivered.safetensors").read_bytes())
        assert (delivered["in_use"], delivered["further"]) == (device_class(method).own_variant, {})
        assert all(torch.equal(tensor, delivered["model"][name]) for name, tensor in own.state_dict().items())
        exported = models.export(spec, tmp_path, (PERSONAL,))
        assert exported is not None
        session = onnxruntime.InferenceSession(str(tmp_path / exported.file))
        expected = logits_of(own, torch.from_numpy(inputs)).numpy()
        assert_allclose(session.run(["logits"], {"input": inputs})[0], expected, atol=1e-4)
        assert PERSONAL not in exported.variants
    store.close()
