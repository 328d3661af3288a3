"""A custom method in one file: FedProx, which keeps local training close to the global model.

    python examples/own_method.py                    # in this process
    python examples/own_method.py --link grpc        # server and devices in separate processes
    cd examples && fleetdistill simulate --import own_method --method proximal --set method.mu=0.1

In run.toml: `[run] import = ["own_method"]`, `method = "proximal"`. The app imports this module, or installs a package
that declares it as an entry point (docs/reference/extending.md, "A method of your own").

Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020, algorithm 2: in round t device k minimises
h_k(w; w_t) = F_k(w) + mu/2 ||w - w_t||^2, and the server averages. With mu = 0 it is FedAvg.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from fleetdistill import methods as device_methods
from fleetdistill.methods.base import Ask, check_range
from fleetdistill.methods.fedavg.config import FedAvgConfig
from fleetdistill.methods.fedavg.device import FedAvgDevice
from fleetdistill_lab import Simulation, simulate
from fleetdistill_server import register
from fleetdistill_server.methods.fedavg import FedAvgServer


@dataclass(frozen=True, kw_only=True)
class FedProxConfig(FedAvgConfig):
    """Settings of FedAvg, and the weight of the proximal term; the paper tries 0.001, 0.01, 0.1 and 1."""

    mu: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("mu", self.mu, 0)


def proximal_term(model: nn.Module, start: list[Tensor], mu: float) -> Tensor:
    """Returns mu/2 ||w - w_t||^2 over the trainable parameters; `start` has the global model's."""
    return mu / 2 * sum(((w - w_t) ** 2).sum() for w, w_t in zip(model.parameters(), start, strict=True))


class FedProxDevice(FedAvgDevice):
    """Device half: FedAvg's, with the proximal term in the loss."""

    config: FedProxConfig

    def begin(self, ask: Ask) -> None:
        """Keeps w_t, which the model has at the start of a round."""
        self.w_t = [w.detach().clone() for w in self.local.model.parameters()]

    def loss(self, inputs_b: Tensor, labels_b: Tensor) -> Tensor:
        """Returns h_k(w; w_t) on a mini-batch."""
        return super().loss(inputs_b, labels_b) + proximal_term(self.local.model, self.w_t, self.config.mu)


class FedProxServer(FedAvgServer):
    """Server half: FedAvg's weighted mean."""

    summary = "FedAvg with a proximal term in local training"


device_methods.register("proximal", FedProxConfig, FedProxDevice)
register("proximal", FedProxServer)


def main() -> None:
    """Compares FedAvg and FedProx with several mu on the same fleet; mu = 0 gives exactly FedAvg's accuracy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--link", choices=["memory", "grpc"], default="memory")
    parser.add_argument("--out", type=Path, default=Path("out/own_method"))
    given = parser.parse_args()
    fleet = {"devices": 4, "alpha": 0.1, "models": ("digits_mlp_small",), "rounds": given.rounds, "link": given.link}
    for name, method, settings in (
        ("FedAvg", "fedavg", {"local_epochs": 5}),
        *((f"FedProx, mu = {mu:g}", "proximal", {"local_epochs": 5, "mu": mu}) for mu in (0.0, 0.1, 1.0)),
    ):
        wanted = Simulation(
            method=method, settings=settings, with_alone=False, with_fedavg=False, out=given.out / name, **fleet
        )
        report = simulate(wanted, if_there="overwrite")
        print(f"{name:18} global model {report.global_accuracy_by_round[-1]:.2%}", flush=True)


if __name__ == "__main__":
    main()
