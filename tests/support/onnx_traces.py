"""Which models are traced to ONNX."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn


def traced_models(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list that gets the text of each classifier that is traced from now on; extractors are left out."""
    traced: list[str] = []
    real = torch.onnx.export

    def export(model: nn.Module, *given: Any, **options: Any) -> Any:
        if options["output_names"] == ["logits"]:
            traced.append(str(model))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of torch about its exporter, here in the tests' name
            return real(model, *given, **options)

    monkeypatch.setattr(torch.onnx, "export", export)
    return traced
