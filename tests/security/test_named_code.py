"""Server-named code never runs on a device: names are looked up in the SDK's tables and the app's registrations."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from security.named_code import RECEIVED
from support.processes import python

from fleetdistill.methods import METHODS
from fleetdistill.wire.v1 import service_pb2


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("named")
    code = f"import pathlib, sys; sys.path[:0] = {sys.path!r}\nfrom security.named_code import main\n"
    return json.loads(python(f"{code}main(pathlib.Path({str(folder)!r}))").splitlines()[-1])


@pytest.mark.long
def test_nothing_named_by_server_is_imported_opened_or_executed(result: Any) -> None:
    assert result["used"] == []
    assert not result["imported"]
    assert result["played"] > 300


@pytest.mark.long
def test_the_hook_sees_an_import_of_the_same_name(result: Any) -> None:
    assert result["control"]


@pytest.mark.long
def test_devices_answer_the_same_server_without_the_lies(result: Any) -> None:
    """Otherwise a refusal in the first call would hide what a later string could do."""
    assert set(result["honest"]) == set(METHODS)
    assert {method for method, events in result["honest"].items() if "answered" not in events.split()} == set()


def test_the_messages_are_all_that_a_device_reads_strings_of() -> None:
    replies = {method.output_type.name for method in service_pb2.DESCRIPTOR.services_by_name["DeviceService"].methods}
    inner = {"UploadResponse": "Receipt", "DownloadResponse": "PayloadHeader"}
    silent = {"HeartbeatResponse", "DeclineResponse", "LeaveResponse"}
    assert {inner.get(name, name) for name in replies - silent} == set(RECEIVED)
    for name in silent:
        fields = service_pb2.DESCRIPTOR.message_types_by_name[name].fields
        assert not any(field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_MESSAGE) for field in fields)
