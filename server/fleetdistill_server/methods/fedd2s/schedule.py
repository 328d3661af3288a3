"""FedD2S's deep-to-shallow schedule: which layer a device distils from, and how far down that goes."""

from __future__ import annotations

from torch import nn

from fleetdistill.errors import ConfigurationError
from fleetdistill.training.model import SplitModel


def distillation_layer(participation: int, layers: int, drop_every: int, l_min: int) -> int:
    """Eq. (6), clamped: max(l_min, L - floor((Z - 1) / Z_0)).

    The paper has no clamp; without it the layer would be 0 after L * Z_0 participations.

    Args:
        participation: The paper's Z, how many rounds the device takes part in, this one included, at least 1.
        layers: The paper's L, at least 2.
        drop_every: The paper's Z_0, rounds that a layer serves, at least 1.
        l_min: The shallowest layer, in [1, L].

    Returns:
        The layer l in [l_min, L], counted from 1.
    """
    return max(l_min, layers - (participation - 1) // drop_every)


def shallowest_layer(model: SplitModel, *, l_min: int | None, dropping_set: str) -> int:
    """The clamp of the schedule: given, the layer below a dropping set, or the one below the fully connected layers.

    Args:
        model: The devices' model, a layer a stage.
        l_min: A layer, or None.
        dropping_set: Names of the layers that are dropped in the course of the run, with commas between them; empty
            for the stages from the first one with a linear layer on, the paper's [F1, F2, F3].

    Raises:
        ConfigurationError: The layer is outside [1, L], or the set does not end with the last layer.
    """
    names = list(model.stage_names)
    if l_min is not None:
        if not 1 <= l_min <= len(names):
            raise ConfigurationError(f"l_min {l_min} outside [1, {len(names)}]; the layers are {', '.join(names)}")
        return l_min
    dropped = [name.strip() for name in dropping_set.split(",")] if dropping_set else _fully_connected(model)
    if dropped != names[-len(dropped) :]:
        raise ConfigurationError(f"dropping set {dropped} is not a suffix of the layer list {names}")
    return max(1, len(names) - len(dropped))


def _fully_connected(model: SplitModel) -> list[str]:
    """The stages from the first one with a linear layer on; the last stage where none has one."""
    stages = list(model.stages.named_children())
    linear = [any(isinstance(part, nn.Linear) for part in stage.modules()) for _, stage in stages]
    first = linear.index(True) if True in linear else len(stages) - 1
    return [name for name, _ in stages[first:]]
