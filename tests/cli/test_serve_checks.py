"""What `fleetdistill serve` refuses before it starts anything."""

from __future__ import annotations

import errno
import signal
import subprocess
from pathlib import Path

import pytest
from support.processes import COMMAND, PATIENCE_SECONDS, free_port
from support.secured import make_pki
from typer.testing import CliRunner

from fleetdistill.errors import RunError
from fleetdistill_server.cli.app import app
from fleetdistill_server.config.run_config import load_run_config
from fleetdistill_server.service import supervisor
from fleetdistill_server.service.supervisor import Supervisor

RUN_TOML = """
[run]
name = "checks"
[contract]
classes = 10
input_shape = [1, 8, 8]
[server]
listen = "{listen}"
store = "{store}"
"""


def write_run(folder: Path, listen: str) -> Path:
    path = folder / "run.toml"
    path.write_text(RUN_TOML.format(listen=listen, store=folder / "store"))
    return path


@pytest.mark.parametrize("listen", ["0.0.0.0:50055", "10.1.2.3:50055", "[::]:50055", "example.org:50055"])
def test_plain_text_outside_the_loopback_is_refused(tmp_path: Path, listen: str) -> None:
    done = CliRunner().invoke(app, ["serve", str(write_run(tmp_path, listen))])
    assert done.exit_code == 1
    assert f"[server] listen is {listen!r}, which is not a loopback address, and TLS is not configured" in done.stderr
    assert "--insecure" in done.stderr
    assert not (tmp_path / "store").exists()


def test_waiting_for_the_end_of_a_run_that_has_none_is_refused(tmp_path: Path) -> None:
    path = write_run(tmp_path, "127.0.0.1:0")
    path.write_text(path.read_text().replace("[contract]", "rounds = 0\n[contract]"))
    done = CliRunner().invoke(app, ["serve", str(path), "--until-finished"])
    assert done.exit_code == 1
    assert "--until-finished requires [run] rounds above 0, but run 'checks' runs until stopped" in done.stderr
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("options", [[], ["--check"]])
@pytest.mark.parametrize(("method", "epsilon"), [("classstats_secure", "epsilon = 3.0\n"), ("classstats_summed", "")])
def test_certificates_without_tls_are_refused(tmp_path: Path, method: str, epsilon: str, options: list[str]) -> None:
    path = write_run(tmp_path, "127.0.0.1:0")
    text = path.read_text().replace('name = "checks"', f'name = "checks"\nmethod = "{method}"')
    path.write_text(text + f'[method]\n{epsilon}keys = "certificates"\n')
    done = CliRunner().invoke(app, ["serve", str(path), *options])
    assert done.exit_code == 1
    assert "[method] keys is 'certificates', but [server] pki is not set, so the devices have no" in done.output
    assert not (tmp_path / "store").exists()


@pytest.mark.slow
def test_every_start_warns_of_plain_text_outside_loopback(tmp_path: Path) -> None:
    path = write_run(tmp_path, "0.0.0.0:0")
    for _ in range(2):
        with subprocess.Popen(
            [*COMMAND, "serve", str(path), "--insecure"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                assert process.stdout is not None
                assert "is served on 0.0.0.0:" in process.stdout.readline()
                process.send_signal(signal.SIGTERM)
                _, errors = process.communicate(timeout=PATIENCE_SECONDS)
            finally:
                process.kill()
        assert process.returncode == 0
        warnings = [line.split(" ", 1)[1] for line in errors.splitlines() if " WARNING " in line]
        assert warnings == [
            "WARNING serve serving in plain text on 0.0.0.0:0; "
            "anyone on the network path can read and modify the traffic",
        ]


def test_a_second_server_on_one_store_is_refused(tmp_path: Path) -> None:
    path = write_run(tmp_path, "127.0.0.1:0")
    first = Supervisor(load_run_config(path))
    with pytest.raises(RunError, match=r"another `fleetdistill serve` uses the store .*store; stop it first"):
        Supervisor(load_run_config(path))
    first.lock.close()
    first.store.close()


@pytest.mark.parametrize("options", [[], ["--check"]])
def test_a_missing_store_of_a_used_pki_is_not_replaced(tmp_path: Path, options: list[str]) -> None:
    """Its disk may not be mounted; an empty store knows no run, so that devices leave, and has no revocations."""
    make_pki(tmp_path / "pki")
    path = write_run(tmp_path, "127.0.0.1:0")
    path.write_text(f'{path.read_text()}pki = "{tmp_path / "pki"}"\nenrol_listen = "127.0.0.1:0"\n')
    first = Supervisor(load_run_config(path))
    first.lock.close()
    first.store.close()
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    done = CliRunner().invoke(app, ["serve", str(path), *options])
    assert done.exit_code == 1
    assert f"there is no store in {tmp_path / 'store'}, but the PKI {tmp_path / 'pki'} has served one" in done.output
    assert not (tmp_path / "store").exists()
    (tmp_path / "pki" / "served-store").unlink()
    assert CliRunner().invoke(app, ["serve", str(path), "--check"]).exit_code == 0


@pytest.mark.postgres
@pytest.mark.s3
@pytest.mark.long
def test_database_and_bucket_are_checked_before_the_first_start(
    tmp_path: Path, database_url: str, blobs_url: str
) -> None:
    path = write_run(tmp_path, "127.0.0.1:0")
    given = path.read_text()
    bucket = blobs_url.removeprefix("s3://").partition("/")[0]
    nowhere = f"postgresql://127.0.0.1:{free_port()}/fleet"
    for database, blobs, said in (
        (database_url, blobs_url, "can be served"),
        (nowhere, blobs_url, "database"),
        (database_url, blobs_url.replace(bucket, "no-such-bucket"), "there is no bucket 'no-such-bucket'"),
    ):
        path.write_text(f'{given}database = "{database}"\nblobs = "{blobs}"\n')
        done = CliRunner().invoke(app, ["serve", str(path), "--check"])
        assert said in done.output
        assert (done.exit_code == 0) == (said == "can be served")
        assert not (tmp_path / "store").exists()


def test_a_start_on_a_full_disk_says_what_to_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that was served with these settings needs no room for them."""

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = write_run(tmp_path, "127.0.0.1:0")
    with monkeypatch.context() as disk:
        disk.setattr(supervisor, "write_private", full)
        done = CliRunner().invoke(app, ["serve", str(path)])
    assert done.exit_code == 1
    place = load_run_config(path).server.store
    assert f"served.toml: the disk is full; free some megabytes on the disk of {place} and start the" in done.output
    (tmp_path / "other").mkdir()
    path = write_run(tmp_path / "other", "127.0.0.1:0")
    for _ in range(2):
        started = Supervisor(load_run_config(path))
        started.store.close()
        started.lock.close()
        monkeypatch.setattr(supervisor, "write_private", full)
