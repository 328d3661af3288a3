"""Optional training in class statistics: of a predictor over the space's coordinates, and of the app's network."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fleetdistill.interruption import check_may_continue
from fleetdistill.knowledge import Array, ClassSpace
from fleetdistill.methods.base import Local
from fleetdistill.methods.classstats.config import SpaceConfig
from fleetdistill.methods.classstats.space_model import SpaceModel
from fleetdistill.methods.local import make_local_optimizer
from fleetdistill.progress import report_progress
from fleetdistill.seeds import derive_seed
from fleetdistill.training.local_training import TrainingReport, train_steps
from fleetdistill.training.losses import distillation_loss, soft_targets
from fleetdistill.training.portable_noise import portable_noise
from fleetdistill.training.tensor_data import LazyInputs

_FALLS_TO = 0.1
_TAUGHT_AT, _TAUGHT_WEIGHT, _NOISE = 2.0, 0.9, 0.05
_DRAWING_STEPS, _DRAWING_RATE, _DRAWN_AT_ONCE = 30, 0.05, 100


def draw_in_space(space: ClassSpace, rows: int, seed: int) -> tuple[Array, Array]:
    """Draws rows b_c + ξ of every class of the space, with portable normal noise ξ; rows are equal on all devices.

    Args:
        space: The fleet's space.
        rows: Number of rows of each class, at least 1.
        seed: Seed of the round.

    Returns:
        `[K * rows, q]` float32 and their labels `[K * rows]` int64, in the order of the labels.
    """
    count = space.centres.shape[1]
    drawn = [
        centre.astype(np.float64) + portable_noise(derive_seed(seed, "class", label), rows, count)
        for label, centre in zip(space.labels, space.centres, strict=True)
    ]
    return np.concatenate(drawn).astype(np.float32), np.repeat(np.array(space.labels, dtype=np.int64), rows)


def train_predictor(
    predictor: nn.Module,
    space: ClassSpace,
    coordinates_nq: Array,
    labels_n: Array,
    config: SpaceConfig,
    classes: int,
    draw_seed: int,
    seed: int,
) -> TrainingReport:
    """Trains a predictor on the device's rows and equally many drawn rows; the learning rate falls to a tenth.

    Args:
        predictor: Module from coordinates `[batch, C - 1]` to logits.
        space: The fleet's space.
        coordinates_nq: Coordinates of the device's rows, `[n, q]`; missing coordinates become zeros.
        labels_n: Classes of the device's rows, `[n]`.
        config: Optimiser, batch size, learning rate and minimum number of steps.
        classes: C.
        draw_seed: Seed of the drawn rows, the same on every device.
        seed: Seed of the order of the batches.

    Raises:
        KnowledgeError: The loss is not finite.
    """
    steps_a_pass = math.ceil(len(labels_n) / config.batch_size)
    passes = math.ceil(config.predictor_steps / steps_a_pass)
    every_step = passes * steps_a_pass * config.batch_size
    drawn, drawn_labels = draw_in_space(space, math.ceil(every_step / len(space.labels)), draw_seed)
    order = _in_order(len(drawn_labels), derive_seed(seed, "drawn"))
    optimizer = make_local_optimizer(config, predictor.parameters())
    own, others = _widen(coordinates_nq, classes - 1), _widen(drawn, classes - 1)
    labels, other_labels = torch.from_numpy(labels_n), torch.from_numpy(drawn_labels)

    def losses(epoch: int, rows_b: Tensor) -> list[Tensor]:
        _set_rate(optimizer, config.learning_rate * _FALLS_TO ** (epoch / max(passes - 1, 1)))
        taken = torch.tensor([next(order) for _ in range(len(rows_b))])
        logits = predictor(torch.cat([own[rows_b], others[taken]]))
        of_own = functional.cross_entropy(logits[: len(rows_b)], labels[rows_b])
        return [of_own + functional.cross_entropy(logits[len(rows_b) :], other_labels[taken])]

    return train_steps(
        predictor,
        len(labels_n),
        epochs=passes,
        batch_size=config.batch_size,
        optimizer=optimizer,
        losses=losses,
        generator=torch.Generator().manual_seed(seed),
        device="cpu",
    )


def _in_order(count: int, seed: int) -> Iterator[int]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=generator).tolist()


def _widen(rows_nq: Array, width: int) -> Tensor:
    wide = torch.zeros(len(rows_nq), width)
    wide[:, : rows_nq.shape[1]] = torch.tensor(rows_nq, dtype=torch.float32)
    return wide


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def teach_network(
    local: Local, general: SpaceModel, space: ClassSpace, config: SpaceConfig, draw_seed: int, seed: int
) -> TrainingReport:
    """Trains the app's own network towards the general variant, on own and on drawn images; nothing is sent.

    This was the best of the alternatives measured in benchmarks/RESULTS.md. With the personal variant as teacher the
    network learns only the labels; drawn images show classes of which the device has no samples.

    Args:
        local: The app's network and its data, images in [0, 1].
        general: The general variant, in eval mode.
        space: Space of the general variant.
        config: Optimiser, batch size, passes, learning rate and number of drawn images.
        draw_seed: Seed of the drawn images.
        seed: Seed of the order of the batches and of the images' shifts and noise.

    Raises:
        KnowledgeError: The loss is not finite.
    """
    own, labels = local.data.inputs, local.data.labels
    drawn = draw_images(general, space, own, config.drawn_images, draw_seed)
    generator = torch.Generator().manual_seed(derive_seed(seed, "images"))
    order = _in_order(len(drawn), derive_seed(seed, "drawn")) if len(drawn) else None
    optimizer = make_local_optimizer(config, local.model.parameters())
    passes = config.own_network_epochs

    where = local.torch_device

    def losses(epoch: int, rows_b: Tensor) -> list[Tensor]:
        _set_rate(optimizer, config.own_network_rate * _FALLS_TO ** (epoch / max(passes - 1, 1)))
        moved = _move(own[rows_b.cpu()], generator)
        images = moved if order is None else torch.cat([moved, drawn[[next(order) for _ in range(len(rows_b))]]])
        with torch.no_grad():
            soft = soft_targets(general(images), _TAUGHT_AT).to(where)
        logits = local.model(images.to(where))
        of_labels = functional.cross_entropy(logits[: len(rows_b)], labels[rows_b.cpu()].to(where))
        return [(1 - _TAUGHT_WEIGHT) * of_labels + _TAUGHT_WEIGHT * distillation_loss(logits, soft, _TAUGHT_AT)]

    return train_steps(
        local.model,
        len(labels),
        epochs=passes,
        batch_size=config.batch_size,
        optimizer=optimizer,
        losses=losses,
        generator=torch.Generator().manual_seed(seed),
        device=where,
    )


def draw_images(
    general: SpaceModel, space: ClassSpace, images_nchw: Tensor | LazyInputs, count: int, seed: int
) -> Tensor:
    """Makes images whose coordinates are near drawn rows of every class, by gradient steps on own images.

    Args:
        general: A model in `space`; gradients pass through its extractor.
        space: The fleet's space.
        images_nchw: Own images to start from, at least one.
        count: Number of images to make, at least 0.
        seed: Seed of the drawn rows and of the choice of images.

    Returns:
        `[count, channels, height, width]` in [0, 1].
    """
    if not count:
        return images_nchw[:0]
    classes = len(space.labels)
    rows, _ = draw_in_space(space, -(-count // classes), derive_seed(seed, "images"))
    chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:count]
    wanted = _widen(rows, general.above.origin.shape[0])[chosen]
    begin = torch.randint(len(images_nchw), (count,), generator=torch.Generator().manual_seed(derive_seed(seed, "own")))
    batches = zip(images_nchw[begin].split(_DRAWN_AT_ONCE), wanted.split(_DRAWN_AT_ONCE), strict=True)
    return torch.cat([_invert(general, images, rows_v) for images, rows_v in batches])


def _invert(general: SpaceModel, images: Tensor, wanted_v: Tensor) -> Tensor:
    result = images.clone().requires_grad_()
    optimizer = torch.optim.Adam([result], lr=_DRAWING_RATE)
    for number in range(_DRAWING_STEPS):
        check_may_continue()
        report_progress("training", number / _DRAWING_STEPS)
        optimizer.zero_grad()
        (general.coordinates(result) - wanted_v).square().sum(dim=1).mean().backward()
        optimizer.step()
        with torch.no_grad():
            result.clamp_(0, 1)
    return result.detach()


def _move(images_bchw: Tensor, generator: torch.Generator) -> Tensor:
    """Returns the images shifted by up to a fourteenth of their width, with repeated edges and Gaussian noise."""
    reach = max(images_bchw.shape[-1] // 14, 1)
    padded = functional.pad(images_bchw, (reach,) * 4, mode="replicate")
    top, left = torch.randint(2 * reach + 1, (2,), generator=generator).tolist()
    height, width = images_bchw.shape[-2:]
    noise = torch.randn(images_bchw.shape, generator=generator)
    return padded[..., top : top + height, left : left + width] + _NOISE * noise
