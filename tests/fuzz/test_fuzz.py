"""A small part of `make fuzz`, and proof that it would notice."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from fuzz.hostile import hostile, mangled_bytes
from fuzz.in_process import ApiTarget, IngestTarget
from fuzz.over_sockets import methods, socket_target
from fuzz.run import MAX_GROWTH, fuzz_in_process, fuzz_sockets
from fuzz.specimens import specimens
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes import PATIENCE_SECONDS, own_peak_memory

from fleetdistill.knowledge import KINDS
from fleetdistill_server.intake import ingest
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.ingest import Ingest

randoms = st.randoms(use_true_random=False)
MUST_OCCUR = {
    "bad-message",
    "bad-tensor",
    "bad-value",
    "checksum",
    "incomplete",
    "out-of-step",
    "accepted",
}


@pytest.mark.long
@settings(max_examples=400)
@given(randoms)
def test_upload_is_refused_or_accepted_and_readable(random: Random) -> None:
    assert IngestTarget().turn(random) >= 1


@pytest.mark.long
def test_many_uploads_in_process() -> None:
    """Every reason to refuse is met, so the hostile messages reach every check."""
    target = IngestTarget()
    before = own_peak_memory()
    sent, broken = fuzz_in_process(target, 30_000, seed=1)
    assert broken == []
    assert sent >= 30_000
    assert target.outcomes.keys() >= MUST_OCCUR
    assert own_peak_memory() - before < MAX_GROWTH


def test_every_kind_that_a_device_can_send_is_fuzzed() -> None:
    sent = {part.WhichOneof("kind") for specimen in specimens().values() for part in specimen.payload.parts.parts}
    assert sent == {name for name, kind in KINDS.items() if kind.possible_columns is not None} | {"plan"}


def test_every_call_in_process() -> None:
    target = ApiTarget()
    _, broken = fuzz_in_process(target, 5_000, seed=1)
    target.close()
    assert broken == []
    assert target.outcomes.keys() >= {"answered", "bad-identity", "not-asked", "bad-message"}


@pytest.mark.long
@pytest.mark.slow
def test_every_call_over_sockets(tmp_path: Path) -> None:
    with socket_target(tmp_path) as target:
        before = target.peak_memory
        _, broken = fuzz_sockets(target, 1_500, seed=1)
        assert broken == []
        assert target.outcomes.keys() >= {"answered", "INVALID_ARGUMENT bad-message"}
        assert all(target.called.values()), "a call that nobody made"
        assert not [
            name for name, outcomes in target.called.items() if set(outcomes) == {"PERMISSION_DENIED not-allowed"}
        ]
        assert target.peak_memory - before < MAX_GROWTH


def test_every_call_of_the_protos_is_known_to_the_fuzzer() -> None:
    names = {method.full_name for method in methods()}
    assert "fleetdistill.wire.v1.DeviceService.Upload" in names
    assert len(names) >= 8


@pytest.mark.long
@settings(max_examples=300)
@given(randoms)
def test_a_hostile_message_is_made_from_its_seed_alone(random: Random) -> None:
    seed = random.randrange(1 << 30)
    valid = specimens()["generator"].payload.header()
    made = [hostile(Random(seed), valid).SerializeToString(deterministic=True) for _ in range(2)]
    assert made[0] == made[1]
    assert mangled_bytes(Random(seed), b"abc") == mangled_bytes(Random(seed), b"abc")


# --- would it notice? Each of these is a mistake that the server could have.


def _nan_is_fine(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ingest, "_check_values", lambda *args: None)


def _raises_its_own_error(patch: pytest.MonkeyPatch) -> None:
    def fits(shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
        return bool([None][len(shape) - len(expected)] is None)  # an IndexError where the lengths differ

    patch.setattr(ingest, "_fits", fits)


@pytest.mark.long
@pytest.mark.parametrize("mistake", [_nan_is_fine, _raises_its_own_error])
def test_a_mistake_in_the_checks_is_found(mistake: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mistake(patch)
        assert fuzz_in_process(IngestTarget(), 20_000, seed=1)[1]


def test_a_call_that_breaks_is_found() -> None:
    def leave(self: DeviceApi, request: object) -> None:
        raise KeyError(request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceApi, "leave", leave)
        target = ApiTarget()
        assert fuzz_in_process(target, 500, seed=1)[1]
        target.close()


@pytest.mark.long
@pytest.mark.slow
def test_the_decoder_under_atheris(tmp_path: Path) -> None:
    """A few thousand runs of the coverage-guided fuzzer; `make fuzz` makes a million."""
    pytest.importorskip("atheris", reason="atheris exists for Linux on x86-64 only")
    script = Path(__file__).with_name("decoder.py")
    # The peak of memory that libFuzzer limits survives exec: it is that of this process, which has run other tests.
    options = ["-runs=3000", "-seed=1", "-max_len=4096", "-rss_limit_mb=0"]
    command = [sys.executable, str(script), str(tmp_path), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, env=_environment())
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Done 3000 runs" in done.stderr


def _environment() -> dict[str, str]:
    return {"PYTHONPATH": str(Path(__file__).parents[1]), "PATH": "/usr/bin:/bin"}
