"""One seed, two links, one result; and what `simulate` refuses."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.fleets import (
    HOSTILE,
    MECHANISMS,
    REPRODUCIBLE,
    RUNS,
    Prepared,
    assert_no_upload_lost,
    device_files,
    outcome,
    prepare,
    record,
    run_in_memory,
)
from support.forked import ForkedEngine, forked_grpc_devices
from support.live_front import live_front
from support.long import long_except
from support.undisturbed import Undisturbed

from fleetdistill.errors import ConfigurationError, DataError
from fleetdistill_lab.simulation.fleet import simulate
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.service.wakeups import Ends
from fleetdistill_server.store.store import Store

SMALL = Simulation(
    method="feddkc",
    devices=3,
    rounds=3,
    train_limit=90,
    test_limit=40,
    alpha=1.0,
    torch_device="cpu",
    with_alone=False,
    with_fedavg=False,
)


def run_in_processes(prepared: Prepared) -> Store:
    """As `run_over_grpc`, with two processes of devices, one of which closes devices that wait for work."""
    config, specs, _ = prepared
    engine, store = ForkedEngine(prepared), Store.open(Path(config.server.store))
    # as the supervisor does, so that a device may be quicker than the engine
    store.runs.begin(RUN, config.fixed_part())
    ends, lease = Ends(engine.front_pipe.end, (engine.pipe.end,)), config.server.lease_seconds
    with live_front(Path(config.server.store), lease, ends) as front:
        groups = [forked_grpc_devices(specs[first::2], front.port, keep_open=first == 0) for first in range(2)]
        processes = [*groups, engine]
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.wait_for_the_end()
        finally:
            for process in processes:
                process.kill()
    return store


@pytest.mark.long
def test_both_links_leave_the_same_device_out(tmp_path: Path) -> None:
    memory = run_in_memory(prepare(HOSTILE, tmp_path / "memory"))
    grpc = run_in_processes(prepare(HOSTILE, tmp_path / "grpc"))
    assert [row.device for row in grpc.history.events(RUN, "update-left-out")] == ["device-0"] * 2
    assert outcome(grpc) == outcome(memory)
    grpc.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", long_except(REPRODUCIBLE, "classstats in one exchange", "feddkc", long=MECHANISMS))
def test_both_links_agree_to_the_bit(tmp_path: Path, undisturbed: Undisturbed, name: str) -> None:
    near, far = undisturbed(name), prepare(RUNS[name], tmp_path / "far")
    with closing(run_in_processes(far)) as store:
        assert record(store) == near.record
        assert device_files(far) == near.files
        assert_no_upload_lost(store)
    assert_no_upload_lost(near.store)


def test_another_seed_gives_another_result(tmp_path: Path) -> None:
    stores = [
        run_in_memory(prepare(Simulation(**{**vars(SMALL), "rounds": 1, "seed": seed}), tmp_path / str(seed)))
        for seed in (0, 1)
    ]
    assert outcome(stores[0])[0] != outcome(stores[1])[0]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"link": "pigeon"}, ConfigurationError, "'pigeon'.*memory or grpc"),
        ({"rounds": 0}, ConfigurationError, "rounds is 0.*ends with its last round"),
        ({"devices": -1}, ConfigurationError, "devices is -1"),
        ({"threads": 0}, ConfigurationError, "threads is 0"),
        ({"train_limit": 0}, ConfigurationError, "train_limit is 0"),
        ({"test_limit": 0}, ConfigurationError, "test_limit is 0"),
        ({"seed": -1}, ConfigurationError, "seed is -1"),
        ({"devices": 50, "train_limit": 40}, DataError, "50"),
        ({"dataset": "letters"}, DataError, "'letters'"),
        ({"method": "fedmagic"}, ConfigurationError, "'fedmagic'"),
        ({"settings": {"betta": 1}}, ConfigurationError, "betta"),
        ({"models": ("no_such_model",)}, ConfigurationError, "no_such_model"),
        ({"partition": "by_moon"}, (ConfigurationError, DataError), "by_moon"),
    ],
)
def test_simulate_refuses_what_makes_no_sense(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        simulate(Simulation(**{**vars(SMALL), "out": tmp_path / "out", **changes}))


def test_a_folder_with_files_of_others_is_left_alone(tmp_path: Path) -> None:
    thesis = tmp_path / "work" / "thesis.tex"
    thesis.parent.mkdir()
    thesis.write_text("years of work")
    with pytest.raises(DataError, match="was not created by a simulation"):
        simulate(Simulation(**{**vars(SMALL), "out": tmp_path}))
    assert thesis.read_text() == "years of work"
