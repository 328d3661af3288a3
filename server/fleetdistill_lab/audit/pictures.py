"""Reconstructs images from what devices send, and measures how similar they are to the originals.

Decoders, which the attacker trains on public rows, turn features back into images; gradients are inverted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import Array, SampleKnowledge, SharedStatistics
from fleetdistill.methods.feddkd.config import FedDKDConfig
from fleetdistill.methods.feddkd.device import mini_batch
from fleetdistill.training.parameters import tensors_of
from fleetdistill_lab.audit.audit import Recorded
from fleetdistill_lab.audit.knowledge import features_of, fit
from fleetdistill_lab.audit.networks import Step, steps_of
from fleetdistill_lab.audit.public_set import PublicSet
from fleetdistill_lab.audit.record import Message, Rows

PICTURES = 100
"""Most pictures of one kind."""
_OTHERS = 999
_MAX_GRADIENTS = 10
_STEPS, _RATE = 300, 0.1
_SMOOTHNESS = 1e-4
_NOISE, _SPREAD = 0.1, 0.3
_SMALL_SIDE = 16
_DECODER_RATE, _BATCH = 2e-3, 64
_EPOCHS, _EPOCHS_SMALL = 4, 30
_HIDDEN = 256
_WIDTHS = (24, 16)
_MIN_DEVIATION = 1e-3
_C1, _C2 = 0.01**2, 0.03**2


@dataclass(frozen=True)
class Pictures:
    """Reconstructions from one part.

    Attributes:
        part: Name of the part.
        source: What the pictures were made from, and with which decoder.
        originals: `[n, channels, height, width]` in [0, 1].
        pictures: Of the same shape.
        others: Images that nobody trained on, to tell the originals from.
        compared: What the originals are.
    """

    part: str
    source: str
    originals: Tensor
    pictures: Tensor
    others: Tensor
    compared: str = "original"

    def figures(self) -> dict[str, float]:
        """Returns mean SSIM, mean PSNR in dB, and the share of pictures that are nearest to their own original."""
        return {
            "ssim": float(ssim(self.pictures, self.originals).mean()),
            "psnr": float(psnr(self.pictures, self.originals).mean()),
            "reidentified": reidentified(self.pictures, self.originals, self.others),
        }


class Decoders:
    """Decoders from the features of the extractors that the server knows, one for each column and kind of images."""

    def __init__(self, recorded: Recorded, kinds: Mapping[str, Tensor]) -> None:
        """Trains nothing yet; `kinds` has the images to train decoders with, by their description."""
        self._recorded, self.kinds = recorded, kinds
        self._made: dict[tuple[str, str], tuple[nn.Module, Tensor]] = {}

    def pictures(self, kind: str, name: str, message: Message, features: Array, *, of_rows: bool) -> Tensor | None:
        """Returns pictures of features; None if the server does not know their extractor.

        Args:
            kind: A key of `kinds`.
            name: Name of the column or of the statistics.
            message: The message that contains the features.
            features: `[n, ...]`.
            of_rows: Whether they are features of rows, whose own moments then standardise them: the device may have
                trained the extractor since the server knew it.
        """
        if (kind, name) not in self._made:
            extractor = self._recorded.method.known_extractor(name, message.received)
            if extractor is None:
                return None
            self._made[kind, name] = _decoder(extractor, self.kinds[kind], features.shape[1:])
        decoder, known = self._made[kind, name]
        sent = torch.from_numpy(features.astype(np.float32))
        return decode(decoder, standardise(sent, by=sent if of_rows and len(sent) > 1 else known))


def _decoder(extractor: nn.Module, images: Tensor, shape: tuple[int, ...]) -> tuple[nn.Module, Tensor]:
    """Returns a decoder, and the features that it was trained with."""
    known = torch.from_numpy(features_of(fit(extractor, images), images)).float().reshape(-1, *shape)
    return fit_decoder(standardise(known, by=known), images), known


def reconstruct(recorded: Recorded, public: PublicSet, kinds: Mapping[str, Tensor]) -> list[Pictures]:
    """Makes pictures from every part that allows it, of the first and the last message of each kind.

    Args:
        recorded: The run.
        public: The public set.
        kinds: Images to train decoders with, by their description.

    Raises:
        ConfigurationError: The inputs are not images.
    """
    if len(recorded.method.context.input_shape) != 3:
        raise ConfigurationError("--pictures needs images [channels, height, width]; leave it out for other inputs")
    decoders, make = Decoders(recorded, kinds), partial(Pictures, others=_others(public))
    result: list[Pictures] = []
    for kind in kinds:
        for name, column, number in _columns(recorded):
            pairs = _from_features(recorded, decoders, kind, name, column, number)
            result += [make(name, f"{column}, round {number}, {kind}", *pairs)] if pairs else []
        for name in _statistics(recorded):
            pairs = _from_means(recorded, decoders, kind, name)
            result += [make(name, f"class means, {kind}", *pairs, compared="nearest own row")] if pairs else []
    return result + [make(*gradients) for gradients in _from_gradients(recorded, public.attacker.inputs.mean(dim=0))]


def _others(public: PublicSet) -> Tensor:
    return public.decoys.inputs[torch.randperm(len(public.decoys), generator=_generator())[:_OTHERS]]


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


# --- decoders


def _columns(recorded: Recorded) -> Iterator[tuple[str, str, int]]:
    """Yields part, column and round of the first and the last message with a feature column."""
    rounds: dict[tuple[str, str], list[int]] = {}
    for message in recorded.record.messages:
        for name, part in message.sent.items():
            for column in part.features if isinstance(part, SampleKnowledge) else ():
                rounds.setdefault((name, column), []).append(message.round)
    for (name, column), numbers in rounds.items():
        for number in sorted({min(numbers), max(numbers)}):
            yield name, column, number


def _from_features(
    recorded: Recorded, decoders: Decoders, kind: str, name: str, column: str, number: int
) -> tuple[Tensor, Tensor] | None:
    """Returns originals and pictures of some rows of each device."""
    originals, pictures = [], []
    most = -(-PICTURES // len(recorded.rows))
    for message in recorded.record.messages:
        part = message.sent.get(name)
        if message.round == number and isinstance(part, SampleKnowledge) and column in part.features:
            made = decoders.pictures(kind, column, message, part.features[column], of_rows=True)
            if made is not None:
                pictures.append(made[:most])
                originals.append(recorded.rows[message.device].inputs[part.sample_ids[:most]])
    return (torch.cat(originals), torch.cat(pictures)) if pictures else None


def _statistics(recorded: Recorded) -> list[str]:
    result = [
        name
        for message in recorded.record.messages
        for name, part in message.sent.items()
        if isinstance(part, SharedStatistics) and part.means is not None
    ]
    return list(dict.fromkeys(result))


def _from_means(recorded: Recorded, decoders: Decoders, kind: str, name: str) -> tuple[Tensor, Tensor] | None:
    """Returns for each class mean the row of the class that is nearest to its picture, and the picture."""
    originals: list[Tensor] = []
    pictures: list[Tensor] = []
    for message in recorded.record.messages:
        part = message.sent.get(name)
        if isinstance(part, SharedStatistics) and part.means is not None:
            made = decoders.pictures(kind, name, message, part.means, of_rows=False)
            if made is not None:
                rows = recorded.rows[message.device]
                originals += [_nearest(picture, rows, label) for picture, label in zip(made, part.labels, strict=True)]
                pictures += [*made]
    return (torch.stack(originals[:PICTURES]), torch.stack(pictures[:PICTURES])) if pictures else None


def _nearest(picture: Tensor, rows: Rows, label: int) -> Tensor:
    own = rows.inputs[rows.labels == label]
    return own[int((own - picture).flatten(1).norm(dim=1).argmin())]


# --- gradients


def _from_gradients(recorded: Recorded, start: Tensor) -> Iterator[tuple[str, str, Tensor, Tensor]]:
    """Yields part, source, originals and pictures of the first gradients, of up to 100 rows."""
    config = recorded.method.config
    if not isinstance(config, FedDKDConfig):  # another method may draw its batches differently
        return
    steps = [(device, step) for device in recorded.rows for step in steps_of(recorded.record.of(device))]
    taken = min(max(PICTURES // config.dkd_batch_size, 1), _MAX_GRADIENTS)
    spread = steps[:: max(len(steps) // taken, 1)][:taken]  # of all devices and rounds
    originals, pictures = [], []
    for device, step in spread:
        rows = recorded.rows[device].inputs
        batch = rows[mini_batch(len(rows), config.dkd_batch_size, step.seed)]
        made = invert(recorded, step, start)
        originals.append(batch)
        pictures.append(made[_match(made, batch)])
    if spread:
        rows_each = "one row" if config.dkd_batch_size == 1 else f"{config.dkd_batch_size} rows"
        source = f"gradients of {rows_each}"
        yield spread[0][1].name, source, torch.cat(originals), torch.cat(pictures)


def invert(recorded: Recorded, step: Step, start: Tensor) -> Tensor:
    """Returns images whose gradient points in the direction of the sent one, by 300 steps of Adam.

    A row's gradient is that of its logits' product with the difference of student's and teacher's probabilities. The
    bias of the last layer has the mean of these differences as its gradient; single ones are found with the images.

    Args:
        recorded: The run.
        step: The step whose gradient is inverted.
        start: Image to begin with, such as the mean public one.

    References:
        Geiping et al., Inverting Gradients, 2020: 1 - cosine, with a total variation.
    """
    context, batch = recorded.method.context, step.gradient.batch_size
    model = context.device_model().eval()
    student = {name: one.requires_grad_() for name, one in tensors_of(step.student.parameters).items()}
    state = {**dict(model.named_buffers()), **tensors_of(step.student.buffers), **student}
    target = [torch.from_numpy(np.array(step.gradient.gradients[name])) for name in student]
    noise = torch.randn(batch, *start.shape, generator=_generator())
    images = (start + _NOISE * noise).clamp(0, 1).requires_grad_()
    differences = _differences(target, batch, context.classes).requires_grad_()
    sought = [images, differences] if batch > 1 else [images]
    optimizer = torch.optim.Adam(sought, lr=_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _STEPS)
    for _ in range(_STEPS):
        product = (functional_call(model, state, (images,)) * differences).sum()
        gradients = torch.autograd.grad(product, [*student.values()], create_graph=True, materialize_grads=True)
        objective = 1 - _cosine(gradients, target) + _SMOOTHNESS * _variation(images)
        optimizer.zero_grad()
        objective.backward(inputs=sought)
        optimizer.step()
        schedule.step()
        images.data.clamp_(0, 1)
    return images.detach()


def _differences(target: list[Tensor], batch: int, classes: int) -> Tensor:
    """Returns a first guess of the rows' differences `[batch, C]`: the bias's gradient, with noise for several rows."""
    biases = [item for item in target if item.shape == (classes,)]
    mean = functional.normalize(biases[-1], dim=0) if biases else torch.zeros(classes)
    noise = torch.randn(batch, classes, generator=_generator())
    return mean + (_SPREAD * noise if batch > 1 or not biases else 0 * noise)


def _cosine(first: tuple[Tensor, ...], second: list[Tensor]) -> Tensor:
    both = [torch.cat([item.flatten() for item in part]) for part in (first, second)]
    return functional.cosine_similarity(both[0], both[1], dim=0)


def _variation(images: Tensor) -> Tensor:
    return images.diff(dim=2).abs().mean() + images.diff(dim=3).abs().mean()


def _match(pictures: Tensor, originals: Tensor) -> Tensor:
    """Returns for each original the nearest picture: a gradient does not contain the order of its rows."""
    return torch.cdist(originals.flatten(1), pictures.flatten(1)).argmin(dim=1)


def fit_decoder(features: Tensor, images: Tensor) -> nn.Module:
    """Trains a decoder with mean squared error.

    It has convolutions of width 24, 16 and the image's channels with upsampling; or 256 hidden units for flat features
    and for images below 16 pixels a side.

    Args:
        features: `[n, channels, h, w]` or `[n, F]` float32, standardised.
        images: `[n, channels, height, width]` in [0, 1].
    """
    small = min(images.shape[2:]) < _SMALL_SIDE or features.ndim != 4
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        decoder = _dense(features, images) if small else _Convolutions(images)
        decoder(features[:2])  # sets the shapes of lazy layers
    optimizer, generator = torch.optim.Adam(decoder.parameters(), _DECODER_RATE), torch.Generator().manual_seed(0)
    for _ in range(_EPOCHS_SMALL if small else _EPOCHS):
        for rows in torch.randperm(len(images), generator=generator).split(_BATCH):
            optimizer.zero_grad()
            functional.mse_loss(decoder(features[rows]), images[rows]).backward()
            optimizer.step()
    return decoder.eval()


def decode(decoder: nn.Module, features: Tensor) -> Tensor:
    """Returns images in [0, 1] of features."""
    with torch.no_grad():
        return decoder(features).clamp(0, 1)  # type: ignore[no-any-return]  # a module's call


def standardise(features: Tensor, by: Tensor) -> Tensor:
    """Returns features centred and scaled by the moments of `by`, `[m, ...]` with m at least 2."""
    deviation = by.std(dim=0)
    return (features - by.mean(dim=0)) / (deviation + _MIN_DEVIATION * deviation.mean() + 1e-12)


def _dense(features: Tensor, images: Tensor) -> nn.Module:
    inputs, outputs = features[0].numel(), images[0].numel()
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(inputs, _HIDDEN),
        nn.ReLU(),
        nn.Linear(_HIDDEN, outputs),
        nn.Unflatten(1, images.shape[1:]),
    )


class _Convolutions(nn.Module):
    """3x3 convolutions with upsampling to half and to all of the image."""

    def __init__(self, images: Tensor) -> None:
        super().__init__()
        first, second = _WIDTHS
        self._size = tuple(images.shape[2:])
        self._first = nn.LazyConv2d(first, 3, padding=1)
        self._second = nn.Conv2d(first, second, 3, padding=1)
        self._last = nn.Conv2d(second, images.shape[1], 3, padding=1)

    def forward(self, features: Tensor) -> Tensor:
        """Returns images of feature maps."""
        half = [(side + 1) // 2 for side in self._size]
        x = functional.interpolate(self._first(features).relu(), size=half)
        x = functional.interpolate(self._second(x).relu(), size=self._size)
        return self._last(x)  # type: ignore[no-any-return]  # a module's call


def ssim(first_bchw: Tensor, second_bchw: Tensor) -> Tensor:
    """Returns the structural similarity of image pairs with values in [0, 1].

    Uniform windows of 7x7 pixels, of 3x3 for images below 16 pixels a side.

    Args:
        first_bchw: `[batch, channels, height, width]`.
        second_bchw: Of the same shape.

    Returns:
        `[batch]`, at most 1.

    References:
        Wang et al., Image Quality Assessment: From Error Visibility to Structural Similarity, 2004, eq. (13).
    """
    window = 7 if min(first_bchw.shape[2:]) >= _SMALL_SIDE else 3
    pixels = window * window

    def mean(values: Tensor) -> Tensor:
        return functional.avg_pool2d(values, window, stride=1)

    x, y = first_bchw.double(), second_bchw.double()
    mean_x, mean_y = mean(x), mean(y)
    unbiased = pixels / (pixels - 1)
    var_x, var_y = unbiased * (mean(x * x) - mean_x**2), unbiased * (mean(y * y) - mean_y**2)
    covariance = unbiased * (mean(x * y) - mean_x * mean_y)
    numerator = (2 * mean_x * mean_y + _C1) * (2 * covariance + _C2)
    return (numerator / ((mean_x**2 + mean_y**2 + _C1) * (var_x + var_y + _C2))).mean(dim=(1, 2, 3))


def psnr(first_bchw: Tensor, second_bchw: Tensor) -> Tensor:
    """Returns the peak signal-to-noise ratio of image pairs with values in [0, 1], in dB; `[batch]`."""
    error = (first_bchw - second_bchw).double().square().mean(dim=(1, 2, 3))
    return -10 * torch.log10(error.clamp_min(1e-12))


def reidentified(pictures_bchw: Tensor, originals_bchw: Tensor, others_nchw: Tensor) -> float:
    """Returns the share of pictures that are nearer to their original than to every other image (mean squared error).

    Args:
        pictures_bchw: Reconstructions.
        originals_bchw: The image behind each.
        others_nchw: Images to tell it from.
    """
    pictures, originals = pictures_bchw.flatten(1).double(), originals_bchw.flatten(1).double()
    own = (pictures - originals).norm(dim=1)
    nearest = torch.cdist(pictures, others_nchw.flatten(1).double()).min(dim=1).values
    return float((own < nearest).double().mean())
