"""Local models with a named cut, and the four outputs that methods use.

Methods use a model's logits, its embedding (the input of the last layer), its features at a cut, and the logits of
given features. `SplitModel` provides all four for any chain of stages. `FeatureModel` is the protocol of a module that
implements its own split, and `check_local_model` checks it.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from fleetdistill.errors import ModelError

__all__ = [
    "FeatureModel",
    "SplitModel",
    "check_embedding",
    "check_local_model",
    "display_name",
    "embedding_tap",
    "evaluating",
    "fingerprint",
    "frozen",
    "frozen_batch_norm",
    "in_mode",
    "logits_and_embedding",
    "output_shape",
    "parameter_count",
    "place_of_inputs",
    "split_sequential",
]

Cut: TypeAlias = str | int
"""A position in a chain of stages: the name of the stage before it, or the number of stages before it (from 1)."""


class FeatureModel(Protocol):
    """Protocol of a local model that implements its own split; `split_sequential` splits a chain of layers.

    In eval mode `predict(features(x))` must equal `model(x)`. Check a model with `check_local_model` instead of
    `isinstance`: from Python 3.12, `isinstance` with a protocol does not find submodules such as `extractor`.
    """

    @property
    def extractor(self) -> nn.Module:
        """The layers below the cut; models with the same extractor architecture can load each other's extractor."""

    def features(self, x: Tensor, /) -> Tensor:
        """Returns features at the cut, `[batch, *feature_shape]` float, for inputs `[batch, *input_shape]`."""

    def predict(self, features: Tensor, /) -> Tensor:
        """Returns logits `[batch, classes]`, float, for features `[batch, *feature_shape]`."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """Returns logits `[batch, classes]`, float, for inputs `[batch, *input_shape]`."""


class SplitModel(nn.Module):
    """A chain of named stages with a cut between extractor and predictor.

    FedD2S, which moves its cut, passes `cut=` to `features` and `predict`; all other methods use the model's cut.

    Attributes:
        stages: All stages in order. The last one ends in the layer that computes the logits.
        cut: Name of the stage before the cut.
    """

    stages: nn.Sequential

    def __init__(self, stages: Mapping[str, nn.Module] | nn.Sequential, cut: Cut) -> None:
        """Joins stages into one model without copying them.

        Args:
            stages: Two or more stages by name, first to last.
            cut: Position where the extractor ends; at least one stage must follow.

        Raises:
            ModelError: There are fewer than two stages, the cut does not exist, or no stage follows it.
        """
        super().__init__()
        self.stages = stages if isinstance(stages, nn.Sequential) else nn.Sequential(OrderedDict(stages))
        below = self.depth_of(cut)
        if below == len(self.stages):
            raise ModelError(f"cut {cut!r} is after the last stage; leave at least one stage for the predictor")
        self.cut = self.stage_names[below - 1]

    @property
    def stage_names(self) -> tuple[str, ...]:
        """Names of all stages; each is a possible cut. Features at the last one are the logits."""
        return tuple(self.stages._modules)

    @property
    def extractor(self) -> nn.Module:
        """The stages below the cut, which share their modules with this model.

        The state dict can be loaded into any model with the same extractor stages.
        """
        return self.stages[: self.depth_of(self.cut)]

    @property
    def predictor(self) -> nn.Sequential:
        """The stages above the cut, which share their modules with this model."""
        return self.stages[self.depth_of(self.cut) :]

    def depth_of(self, cut: Cut) -> int:
        """Returns the number of stages below a cut, in `[1, stages]`.

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
        """Returns the feature shape of one sample after each stage, by stage name, first to last.

        Raises:
            ModelError: The model does not accept samples of this shape.
        """
        depths = enumerate(self.stage_names, start=1)
        return {name: output_shape(self.stages[:depth], input_shape) for depth, name in depths}

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits `[batch, classes]` for inputs `[batch, *input_shape]`."""
        return cast(Tensor, self.stages(x))

    def features(self, x: Tensor, cut: Cut | None = None) -> Tensor:
        """Returns the features at a cut, `[batch, *feature_shape]`; the logits for a cut after the last stage.

        Args:
            x: Inputs, `[batch, *input_shape]`.
            cut: The cut; by default the model's.

        Raises:
            ModelError: The model has no such cut.
        """
        return cast(Tensor, self.stages[: self.depth_of(self.cut if cut is None else cut)](x))

    def predict(self, features: Tensor, cut: Cut | None = None) -> Tensor:
        """Returns logits `[batch, classes]` for features at a cut, by running the stages above it.

        Args:
            features: Features at the cut, from this model or one with the same extractor architecture.
            cut: The cut; by default the model's. After the last stage, features are logits and are returned unchanged.

        Raises:
            ModelError: The model has no such cut.
        """
        return cast(Tensor, self.stages[self.depth_of(self.cut if cut is None else cut) :](features))

    def embedding(self, x: Tensor) -> Tensor:
        """Returns the input of the last layer, `[batch, F]` in all models of the zoo.

        The last layer is the last module of the last stage, also inside nested chains.

        Args:
            x: Inputs, `[batch, *input_shape]`.
        """
        return self.below_last(x)[0]

    def with_embedding(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns logits `[batch, classes]` and embedding `[batch, F]` from one pass over inputs."""
        below, last = self.below_last(x)
        return cast(Tensor, last(below)), below

    def below_last(self, x: Tensor) -> tuple[Tensor, nn.Module]:
        """Returns the input of the last layer, and the last layer."""
        below = self.stages[:-1](x)
        last = self.stages[-1]
        while isinstance(last, nn.Sequential):
            below, last = last[:-1](below), last[-1]
        return cast(Tensor, below), last


def embedding_tap(model: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Returns the model's method `embedding`, inputs to `[batch, F]`, or None if it has no such method."""
    tap = getattr(model, "embedding", None)
    return tap if callable(tap) and not isinstance(tap, nn.Module) else None


def check_embedding(model: nn.Module, method: str) -> None:
    """Raises ModelError if a model cannot return the input of its last layer."""
    if embedding_tap(model) is None:
        raise ModelError(
            f"{method} needs the input of the last layer, and {type(model).__name__} has no embedding(x) that returns "
            "it; add this method"
        )


def logits_and_embedding(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns logits and embedding, in one pass for a `SplitModel`, else in two.

    Raises:
        ModelError: The model has no embedding.
    """
    if isinstance(model, SplitModel):
        return model.with_embedding(x)
    tap = embedding_tap(model)
    if tap is None:
        raise ModelError(
            f"{type(model).__name__} has no method embedding(x), which returns the input of its last layer; add it"
        )
    return model(x), tap(x)


def split_sequential(model: nn.Sequential, after: Cut) -> SplitModel:
    """Splits a plain chain of layers at a cut; the layers are shared with `model`, not copied.

    Args:
        model: Two or more layers. Unnamed layers are called "0", "1", ...
        after: Name of the extractor's last layer ("3"), or the number of layers in the extractor (4).

    Raises:
        ModelError: `model` is not an `nn.Sequential`, or it has no such cut.
    """
    if not isinstance(model, nn.Sequential):
        raise ModelError(
            f"split_sequential needs an nn.Sequential, not {type(model).__name__}; "
            "use wrap(model, cut=...) for other modules"
        )
    return SplitModel(model, after)


def check_local_model(model: nn.Module, samples: Tensor | None = None, classes: int | None = None) -> FeatureModel:
    """Checks that a module is a local model, before anything is trained or sent.

    Args:
        model: An app's model.
        samples: A few inputs `[batch, *input_shape]` to run the model on in eval mode; None to check attributes only.
            Neither weights nor batch-norm statistics change.
        classes: Number of classes that the logits must have; None to skip this check.

    Returns:
        `model` itself, typed as `FeatureModel`.

    Raises:
        ModelError: A method is missing, or outputs are inconsistent; the error says what to change.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"a local model must be a torch.nn.Module, not {type(model).__name__}")
    missing = [name for name in ("features", "predict") if not callable(getattr(model, name, None))]
    if not isinstance(getattr(model, "extractor", None), nn.Module):
        missing.append("extractor")
    if missing:
        raise ModelError(
            f"{type(model).__name__} lacks {', '.join(missing)}; use wrap(model, cut=...) or, for a chain of "
            "layers, split_sequential; or add `extractor` (a submodule), `features(x)` and `predict(features)`"
        )
    _refuse_foreign_extractor(model)
    _refuse_lazy_layers(model)
    taps = cast(FeatureModel, model)
    if samples is not None:
        _try_taps(model, taps, samples, classes)
    return taps


def _refuse_foreign_extractor(model: nn.Module) -> None:
    extractor = cast(nn.Module, model.extractor)
    if {id(p) for p in extractor.parameters()} <= {id(p) for p in model.parameters()}:
        return
    raise ModelError(
        f"the extractor of {type(model).__name__} has parameters that the model does not contain, "
        "so training would not update them; build both from the same layers"
    )


def _refuse_lazy_layers(model: nn.Module) -> None:
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise ModelError(
                f"{type(model).__name__} has a lazy layer, whose {name} has no shape yet; run the model once before "
                "you pass it: model(torch.zeros(1, *input_shape))"
            )


def _try_taps(model: nn.Module, taps: FeatureModel, samples: Tensor, classes: int | None) -> None:
    name = type(model).__name__
    if not isinstance(samples, Tensor):
        kind = type(samples).__name__
        raise ModelError(f"samples is a {kind}, expected a tensor [batch, *input_shape]; convert with torch.as_tensor")
    try:
        with evaluating(model), torch.no_grad():
            logits, features = taps(samples), taps.features(samples)
            again = taps.predict(features) if isinstance(features, Tensor) else None
    except Exception as error:  # the app's code can raise any exception
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        text = f"{name} fails on samples of shape {tuple(samples.shape)}: {reason}{_remedy(model, samples, error)}"
        raise ModelError(text) from error
    for call, result in {"(x)": logits, ".features(x)": features, ".predict(features)": again}.items():
        if not isinstance(result, Tensor):
            raise ModelError(f"{name}{call} returns {_indefinite(result)}, expected a tensor alone")
    if logits.ndim != 2 or len(logits) != len(samples) or (classes is not None and logits.shape[1] != classes):
        expected = f"[{len(samples)}, {'classes' if classes is None else classes}]"
        remedy = "" if classes is None else f"; the run has {classes} classes, build the model for as many"
        raise ModelError(f"{name} returns logits of shape {tuple(logits.shape)}, expected {expected}{remedy}")
    if not torch.isfinite(logits).all():
        raise ModelError(f"{name} returns NaN or infinity for the samples; check its weights and its forward pass")
    if not _are_close(again, logits):
        with evaluating(model), torch.no_grad():
            is_random = not _are_close(taps(samples), logits)
        raise ModelError(
            f"{name} returns other logits for the same samples in eval mode; remove random values from forward"
            if is_random
            else f"{name}: predict(features(x)) differs from model(x); both must run the same layers"
        )


def _remedy(model: nn.Module, samples: Tensor, error: Exception) -> str:
    dtype = place_of_inputs(model)[1]
    if dtype != samples.dtype:
        return f"; its weights are {dtype}, convert them with model.float()"
    return f"; build the model for inputs of shape {list(samples.shape[1:])}" if isinstance(error, RuntimeError) else ""


def _indefinite(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _are_close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-3, atol=1e-4)


@contextmanager
def in_mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Context manager that sets train or eval mode; restores each submodule's mode afterwards."""
    before = [(part, part.training) for part in module.modules()]
    if any(was_training is not training for _, was_training in before):
        module.train(training)
    try:
        yield
    finally:
        for part, was_training in before:
            if part.training is not was_training:  # an assignment to a module takes a microsecond
                part.training = was_training


def evaluating(module: nn.Module) -> AbstractContextManager[None]:
    """Context manager that sets eval mode; restores each submodule's mode afterwards."""
    return in_mode(module, training=False)


@contextmanager
def frozen(modules: Collection[nn.Module]) -> Iterator[None]:
    """Context manager that sets modules to eval mode, without gradients for the parameters that they own directly.

    What it changes is restored. Gradients still pass through the modules to those below.
    """
    training = [part for part in modules if part.training]
    trained = [w for part in modules for w in part.parameters(recurse=False) if w.requires_grad]
    for part in training:
        part.training = False
    for w in trained:
        w.requires_grad = False
    try:
        yield
    finally:
        for part in training:
            part.training = True
        for w in trained:
            w.requires_grad = True


@contextmanager
def frozen_batch_norm(module: nn.Module, frozen: bool = True) -> Iterator[None]:
    """Context manager that stops updates of batch-norm statistics; all other layers keep their mode.

    Use it for data that must not influence the statistics, such as generated samples.

    Args:
        module: Any module.
        frozen: False to do nothing.
    """
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm) and part.training] if frozen else []
    for norm in norms:
        norm.training = False
    try:
        yield
    finally:
        for norm in norms:
            norm.training = True


def place_of_inputs(module: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Returns the torch device and the float type that a module expects its inputs in.

    They are those of its first float parameter, or of its first float buffer: a model may have no parameter, such as a
    classifier in closed form. A module without either gets float32 on the CPU.
    """
    tensors = chain(module.parameters(), module.buffers())
    first = next(
        (tensor for tensor in tensors if tensor.dtype.is_floating_point),
        torch.empty(0, device="cpu", dtype=torch.float32),
    )
    return first.device, first.dtype


def output_shape(module: nn.Module, input_shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of a module's output for one sample, for instance an extractor's feature shape.

    Args:
        module: A module from `[batch, *input_shape]` to `[batch, *shape]`. Its state does not change.
        input_shape: Shape of one sample.

    Raises:
        ModelError: The module does not accept such samples.
    """
    device, dtype = place_of_inputs(module)
    zeros = torch.zeros(1, *input_shape, dtype=dtype, device=device)
    try:
        with evaluating(module), torch.no_grad():
            return tuple(module(zeros).shape[1:])
    except RuntimeError as error:
        raise ModelError(
            f"{type(module).__name__} does not accept samples of shape {tuple(input_shape)}: {error}"
        ) from error


def parameter_count(module: nn.Module) -> int:
    """Returns the number of parameters; shared parameters count once, buffers do not count."""
    return sum(parameter.numel() for parameter in module.parameters())


def display_name(module: nn.Module) -> str:
    """Returns a model's name for lists: its class, or of a class of this package, which any chain has, its layers.

    Only layers with parameters count, such as `2 Conv2d, Linear`. Compare architectures by their `fingerprint`.
    """
    layers = Counter(
        type(part).__name__ for part in module.modules() if next(part.parameters(recurse=False), None) is not None
    )
    if not layers or not type(module).__module__.startswith("fleetdistill.training."):
        return type(module).__name__
    return ", ".join(name if count == 1 else f"{count} {name}" for name, count in layers.items())


def fingerprint(module: nn.Module, cuts: Sequence[Cut] = ()) -> str:
    """Returns an architecture's fingerprint: equal fingerprints mean compatible state dicts and equal cuts.

    Values, torch devices, training modes and layers without state (ReLU, pooling) have no influence.

    Args:
        module: A model, an extractor or a predictor.
        cuts: The cuts that the run uses.

    Returns:
        SHA-256, hexadecimal, over the sorted (name, shape, element type, parameter or buffer) and the cuts.

    Raises:
        ModelError: A lazy layer is not initialised.
    """
    try:
        entries = sorted(_entries(module))
    except RuntimeError as error:  # raised by an uninitialised lazy parameter
        raise ModelError(
            f"{type(module).__name__} has uninitialised lazy layers; run one batch through it first"
        ) from error
    canonical = json.dumps({"entries": entries, "cuts": list(cuts)}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _entries(module: nn.Module) -> Iterator[tuple[str, list[int], str, str]]:
    state: dict[str, Any] = module.state_dict(keep_vars=True)
    for name, value in state.items():
        if isinstance(value, Tensor):  # a module's extra state can be any object
            kind = "parameter" if isinstance(value, nn.Parameter) else "buffer"
            yield name, list(value.shape), str(value.dtype).removeprefix("torch."), kind
