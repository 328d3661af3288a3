"""A secure sum over mutual TLS, whose devices' certificates vouch for their keys."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.linear_devices import digits
from support.open_device import open_device
from support.processes import wait_until
from support.secured import make_pki
from support.served import RUN, served

from fleetdistill import Event, SecureTerms
from fleetdistill.methods.classstats_private.sums import to_wire
from fleetdistill.methods.classstats_secure.config import ClassStatsSecureConfig
from fleetdistill.methods.classstats_secure.encoding import decode
from fleetdistill.models import build_model
from fleetdistill.secure.primitives import from_bytes, lift, reduce
from fleetdistill.state.files import Files
from fleetdistill.state.secure_sessions import SecureSession, SecureSessions
from fleetdistill.state.state_file import unpack_state
from fleetdistill_server.security.tokens import create_tokens, load_enrol_port
from fleetdistill_server.store.store import Store

DEVICES = ("cam-0", "cam-1", "cam-2")
METHOD: dict[str, Any] = {"epsilon": 20.0, "dimensions": 32, "keys": "certificates"}


@pytest.mark.slow
@pytest.mark.long
def test_a_sum_over_mutual_tls_is_that_of_its_inputs(tmp_path: Path) -> None:
    """Enrolled devices make a sum with keys = certificates: number for number that of what they have frozen."""
    authority = make_pki(tmp_path / "pki")
    settings: dict[str, dict[str, Any]] = {
        "run": {"method": "classstats_secure", "rounds": 1, "min_devices": len(DEVICES)},
        "method": METHOD,
        "contract": {"classes": 10, "input_shape": [1, 8, 8]},
        "server": {"pki": str(tmp_path / "pki"), "enrol_listen": "127.0.0.1:0"},
    }
    frozen: dict[str, SecureSession] = {}
    lock = threading.Lock()

    def take_part(address: str, name: str, token: str) -> None:
        images, labels = digits(DEVICES.index(name))

        def note(event: Event) -> None:
            session = SecureSessions(Files(tmp_path / name)).open() if event.kind == "answered" else None
            if session is not None:
                with lock:
                    frozen.setdefault(name, session)

        with open_device(
            server=address,
            enrolment=token,
            model=lambda: build_model("digits_linear"),
            data=(images / 2, labels),  # in [0, 1]
            state_dir=tmp_path / name,
            device_id=name,
            secure=SecureTerms(min_devices=3, keys="certificates"),
            export="never",
            on_event=note,
        ) as device:
            device.run()

    with served(tmp_path, settings) as address, ThreadPoolExecutor(len(DEVICES)) as pool:
        store = Store.open(tmp_path / "store")
        wait_until(lambda: load_enrol_port(tmp_path / "store"), "the enrolment port")
        tokens = create_tokens(store, authority, load_enrol_port(tmp_path / "store") or 0, 3, 600.0, "", [])
        store.close()
        for part in [pool.submit(take_part, address, *item) for item in zip(DEVICES, tokens, strict=True)]:
            part.result()
    store = Store.open(tmp_path / "store")
    row = store.runs.existing(RUN)
    state: Any = unpack_state(store.blobs.get_state(row.checkpoint))
    store.close()
    assert row.status == "finished"
    assert frozen.keys() == set(DEVICES) == state["members"].keys()
    ((part, _),) = state["parts"].values()
    method = ClassStatsSecureConfig(**METHOD)
    parameters = method.parameters(10, 32, least=method.fewest(3), honest=method.honest(3))
    inputs = [from_bytes(session.numbers, parameters.width) for session in frozen.values()]
    total = reduce(np.sum(inputs, axis=0, dtype=np.uint64), parameters.width)
    expected = to_wire(decode(lift(total, parameters.width), parameters), part["mu"], discrete=True)
    for name in ("counts", "sums", "second_moment"):
        assert np.array_equal(part[name].numpy(), getattr(expected, name)), name
