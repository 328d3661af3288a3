"""How torchrun starts the engine's processes: they meet through files and listen on the loopback interface only.

By default torchrun listens on all interfaces, so that anyone could join or change what the processes exchange.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fleetdistill_server.store.blobs import disk_errors

RENDEZVOUS = "FLEETDISTILL_RENDEZVOUS"
"""Environment variable of the directory in which the processes of one start meet."""


@dataclass(frozen=True)
class Torchrun:
    """Starts several processes of a module.

    Attributes:
        processes: Number of processes.
        rendezvous: Directory in which the processes of one start meet.
    """

    processes: int
    rendezvous: Path

    def command(self) -> list[str]:
        """Returns the command up to the module; empties the directory, which a killed start may have left.

        Raises:
            StoreError: The directory cannot be created.
        """
        with disk_errors(f"creating {self.rendezvous}"):
            shutil.rmtree(self.rendezvous, ignore_errors=True)
            self.rendezvous.mkdir(parents=True)
        files = ["--rdzv-backend=c10d", f"--rdzv-endpoint={self.rendezvous / 'start'}", "--rdzv-conf=store_type=file"]
        here = ["--rdzv-id=engine", "--local-addr=127.0.0.1", f"--nproc-per-node={self.processes}"]
        return [sys.executable, "-m", "torch.distributed.run", *files, *here, "-m"]

    def environment(self) -> Mapping[str, str]:
        """Returns the variables of torchrun and the processes; interfaces that the operator has set take precedence."""
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        interfaces = {name: os.environ.get(name, loopback) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}  # torchrun's default, without its notice
        return {**interfaces, **threads, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", RENDEZVOUS: str(self.rendezvous)}
