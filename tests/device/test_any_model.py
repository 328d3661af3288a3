"""Every form of a model takes part in FedAvg and FedDKC, and is exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import device.any_models as any_models
import pytest
import torch
from device.any_models import MAKERS
from support.long import long_except
from support.open_device import open_device

from fleetdistill import COLUMNS
from fleetdistill.testing import EventLog
from fleetdistill_server.testing import MemoryServer


@pytest.mark.parametrize("method", ["fedavg", pytest.param("feddkc", marks=pytest.mark.long)])
@pytest.mark.parametrize("form", long_except(MAKERS, *(form for form in MAKERS if not form.startswith("torchvision "))))
def test_every_form_of_a_model_goes_through_a_round(tmp_path: Path, form: str, method: str) -> None:
    make = MAKERS[form]
    shape = (3, 32, 32) if "torchvision" in form else (1, 8, 8)
    name = f"{any_models.__name__}:{make.__name__}"
    model = {"extractor": f"{name}_extractor", "server": f"{any_models.__name__}:predictor", "device": name}
    settings: dict[str, Any] = {
        "run": {"method": method, "rounds": 1},
        "contract": {"classes": 3, "input_shape": list(shape)},
        "model": model,
        "method": {"local_epochs": 1},
    }
    images = torch.rand(7, *shape, generator=torch.Generator().manual_seed(0))
    events = EventLog()
    given = make()
    before = {key: value.clone() for key, value in given.state_dict().items()}
    with (
        MemoryServer(settings) as server,
        open_device(
            server=server.link(),
            model=given,
            data=(images, torch.arange(7) % 3),
            state_dir=tmp_path,
            allow=COLUMNS,
            on_event=events.append,
        ) as device,
    ):
        device.run()
        assert server.status == "finished"
        trained = device.model.state_dict()
    assert trained.keys() == before.keys()
    assert any(not torch.equal(trained[key], before[key]) for key in before)
    assert {"answered", "delivered", "exported"} <= set(events.kinds())
    assert not {"dropped", "refused"} & set(events.kinds())
