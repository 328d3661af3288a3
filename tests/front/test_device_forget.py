"""`fleetdistill device forget` through a real front: authenticated, durably recorded, then erased."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.live_front import RUN, LiveFront
from support.small_device import small_device

from fleetdistill.device.command import main
from fleetdistill.testing import EventLog
from fleetdistill_server.store.store import Store


def test_the_command_asks_the_server_and_erases_the_directory(
    front: LiveFront, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_device(front.port, tmp_path, EventLog(), device_id="leaver") as device:
        device.step(0)
    assert main(["forget", str(tmp_path), "--server", "127.0.0.1:1", "--yes"]) == 1
    assert "nothing was erased" in capsys.readouterr().err
    assert (tmp_path / "device.json").exists()
    assert main(["forget", str(tmp_path), "--yes"]) == 0, "the app's last server"
    assert "the server has recorded the request to delete the data of leaver" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    assert store.devices.to_forget(RUN) == ["leaver"]
