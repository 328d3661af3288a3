"""Checks the parts of a run.toml that need torch: builds the models and reads the data, without storing anything.

`fleetdistill serve` runs it as `python -m fleetdistill_server.engine.preflight`, to keep torch out of its own process.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from fleetdistill.errors import ConfigurationError, FleetDistillError
from fleetdistill.models.pretrained import images_of
from fleetdistill.printable import printable
from fleetdistill.state.state_file import pack_state
from fleetdistill.training.model import output_shape
from fleetdistill_server.config.run_config import RunConfig, load_run_config
from fleetdistill_server.engine.contract import build_method, make_contract
from fleetdistill_server.engine.starting_model import check_in_store
from fleetdistill_server.methods.base import ServerMethod
from fleetdistill_server.texts import readable_bytes
from fleetdistill_server.training.evaluation import load_evaluation

__all__ = ["build_run"]


@dataclass(frozen=True)
class Built:
    """Sizes of the objects that a new run begins with.

    Attributes:
        state_bytes: Size of the server half's state, in bytes.
        initial_bytes: Size of the devices' initial weights, in bytes; 0 if the method distributes no weights.
        proxy_samples: Number of samples in the proxy set; 0 if the run has no proxy set.
        extractor: What an extractor of a library or of the operator's does with the inputs, and warnings, as lines.
    """

    state_bytes: int
    initial_bytes: int
    proxy_samples: int
    extractor: tuple[str, ...]


def build_run(config: RunConfig) -> Built:
    """Builds a run's models, contract and initial state, and returns their sizes.

    Raises:
        ConfigurationError: A model cannot be built, a file cannot be read, or one of them does not fit the run.
    """
    torch.set_num_threads(config.run.threads)
    try:
        method = build_method(config)
        check_in_store(config, method)
        contract, initial, file = make_contract(config, method)
        state = pack_state(method.state_dict())
        extractor = _describe_extractor(config, method, 0 if file is None else file.data_bytes)
    except FleetDistillError as error:
        raise ConfigurationError(str(error)) from error
    except Exception as error:  # a model's own code may fail in any way
        if is_out_of_memory(error):
            raise
        text = printable(f"{type(error).__name__}: {error}").strip()
        raise ConfigurationError(
            f"the models of {config.run.method} cannot be built ({text}); check [model], and [contract] input_shape"
        ) from error
    given = initial.data_bytes if initial is not None else 0
    return Built(len(state), given, contract.proxy_samples, extractor)


def _describe_extractor(config: RunConfig, method: ServerMethod, file_bytes: int) -> tuple[str, ...]:
    name = config.model.extractor
    if ":" not in name or not method.needs(method.config).same_extractor:
        return ()
    extractor, shape = method.context.extractor(), config.contract.input_shape
    features = prod(output_shape(extractor, shape))
    file = f"; {readable_bytes(file_bytes)} for a device without PyTorch" if file_bytes else ""
    images = images_of(extractor)
    if images is None:
        text = f"{features} features of inputs {shape} as they are: the factory must resize and normalise them"
        return (f"extractor {name}: {text}{file}",)
    size = f"{images.size}x{images.size}"
    lines = [f"extractor {name}: {features} features of images {shape} in [0, 1], resized to {size}, normalised{file}"]
    if min(shape[1:]) < images.size:
        lines.append(
            f"warning: the images are smaller than the {size} of the weights; they are enlarged, and each costs as "
            f"much as one of {size}"
        )
    if max(shape[1:]) > images.size:
        lines.append(
            f"warning: the images are larger than the {size} of the weights; they are reduced without an antialias "
            "filter"
        )
    return tuple(lines)


def range_warnings(config: RunConfig) -> list[str]:
    """Returns a warning if evaluation images for a pretrained extractor are outside [0, 1], as the devices' may be too.

    Raises:
        ConfigurationError: The evaluation data cannot be read.
    """
    if not config.evaluation.data or not config.model.has_library_extractor:
        return []
    inputs = load_evaluation(config.evaluation.data, len(config.contract.class_names())).inputs
    low, high = float(inputs.min()), float(inputs.max())
    if low >= 0 and high <= 1:
        return []
    return [f"warning: [evaluation] data has values in [{low:g}, {high:g}], but the extractor needs images in [0, 1]"]


_OUT_OF_MEMORY = ("not enough memory", "can't allocate memory", "std::bad_alloc")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Returns whether an error, or one of its causes, says that Python, NumPy or PyTorch had not enough memory."""
    if isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY):
        return True
    return isinstance(error, MemoryError) or (error is not None and is_out_of_memory(error.__cause__))


def evaluation_samples(config: RunConfig) -> int:
    """Returns the number of evaluation samples, or 0 if the run has no evaluation data.

    Raises:
        ConfigurationError: The file cannot be read, or its inputs do not have the contract's shape.
    """
    file = config.evaluation.data
    if not file:
        return 0
    data = load_evaluation(file, len(config.contract.class_names()))
    shape = list(data.inputs.shape[1:])
    expected = config.contract.input_shape
    if shape != expected:
        raise ConfigurationError(
            f"[evaluation] data: {file!r} has inputs of shape {shape}, but [contract] input_shape is {expected}"
        )
    return len(data)


def main() -> int:
    """Entry point of the preflight process; prints the error and returns 1 if the configuration cannot run."""
    try:
        config = load_run_config(Path(sys.argv[1]))
        build_run(config)
        evaluation_samples(config)
    except ConfigurationError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
