"""`wrap`: makes a local model of any module whose forward pass torch.fx can trace, such as a torchvision model.

The forward pass is traced in train and in eval mode and divided into up to three stages: the extractor, the layers up
to the last one, and the last layer. The stages share their layers with the module.
"""

from __future__ import annotations

import inspect
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import fx, nn

from fleetdistill.errors import ModelError
from fleetdistill.training.model import Cut, SplitModel, split_sequential

__all__ = ["WrappedModel", "node_names", "wrap"]

_EXTRACTOR = "extractor"
_MAX_NAMES = 8
_OTHER_LAYERS = "runs other layers in train than in eval mode"
_T = TypeVar("_T")


class WrappedModel(SplitModel):
    """A `SplitModel` that `wrap` made: stages `extractor`, `body` and `head`, or only the first and the last."""

    @property
    def extractor(self) -> nn.Module:
        """The layers below the cut, with the names that they have in the wrapped module."""
        return self.stages[0]


def wrap(module: nn.Module, cut: Cut) -> SplitModel:
    """Makes a local model of a module, by dividing its forward pass after a layer.

        wrap(torchvision.models.resnet18(num_classes=10), cut="layer1")

    Layers are shared with `module`, not copied. Batch-norm, dropout and residual connections are supported.

    Args:
        module: Takes one tensor `[batch, *input_shape]` and returns logits `[batch, classes]`. torch.fx must be able to
            trace its forward pass: no Python control flow that depends on values.
        cut: Where the extractor ends: the name of a submodule, such as `layer2.0`, or a node name of
            `torchvision.models.feature_extraction.get_graph_node_names`, such as `layer2.0.add`. For an `nn.Sequential`
            also the number of layers in the extractor. No connection may skip over the cut.

    Returns:
        A local model in the module's mode. Its extractor has the module's names, so its state dict can be loaded into
        the extractor of any model with the same layers.

    Raises:
        ModelError: The module cannot be traced or has no such cut; the error names valid cuts.
    """
    if not isinstance(module, nn.Module):
        raise ModelError(f"wrap needs a torch.nn.Module, not {type(module).__name__}")
    if isinstance(module, nn.Sequential) and (isinstance(cut, int) or cut in module._modules):
        return split_sequential(module, cut)
    nodes, names = _trace_nodes(module)
    at = _place_of(module, cut, nodes, names)
    wrapped = WrappedModel(_stages(module, nodes, at), 1)
    wrapped.training = module.training
    return wrapped


def node_names(module: nn.Module) -> list[str]:
    """Returns the names of a module's cuts for `wrap`, in order; the last ones leave the fewest layers after the cut.

    Raises:
        ModelError: The module cannot be traced.
    """
    nodes, names = _trace_nodes(module)
    return [names[nodes[at]] for at in _valid_places(nodes)]


class _Tracer(fx.Tracer):
    """Traces a module and names its nodes as torchvision's feature extraction does, by the path of their module."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[fx.Node, str] = {}
        self._path = ""

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """See `torch.fx.Tracer.call_module`."""
        before, self._path = self._path, self.path_of_module(m)
        try:
            return super().call_module(m, forward, args, kwargs)
        finally:
            self._path = before

    def create_proxy(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        """See `torch.fx.Tracer.create_proxy`."""
        proxy = super().create_proxy(*args, **kwargs)
        self.names[proxy.node] = self._name_of(proxy.node)
        return proxy

    def _name_of(self, node: fx.Node) -> str:
        name = self._path if node.op == "call_module" else ".".join(filter(None, (self._path, str(node))))
        name = re.sub(r"_\d+$", "", name) if re.fullmatch(r".+_\d+", name) else name
        earlier = [one for one in self.names.values() if re.fullmatch(re.escape(name) + r"(_\d+)?", one)]
        return name if not earlier else f"{name}_{len(earlier)}"


def _trace_nodes(module: nn.Module) -> tuple[list[fx.Node], dict[fx.Node, str]]:
    """Returns the nodes from the input to the logits, and their names; `training` arguments follow the mode."""
    (graph, names), (other, _) = (_trace(module, training) for training in (True, False))
    nodes, others = list(graph.nodes), list(other.nodes)
    if [(node.op, str(node.target)) for node in nodes] != [(other.op, str(other.target)) for other in others]:
        constant = any("_tensor_constant" in str(node.target) for node in nodes)  # torch.fx's name for a new tensor
        what = "creates a tensor in forward, such as with torch.randn or torch.ones" if constant else _OTHER_LAYERS
        raise ModelError(_advice(module, what))
    with graph.inserting_after(nodes[0]):
        flag = graph.create_node("get_attr", "training")
    names[flag] = "training"
    for node, twin in zip(nodes, others, strict=True):
        node.args = _following(node.args, twin.args, flag)
        node.kwargs = _following(node.kwargs, twin.kwargs, flag)
    _check_ends(module, graph)
    return [node for node in graph.nodes if node is not flag][:-1], names


def _trace(module: nn.Module, training: bool) -> tuple[fx.Graph, dict[fx.Node, str]]:
    tracer = _Tracer()
    before = [(part, part.training) for part in module.modules()]
    _, *others = inspect.signature(module.forward).parameters.values()
    optional = {other.name: other.default for other in others if other.default is not other.empty}
    try:
        module.train(training)
        return tracer.trace(module, optional or None), tracer.names
    except Exception as error:  # the app's code can raise any exception
        detail = str(error).strip().split("\n")[0][:120]
        raise ModelError(_advice(module, f"cannot be traced: {detail}")) from error
    finally:
        for part, was_training in before:
            part.training = was_training


def _following(value: _T, other: Any, flag: fx.Node) -> _T:
    """Returns arguments of a node, with the flag in place of values that are true in train and false in eval mode."""
    if isinstance(value, bool) and value is not other:
        return flag  # type: ignore[return-value]
    if isinstance(value, tuple | list):
        return type(value)(_following(one, two, flag) for one, two in zip(value, other, strict=True))
    if isinstance(value, Mapping):
        return {name: _following(one, other[name], flag) for name, one in value.items()}  # type: ignore[return-value]
    return value


def _check_ends(module: nn.Module, graph: fx.Graph) -> None:
    """Removes optional inputs, which have their defaults. Raises ModelError unless one tensor is left and returned."""
    *_, output = graph.nodes
    unused = set([node for node in graph.nodes if node.op == "placeholder"][1:])
    for node in graph.nodes:  # torch.fx asserts that an optional input has its default
        if unused & set(node.all_input_nodes):
            unused.add(node)
    if output in unused:
        raise ModelError(_advice(module, "uses several inputs, expected one tensor"))
    if not isinstance(output.args[0], fx.Node):
        kind = type(output.args[0]).__name__
        raise ModelError(_advice(module, f"returns a {kind}, expected logits [batch, classes]"))
    for node in reversed([node for node in graph.nodes if node in unused]):
        graph.erase_node(node)


def _advice(module: nn.Module, what: str) -> str:
    return f"{type(module).__name__} {what}; change forward, or add `extractor`, `features(x)` and `predict(features)`"


def _valid_places(nodes: Sequence[fx.Node]) -> list[int]:
    """Returns the positions after which only that node's value is used: no connection skips over them."""
    position = {node: at for at, node in enumerate(nodes)}
    result = []
    furthest = 0
    for at, node in enumerate(nodes[:-1]):
        if at and furthest <= at and node.op not in ("placeholder", "get_attr"):
            result.append(at)
        furthest = max([furthest, *(position.get(user, len(nodes)) for user in node.users)])
    return result


def _place_of(module: nn.Module, cut: Cut, nodes: Sequence[fx.Node], names: Mapping[fx.Node, str]) -> int:
    """Returns the position of the last node of a cut."""
    valid = _valid_places(nodes)
    ordered = [names[node] for node in nodes]
    places = _places_in(ordered, str(cut))
    known = _list_names([_shortest(ordered, at) for at in valid])
    if not places:
        raise ModelError(f"{type(module).__name__} has no layer {cut!r} that its forward pass uses; cut at {known}")
    if places[-1] == len(nodes) - 1:
        raise ModelError(f"{cut!r} is the last layer of {type(module).__name__}, so none follows it; cut at {known}")
    if places[-1] not in valid:
        raise ModelError(f"a connection skips over {cut!r} of {type(module).__name__}; cut at {known}")
    return places[-1]


def _places_in(ordered: Sequence[str], layer: str) -> list[int]:
    """Returns the positions of a layer's nodes."""
    return [at for at, name in enumerate(ordered) if name == layer or name.startswith(f"{layer}.")]


def _shortest(ordered: Sequence[str], at: int) -> str:
    """Returns the name of the outermost layer that ends with a node."""
    parts = ordered[at].split(".")
    layers = (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    return next(layer for layer in layers if _places_in(ordered, layer)[-1] == at)


def _list_names(names: Sequence[str]) -> str:
    """Returns some of the names of valid cuts, those of outer layers first."""
    outer = sorted(range(len(names)), key=lambda at: (names[at].count("."), at))[:_MAX_NAMES]
    text = ", ".join(names[at] for at in sorted(outer))
    return text + (", ..." if len(names) > _MAX_NAMES else "") if names else "no layer: it is a single layer"


def _stages(module: nn.Module, nodes: Sequence[fx.Node], cut: int) -> OrderedDict[str, nn.Module]:
    """Returns the stages up to the cut, up to the last layer, and the last layer."""
    last = nodes[-1]
    end = len(nodes) - 1
    is_layer = last.op == "call_module" and len(last.all_input_nodes) == 1
    before = nodes.index(last.all_input_nodes[0]) if is_layer else cut
    stages: OrderedDict[str, nn.Module] = OrderedDict([(_EXTRACTOR, _part(module, nodes, 0, cut))])
    if is_layer and before in _valid_places(nodes) and before >= cut:
        if before > cut:
            stages["body"] = _part(module, nodes, cut, before)
        stages["head"] = module.get_submodule(str(last.target))
    else:
        stages["head"] = _part(module, nodes, cut, end)
    return stages


def _part(module: nn.Module, nodes: Sequence[fx.Node], start: int, end: int) -> fx.GraphModule:
    """Returns the nodes after `start` up to `end` as a module from the value of `start` to that of `end`."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {nodes[start]: graph.placeholder("x")}

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:  # the flag `training`
            copies[node] = graph.create_node("get_attr", "training")
        return copies[node]

    for node in nodes[start + 1 : end + 1]:
        copies[node] = graph.node_copy(node, copied)
    graph.output(copies[nodes[end]])
    part = fx.GraphModule(module, graph)
    part.training = module.training
    return part
