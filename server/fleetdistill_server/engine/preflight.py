"""What of a run.toml needs torch to be checked: the models are built and the data read, before anything is stored.

`fleetdistill serve` runs it as `python -m fleetdistill_server.engine.preflight`, so that its own process stays light.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from fleetdistill.errors import ConfigurationError, FleetDistillError
from fleetdistill.printable import printable
from fleetdistill.state.state_file import pack_state
from fleetdistill_server.config.run_config import RunConfig, load_run_config
from fleetdistill_server.engine.contract import build_method, make_contract
from fleetdistill_server.engine.starting_model import check_in_store
from fleetdistill_server.methods.evaluation import load_evaluation


@dataclass(frozen=True)
class Built:
    """What a run begins with.

    Attributes:
        state_bytes: Of the server half's state.
        initial_bytes: Of the weights that devices start from; 0 for none.
        proxy_samples: Of the proxy set; 0 for none.
    """

    state_bytes: int
    initial_bytes: int
    proxy_samples: int


def build(config: RunConfig) -> Built:
    """Builds all that a run begins with, and keeps nothing of it.

    Raises:
        ConfigurationError: Something cannot be built or read, or does not fit the run.
    """
    torch.set_num_threads(config.run.threads)
    try:
        method = build_method(config)
        check_in_store(config, method)
        contract, initial, _ = make_contract(config, method)
        state = pack_state(method.state_dict())
    except FleetDistillError as error:
        raise ConfigurationError(str(error)) from error
    except Exception as error:  # a model's own code may fail in any way
        text = printable(f"{type(error).__name__}: {error}").strip()
        raise ConfigurationError(
            f"the models of {config.run.method} cannot be built ({text}); check [model], and [contract] input_shape"
        ) from error
    given = initial.data_bytes if initial is not None else 0
    return Built(len(state), given, contract.proxy_samples)


def evaluation_samples(config: RunConfig) -> int:
    """How many samples the global model is scored on; 0 for none. Raises ConfigurationError if they do not fit."""
    file = config.evaluation.data
    if not file:
        return 0
    data = load_evaluation(file, len(config.contract.class_names()))
    shape, expected = list(data.inputs.shape[1:]), config.contract.input_shape
    if shape != expected:
        raise ConfigurationError(
            f"[evaluation] data: {file!r} has inputs of shape {shape}, [contract] input_shape is {expected}"
        )
    return len(data)


def main() -> int:
    """Entry point of the check's process: 1, and a sentence on standard output, if the run cannot begin so."""
    try:
        config = load_run_config(Path(sys.argv[1]))
        build(config)
        evaluation_samples(config)
    except ConfigurationError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
