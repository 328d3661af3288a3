"""Local models with a named cut, and the four taps that methods use.

A method asks a model for its logits, its embedding (the input of the last layer), its features at a cut, or for
the rest of the network from a cut on. `SplitModel` gives all four for any network that is a chain of stages;
`FeatureModel` says what a module must offer that splits itself, and `check_local_model` tells whether it does.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fleetdistill.errors import ModelError

__all__ = [
    "FeatureModel",
    "SplitModel",
    "check_local_model",
    "embedding_tap",
    "evaluating",
    "fingerprint",
    "frozen_batch_norm",
    "in_mode",
    "logits_and_embedding",
    "output_shape",
    "parameter_count",
    "split_sequential",
]

Cut: TypeAlias = str | int
"""A place in a chain of stages: the name of the stage it comes after, or how many stages lie below it (from 1)."""


class FeatureModel(Protocol):
    """What a method needs of a local model: a module that can be entered and left at its cut.

    For a module that brings these itself; a chain of layers becomes one through `split_sequential`. In eval mode
    `predict(features(x))` must equal `model(x)`. Use `check_local_model` rather than `isinstance`: from Python 3.12 on
    protocols do not see submodules, and `extractor` usually is one.
    """

    @property
    def extractor(self) -> nn.Module:
        """The layers below the cut. Devices that share an extractor architecture can load each other's state."""

    def features(self, x: Tensor, /) -> Tensor:
        """Features at the cut, `[batch, *feature_shape]` float, of inputs `[batch, *input_shape]`."""

    def predict(self, features: Tensor, /) -> Tensor:
        """Logits `[batch, classes]` of features `[batch, *feature_shape]`, float."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """Logits `[batch, classes]` of inputs `[batch, *input_shape]`, float."""


class SplitModel(nn.Module):
    """A chain of named stages with a cut between extractor and predictor.

    A method that moves its cut (FedD2S) gives `cut=` to `features` and `predict`; everything else uses the model's own.

    Attributes:
        stages: All stages in order. The last one ends in the layer that makes the logits.
        cut: Name of the stage after which the model is cut.
    """

    stages: nn.Sequential

    def __init__(self, stages: Mapping[str, nn.Module] | nn.Sequential, cut: Cut) -> None:
        """Joins the stages to one model; the modules are used, not copied.

        Args:
            stages: Two or more stages by name, first to last.
            cut: Where the extractor ends; at least one stage must follow.

        Raises:
            ModelError: Fewer than two stages, a cut that is not there, or nothing after the cut.
        """
        super().__init__()
        self.stages = stages if isinstance(stages, nn.Sequential) else nn.Sequential(OrderedDict(stages))
        below = self.depth_of(cut)
        if below == len(self.stages):
            raise ModelError(f"cut {cut!r} is after the last stage; leave at least one stage for the predictor")
        self.cut = self.stage_names[below - 1]

    @property
    def stage_names(self) -> tuple[str, ...]:
        """Names of all stages; each is a possible cut, the last one for logits."""
        return tuple(self.stages._modules)

    @property
    def extractor(self) -> nn.Sequential:
        """The stages below the cut, as a view that shares its modules with this model.

        Its state dict does not depend on the predictor: load it into any model with the same extractor stages.
        """
        return self.stages[: self.depth_of(self.cut)]

    @property
    def predictor(self) -> nn.Sequential:
        """The stages above the cut, as a view that shares its modules with this model."""
        return self.stages[self.depth_of(self.cut) :]

    def depth_of(self, cut: Cut) -> int:
        """Number of stages below a cut, in `[1, stages]`.

        Raises:
            ModelError: The model has no such cut.
        """
        names = self.stage_names
        if isinstance(cut, str) and cut in names:
            return names.index(cut) + 1
        if isinstance(cut, int) and not isinstance(cut, bool) and 1 <= cut <= len(names):
            return cut
        raise ModelError(
            f"the model cannot be cut at {cut!r}; give the name of a stage ({', '.join(names)}) "
            f"or the number of stages below the cut, 1 to {len(names)}"
        )

    def stage_shapes(self, input_shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """What `features` gives of one sample at the cut after each stage, by the stage's name, first to last.

        Raises:
            ModelError: The model does not take samples of this shape.
        """
        depths = enumerate(self.stage_names, start=1)
        return {name: output_shape(self.stages[:depth], input_shape) for depth, name in depths}

    def forward(self, x: Tensor) -> Tensor:
        """Logits `[batch, classes]` of inputs `[batch, *input_shape]`."""
        return cast(Tensor, self.stages(x))

    def features(self, x: Tensor, cut: Cut | None = None) -> Tensor:
        """Output of the stages below a cut, `[batch, *feature_shape]`; logits for a cut after the last stage.

        Args:
            x: Inputs, `[batch, *input_shape]`.
            cut: Another cut than the model's own.

        Raises:
            ModelError: The model has no such cut.
        """
        return cast(Tensor, self.stages[: self.depth_of(self.cut if cut is None else cut)](x))

    def predict(self, features: Tensor, cut: Cut | None = None) -> Tensor:
        """Logits `[batch, classes]` of features at a cut: the rest of the network from there on.

        Args:
            features: What `features(x, cut)` returns, of this model or of one that fits it.
            cut: Another cut than the model's own; after the last stage, features are logits and come back as they are.

        Raises:
            ModelError: The model has no such cut.
        """
        return cast(Tensor, self.stages[self.depth_of(self.cut if cut is None else cut) :](features))

    def embedding(self, x: Tensor) -> Tensor:
        """Input of the last layer, `[batch, F]` in all models of the zoo.

        The last layer is the last module of the last stage, however deep chains are nested in it.

        Args:
            x: Inputs, `[batch, *input_shape]`.
        """
        return self.below_last(x)[0]

    def with_embedding(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits `[batch, classes]` and embedding `[batch, F]` of one pass over inputs `[batch, *input_shape]`."""
        below, last = self.below_last(x)
        return cast(Tensor, last(below)), below

    def below_last(self, x: Tensor) -> tuple[Tensor, nn.Module]:
        below, last = self.stages[:-1](x), self.stages[-1]
        while isinstance(last, nn.Sequential):
            below, last = last[:-1](below), last[-1]
        return cast(Tensor, below), last


def embedding_tap(model: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """The model's method `embedding`, inputs to `[batch, F]`; None where it has none, or only a layer of that name."""
    tap = getattr(model, "embedding", None)
    return tap if callable(tap) and not isinstance(tap, nn.Module) else None


def logits_and_embedding(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Both taps: in one pass where the model can (`with_embedding`), else in two.

    Raises:
        ModelError: The model has no embedding.
    """
    if isinstance(model, SplitModel):
        return model.with_embedding(x)
    tap = embedding_tap(model)
    if tap is None:
        raise ModelError(f"{type(model).__name__} has no embedding(x), the input of its last layer; add this method")
    return model(x), tap(x)


def split_sequential(model: nn.Sequential, after: Cut) -> SplitModel:
    """Names the cut of a plain chain of layers; the layers are shared with `model`, not copied.

    Args:
        model: Two or more layers. Layers without a name of their own are called "0", "1", ...
        after: Name of the extractor's last layer ("3"), or the number of layers in the extractor (4).

    Raises:
        ModelError: `model` is not an `nn.Sequential`, or it has no such cut.
    """
    if not isinstance(model, nn.Sequential):
        raise ModelError(
            f"split_sequential takes an nn.Sequential, not {type(model).__name__}; "
            "give a module of another kind `extractor`, `features` and `predict` instead"
        )
    return SplitModel(model, after)


def check_local_model(model: nn.Module, samples: Tensor | None = None, classes: int | None = None) -> FeatureModel:
    """Says whether a module is a local model, before anything is trained or sent.

    Args:
        model: An app's model.
        samples: A few inputs `[batch, *input_shape]`; with them the taps are tried in eval mode, without they are
            only looked up. Neither weights nor batch-norm statistics change.
        classes: Columns that the logits must have; not checked when `None`.

    Returns:
        `model` itself, typed as what it was found to be.

    Raises:
        ModelError: What is missing or does not agree, and what to do about it.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"a local model is a torch.nn.Module, not {type(model).__name__}")
    missing = [name for name in ("features", "predict") if not callable(getattr(model, name, None))]
    if not isinstance(getattr(model, "extractor", None), nn.Module):
        missing.append("extractor")
    if missing:
        raise ModelError(
            f"{type(model).__name__} has no {' and no '.join(missing)}; wrap a chain of layers with split_sequential("
            "model, after=...), or add `extractor` (a submodule), `features(x)` and `predict(features)`"
        )
    _refuse_foreign_extractor(model)
    taps = cast(FeatureModel, model)
    if samples is not None:
        _try_taps(model, taps, samples, classes)
    return taps


def _refuse_foreign_extractor(model: nn.Module) -> None:
    extractor = cast(nn.Module, model.extractor)
    if {id(p) for p in extractor.parameters()} <= {id(p) for p in model.parameters()}:
        return
    raise ModelError(
        f"the extractor of {type(model).__name__} has parameters that the model does not have, "
        "so training the model would not train it; build both from the same layers"
    )


def _try_taps(model: nn.Module, taps: FeatureModel, samples: Tensor, classes: int | None) -> None:
    name = type(model).__name__
    try:
        with evaluating(model), torch.no_grad():
            logits, again = taps(samples), taps.predict(taps.features(samples))
    except Exception as error:  # whatever an app's own code raises is the model's fault here
        raise ModelError(f"{name} fails on samples of shape {tuple(samples.shape)}: {error}") from error
    if logits.ndim != 2 or len(logits) != len(samples) or (classes is not None and logits.shape[1] != classes):
        expected = f"[{len(samples)}, {'classes' if classes is None else classes}]"
        raise ModelError(f"{name} gives logits of shape {tuple(logits.shape)}, expected {expected}")
    if again.shape != logits.shape or not torch.allclose(again, logits, rtol=1e-3, atol=1e-4):
        raise ModelError(f"{name}: predict(features(x)) differs from model(x); both must run the same layers")


@contextmanager
def in_mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Train or eval mode for a while, afterwards every submodule's own: a frozen layer may differ from its parent."""
    before = [(part, part.training) for part in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for part, was_training in before:
            part.training = was_training


def evaluating(module: nn.Module) -> AbstractContextManager[None]:
    """Eval mode for a while."""
    return in_mode(module, training=False)


@contextmanager
def frozen_batch_norm(module: nn.Module, frozen: bool = True) -> Iterator[None]:
    """Lets batch-norm layers use their statistics without changing them; everything else stays in its mode.

    For data that are not the model's own, such as generated samples.

    Args:
        module: Any module.
        frozen: False does nothing, for a setting that switches this off.
    """
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm) and part.training] if frozen else []
    for norm in norms:
        norm.training = False
    try:
        yield
    finally:
        for norm in norms:
            norm.training = True


def output_shape(module: nn.Module, input_shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of what a module makes of one sample, for instance the feature shape of an extractor.

    Args:
        module: Anything that maps `[batch, *input_shape]` to `[batch, *shape]`. Its state does not change.
        input_shape: Shape of one sample.

    Raises:
        ModelError: The module does not take such samples.
    """
    parameter = next(module.parameters(), torch.empty(0))
    zeros = torch.zeros(1, *input_shape, dtype=parameter.dtype, device=parameter.device)
    try:
        with evaluating(module), torch.no_grad():
            return tuple(module(zeros).shape[1:])
    except RuntimeError as error:
        raise ModelError(
            f"{type(module).__name__} does not take samples of shape {tuple(input_shape)}: {error}"
        ) from error


def parameter_count(module: nn.Module) -> int:
    """Number of parameters; one that is used in several places counts once, buffers do not count."""
    return sum(parameter.numel() for parameter in module.parameters())


def fingerprint(module: nn.Module, cuts: Sequence[Cut] = ()) -> str:
    """Names an architecture: equal fingerprints mean that state dicts fit each other and the cuts agree.

    Values, devices and training modes do not count, nor do layers that have no state (a ReLU, a pooling).

    Args:
        module: A model, an extractor or a predictor.
        cuts: The cuts that the run uses.

    Returns:
        SHA-256 in hex over the sorted (name, shape, element type, parameter or buffer) and the cuts.

    Raises:
        ModelError: A lazy layer has no shape yet.
    """
    try:
        entries = sorted(_entries(module))
    except RuntimeError as error:  # shape of an uninitialised lazy parameter
        raise ModelError(f"{type(module).__name__} has lazy layers; run one batch through it first") from error
    canonical = json.dumps({"entries": entries, "cuts": list(cuts)}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _entries(module: nn.Module) -> Iterator[tuple[str, list[int], str, str]]:
    state: dict[str, Any] = module.state_dict(keep_vars=True)
    for name, value in state.items():
        if isinstance(value, Tensor):  # a module's extra state may be anything
            kind = "parameter" if isinstance(value, nn.Parameter) else "buffer"
            yield name, list(value.shape), str(value.dtype).removeprefix("torch."), kind
