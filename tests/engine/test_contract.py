"""What a method declares about its uploads and its extractor, as its contract says it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.record_schema import recorded_config

from fleetdistill.knowledge import NetworkFile, ProxyKnowledge, SharedStatistics, WeightedPredictions
from fleetdistill.wire.codec import decode
from fleetdistill_server.engine.contract import build_method, make_contract
from fleetdistill_server.methods.fedavg import FedAvgServer
from fleetdistill_server.methods.traffic import Exchange


def test_a_method_that_says_nothing_of_them_has_neither(tmp_path: Path) -> None:
    config = recorded_config(tmp_path)
    contract, initial, extractor = make_contract(config, build_method(config))
    assert initial is not None
    assert contract.initial_weights == initial.sha256
    assert (contract.extractor_file, extractor) == (b"", None)
    assert contract.uploads
    assert {(upload.min_samples, upload.max_rows, upload.rows_per_direction) for upload in contract.uploads} == {
        (0, 0, 0)
    }


def test_the_contract_says_how_many_rows_and_which_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statistics: dict[str, Any] = {"classes": 3, "dimensions": 4, "directions": 2, "features": {}}
    parts = {
        "statistics": SharedStatistics.schema(**statistics, min_samples=5, max_rows=128, rows_per_direction=15),
        "other": WeightedPredictions.schema(rows=6, classes=3),
        "undeclared": ProxyKnowledge.schema(samples=6, classes=3, embedding=(2,), columns=("logits",)),
    }
    file = NetworkFile(onnx=np.arange(50, dtype=np.uint8))
    exchanges = [Exchange(step="train", up=parts)]
    monkeypatch.setattr(FedAvgServer, "exchanges", classmethod(lambda cls, config, sizes: exchanges))
    monkeypatch.setattr(FedAvgServer, "extractor_file", lambda self: file)
    config = recorded_config(tmp_path)
    contract, _, extractor = make_contract(config, build_method(config))
    said = [
        (upload.part, upload.min_samples, upload.max_rows, upload.rows_per_direction) for upload in contract.uploads
    ]
    assert said == [("statistics", 5, 128, 15), ("other", 0, 0, 0)]
    shapes = {
        upload.part: {tensor.name: tuple(tensor.shape) for tensor in upload.tensors} for upload in contract.uploads
    }
    assert shapes == {"statistics": {"means": (4,), "variances": (4,)}, "other": {"values": (6, 3)}}
    assert list(contract.requirements.columns) == ["class_statistics", "counts", "logits"]
    assert extractor is not None
    assert contract.extractor_file == extractor.sha256
    (sent,) = decode(extractor).values()
    assert isinstance(sent, NetworkFile)
    np.testing.assert_array_equal(sent.onnx, file.onnx)
