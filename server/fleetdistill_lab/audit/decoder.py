"""Decoders: networks that an attacker trains on public rows to turn features back into images."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

_SMALL_SIDE = 16
_RATE, _BATCH = 2e-3, 64
_EPOCHS, _EPOCHS_SMALL = 4, 30
_HIDDEN = 256
_WIDTHS = (24, 16)
_MIN_DEVIATION = 1e-3


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
    optimizer, generator = torch.optim.Adam(decoder.parameters(), _RATE), torch.Generator().manual_seed(0)
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
