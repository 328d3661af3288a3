"""What a front makes of the place in a trace that a device names, and that nothing is loaded while traces are off."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.collector import collecting
from support.live_front import (
    CALL_SECONDS,
    RUN,
    client_of,
    live_front,
    open_round,
    prepare_store,
    upload_name,
    write_asks,
)
from support.processes import python, wait_until
from support.wire_samples import make_payload
from typer.testing import CliRunner

from fleetdistill.spans import Place, place_in
from fleetdistill.wire.v1 import service_pb2
from fleetdistill_server.cli.app import app
from fleetdistill_server.service.processes import EXIT_CONFIGURATION
from fleetdistill_server.store.traced import created_at
from fleetdistill_server.tracing.spans import RoundIds

FOREIGN = Place(0xABCD, 0x1234)


@pytest.mark.slow
def test_device_chooses_a_place_only_in_trace_of_its_own_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two payloads: the first call names a trace of its own choice, the second a span in the ask's trace."""
    store = prepare_store(tmp_path)
    with collecting() as (collector, variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with live_front(tmp_path, traces="otlp") as front, client_of(front) as client:
            client.check_in()
            number = open_round(store, "d1")
            payload = make_payload()
            write_asks(store, number, "d1", payload=payload)
            asking = client.start_next_ask(5)
            ask = asking.result().ask
            created = created_at(store.database, RUN)
            assert created is not None
            ids = RoundIds(RUN, created, number)
            place = place_in(asking.trailing_metadata())
            assert place == Place(ids.trace, ids.ask(ask.step_number, "d1"))
            request = service_pb2.DownloadRequest(identity=client.identity, sha256=payload.sha256)
            for header in (FOREIGN, Place(ids.trace, 0x77, sampled=False)):
                metadata = (("traceparent", header.header()),)
                list(client.stub.Download(request, timeout=CALL_SECONDS, metadata=metadata))
            bad = upload_name(number)
            answer = [client.header(bad, make_payload(rows=2), samples=10**9)]
            metadata = (("traceparent", "00-" + "f" * 5000 + "-1-01"),)
            with pytest.raises(Exception, match="declared"):
                client.stub.Upload(iter(answer), timeout=CALL_SECONDS, metadata=metadata)
            wait_until(lambda: len(collector.spans(service="fleetdistill-front")) == 2, "two spans", 30)
        first, second = collector.spans(service="fleetdistill-front")
    store.close()
    assert {first.trace, second.trace} == {f"{ids.trace:032x}"}, "also the call that named another trace"
    assert {first.parent, second.parent} == {f"{place.span:016x}", f"{0x77:016x}"}, "sampled as the server decides"


@pytest.mark.parametrize(
    "values",
    [
        (),
        ("",),
        ("00-" + "0" * 32 + "-" + "1" * 16 + "-01",),
        ("00-" + "1" * 32 + "-" + "0" * 16 + "-01",),
        ("00-" + "A" * 32 + "-" + "1" * 16 + "-01",),
        ("01-" + "1" * 32 + "-" + "1" * 16 + "-01",),
        ("00-" + "1" * 32 + "-" + "1" * 16 + "-01-more",),
        (b"\xff",),
        (Place(1, 2).header(), Place(3, 4).header()),
    ],
)
def test_anything_but_one_valid_header_is_none(values: tuple[object, ...]) -> None:
    assert place_in([("other", "x"), *(("traceparent", value) for value in values)]) is None


def test_a_header_survives_the_way() -> None:
    for place in (Place(1, 2), Place(2**128 - 1, 2**64 - 1, sampled=False)):
        assert place_in([("traceparent", place.header())]) == place


@pytest.mark.long
def test_nothing_of_opentelemetry_is_loaded_by_default() -> None:
    modules = [
        f"fleetdistill_server.{name}" for name in ("front.process", "engine.process", "cli.app", "service.supervisor")
    ]
    loaded = python(f"import sys, fleetdistill, {', '.join(modules)}\nprint(*sorted(sys.modules))").split()
    assert set(modules) <= set(loaded)
    assert [name for name in loaded if name.partition(".")[0] == "opentelemetry"] == []


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://me:hunter2@collector:4317", "must not contain a password"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "carrier-pigeon", "expected one of grpc, http/protobuf"),
    ],
)
def test_a_wrong_variable_is_an_error_before_anything_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, told: str
) -> None:
    monkeypatch.setenv(variable, value)
    path = tmp_path / "run.toml"
    path.write_text(
        '[run]\nname = "digits"\nrounds = 1\n[contract]\nclasses = 10\ninput_shape = [1, 8, 8]\n'
        f'[server]\ntraces = "otlp"\nlisten = "127.0.0.1:0"\nstore = "{tmp_path / "store"}"\n'
    )
    done = CliRunner().invoke(app, ["serve", str(path)])
    assert done.exit_code == 1
    assert variable in done.output
    assert told in " ".join(done.output.split())
    assert "hunter2" not in done.output
    assert not (tmp_path / "store").exists()


@pytest.mark.slow
def test_a_front_with_a_wrong_variable_says_so_and_ends(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(f'[server]\nlisten = "127.0.0.1:0"\nstore = "{tmp_path}"\ntraces = "otlp"\n')
    done = subprocess.run(
        [sys.executable, "-m", "fleetdistill_server.front", str(tmp_path / "run.toml")],
        env={**os.environ, "OTEL_EXPORTER_OTLP_PROTOCOL": "smoke-signals"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == EXIT_CONFIGURATION
    assert "OTEL_EXPORTER_OTLP_PROTOCOL is 'smoke-signals', expected one of grpc, http/protobuf" in done.stdout, (
        "what the supervisor logs"
    )
    assert "Traceback" not in done.stderr
