"""DaFKD: the generator, and the samples that it gives a device."""

from __future__ import annotations

import torch
from torch import Tensor

from fleetdistill.methods.dafkd.config import DaFKDConfig
from fleetdistill.models import build_generator
from fleetdistill.models.dafkd import NoiseGenerator
from fleetdistill.training.local_training import extract
from fleetdistill.training.portable_noise import portable_noise


def make_generator(config: DaFKDConfig, shape: tuple[int, ...], classes: int) -> NoiseGenerator:
    """The generator of a configuration that is complete for its number of classes, with fresh weights.

    Args:
        config: As `for_classes` gives it.
        shape: Shape of one sample: an input, or the features that the last layer reads.
        classes: C of the contract.
    """
    assert config.generator is not None
    labels = classes if config.label_condition else 0
    return build_generator(config.generator, shape=shape, noise_dim=config.noise_dim, classes=labels)


def distillation_samples(generator: NoiseGenerator, noise_seed: int, count: int, device: torch.device) -> Tensor:
    """The samples `[count, *shape]` that a seed names: the same for every device and the server, in eval mode.

    A generator with labels gets label i modulo C for sample i.
    """
    noise_md = torch.from_numpy(portable_noise(noise_seed, count, generator.noise_dim))
    rows = torch.arange(count)

    def generate(rows_b: Tensor) -> Tensor:
        labels_b = (rows_b % generator.classes).to(device) if generator.classes else None
        return generator(noise_md[rows_b.cpu()].to(device), labels_b)  # type: ignore[no-any-return]

    return extract(generate, rows, model=generator).to(device)
