"""What traces cost the front: its processor time a call without the code, with it but off, and on; in turn, in one run.

Each part is a front of its own with 32 calls under way: `NextAsk` of a device that has an open ask, the call that
traces add most to. `without` is a front whose `NextAsk` has the code of the last version without traces.

    python benchmarks/tracing.py --seconds 3 --turns 5
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.live_front import CALL_SECONDS, Client, open_round, prepare_store, write_asks, write_server_config
from support.wire_samples import make_payload

from fleetdistill.wire.v1 import service_pb2, service_pb2_grpc
from fleetdistill_server.config.limits import Limits
from fleetdistill_server.config.server_config import ServerConfig, ServerSection
from fleetdistill_server.service.processes import front_environment

CALLERS = 32
WITHOUT = """
import sys
from fleetdistill_server.front import device_service
async def next_ask(self, request, context):
    found, who = await self._call(context, lambda: self._next_ask(request.identity))
    assert found is not None
    return found
device_service.DeviceService.NextAsk = next_ask
from fleetdistill_server.front.process import main
sys.exit(main())
"""
PARTS = ("without", "off", "on")


def start(part: str, folder: Path) -> tuple[subprocess.Popen[str], int]:
    """Starts a front; returns it and its port."""
    section = ServerSection(listen="127.0.0.1:0", traces="otlp" if part == "on" else "off")
    config = write_server_config(folder, ServerConfig(server=section, limits=Limits()))
    program = ["-c", WITHOUT] if part == "without" else ["-m", "fleetdistill_server.front"]
    process = subprocess.Popen(
        [sys.executable, *program, str(config)], stdout=subprocess.PIPE, text=True, env=front_environment()
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline().split()[1])


async def calls_in(port: int, identity: service_pb2.Identity, seconds: float) -> int:
    """Counts the calls that `CALLERS` callers complete."""
    done, until = 0, time.perf_counter() + seconds
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = service_pb2_grpc.DeviceServiceStub(channel)

        async def call() -> None:
            nonlocal done
            while time.perf_counter() < until:
                await stub.NextAsk(service_pb2.NextAskRequest(identity=identity), timeout=CALL_SECONDS)
                done += 1

        await asyncio.gather(*[call() for _ in range(CALLERS)])
    return done


def processor_seconds(pid: int) -> float:
    """Processor time of a process; unlike calls a second it does not depend on the machine's other load."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = prepare_store(Path(folder))
        fronts = {part: start(part, Path(folder)) for part in PARTS}
        client = Client(fronts["off"][1])
        client.check_in()
        write_asks(store, open_round(store, "d1"), "d1", payload=make_payload())
        costs: dict[str, list[float]] = {part: [] for part in PARTS}
        for turn in range(given.turns + 1):
            for part in PARTS if turn % 2 else PARTS[::-1]:
                process, port = fronts[part]
                before = processor_seconds(process.pid)
                calls = asyncio.run(calls_in(port, client.identity, given.seconds))
                if turn:  # the first warms up
                    costs[part].append((processor_seconds(process.pid) - before) / calls)
        for process, _ in fronts.values():
            process.terminate()
            process.wait()
        store.close()
    ratios = {
        f"{part} / {base}": statistics.median(a / b for a, b in zip(costs[part], costs[base], strict=True))
        for part, base in (("off", "without"), ("on", "off"))
    }
    medians = {part: round(statistics.median(costs[part]) * 1e6) for part in PARTS}
    print(json.dumps({"microseconds_a_call": medians, "median_ratios": ratios}, indent=1))


if __name__ == "__main__":
    main()
