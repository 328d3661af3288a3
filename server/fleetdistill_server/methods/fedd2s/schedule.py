"""FedD2S's deep-to-shallow schedule: the layer that a device distils at, and the shallowest one."""

from __future__ import annotations

from torch import nn

from fleetdistill.errors import ConfigurationError
from fleetdistill.training.model import SplitModel

__all__ = ["distillation_layer", "shallowest_layer"]


def distillation_layer(participation: int, layers: int, drop_every: int, l_min: int) -> int:
    """Returns the distillation layer of eq. (6), clamped: max(l_min, L - floor((Z - 1) / Z_0)).

    The paper has no clamp; without it the layer would be 0 after L * Z_0 participations.

    Args:
        participation: The paper's Z: rounds with this device so far, including this one, at least 1.
        layers: The paper's L, number of layers, at least 2.
        drop_every: The paper's Z_0, rounds per layer, at least 1.
        l_min: The shallowest layer, in [1, L].

    Returns:
        The layer l in [l_min, L], counted from 1.
    """
    return max(l_min, layers - (participation - 1) // drop_every)


def shallowest_layer(model: SplitModel, *, l_min: int | None, dropping_set: str) -> int:
    """Returns the shallowest distillation layer: `l_min`, or the layer below the dropping set.

    Args:
        model: The devices' model; each stage is one layer.
        l_min: The layer in [1, L], or None to use the dropping set.
        dropping_set: Comma-separated names of the layers that are dropped during the run. Empty for all stages from
            the first one with a linear layer, the paper's [F1, F2, F3].

    Raises:
        ConfigurationError: The layer is outside [1, L], or the set does not end with the last layer.
    """
    names = list(model.stage_names)
    if l_min is not None:
        if not 1 <= l_min <= len(names):
            raise ConfigurationError(
                f"l_min is {l_min}, must be in [1, {len(names)}]; the layers are {', '.join(names)}"
            )
        return l_min
    dropped = [name.strip() for name in dropping_set.split(",")] if dropping_set else _fully_connected(model)
    if dropped != names[-len(dropped) :]:
        raise ConfigurationError(f"dropping_set is {dropped}, but must be the last layers of {names}")
    return max(1, len(names) - len(dropped))


def _fully_connected(model: SplitModel) -> list[str]:
    """Returns the stages from the first one with a linear layer to the end, or the last stage if there is none."""
    stages = list(model.stages.named_children())
    linear = [any(isinstance(part, nn.Linear) for part in stage.modules()) for _, stage in stages]
    first = linear.index(True) if True in linear else len(stages) - 1
    return [name for name, _ in stages[first:]]
