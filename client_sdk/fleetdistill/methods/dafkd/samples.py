"""DaFKD's generator, and the distillation samples that are drawn from it."""

from __future__ import annotations

import torch
from torch import Tensor

from fleetdistill.methods.dafkd.config import DaFKDConfig
from fleetdistill.models import build_generator
from fleetdistill.models.dafkd import NoiseGenerator
from fleetdistill.training.local_training import extract
from fleetdistill.training.portable_noise import portable_noise


def make_generator(config: DaFKDConfig, shape: tuple[int, ...], classes: int) -> NoiseGenerator:
    """Returns a generator with new weights.

    Args:
        config: A configuration that `for_classes` returned.
        shape: Shape of one sample: an input, or an input of the last layer.
        classes: Number of classes in the contract.
    """
    assert config.generator is not None
    labels = classes if config.label_condition else 0
    return build_generator(config.generator, shape=shape, noise_dim=config.noise_dim, classes=labels)


def distillation_samples(generator: NoiseGenerator, noise_seed: int, count: int, device: torch.device) -> Tensor:
    """Returns the generator's samples for a noise seed, in eval mode; equal on the server and all devices.

    A generator with labels gets label i modulo C for sample i.

    Args:
        generator: On `device`.
        noise_seed: Seed of the portable noise, in [0, 2**64).
        count: Number of samples, at least 1.
        device: Device to compute on.

    Returns:
        `[count, *shape]` float32, on `device`.
    """
    noise_md = torch.from_numpy(portable_noise(noise_seed, count, generator.noise_dim))
    rows = torch.arange(count)

    def generate(rows_b: Tensor) -> Tensor:
        labels_b = (rows_b % generator.classes).to(device) if generator.classes else None
        return generator(noise_md[rows_b.cpu()].to(device), labels_b)  # type: ignore[no-any-return]

    return extract(generate, rows, model=generator).to(device)
