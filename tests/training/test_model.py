"""Local models: the taps, the cuts, what is refused, and the fingerprint."""

from __future__ import annotations

import copy
import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fleetdistill.errors import ModelError
from fleetdistill.training.model import (
    SplitModel,
    check_local_model,
    display_name,
    evaluating,
    fingerprint,
    output_shape,
    parameter_count,
    split_sequential,
)
from fleetdistill.training.wrapping import wrap


def chain(hidden: int = 6, classes: int = 3) -> SplitModel:
    """Five stages with batch-norm and dropout, the last one nested: inputs [b, 4] to logits [b, classes]."""
    return SplitModel(
        {
            "stem": nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU()),
            "middle": nn.Linear(5, hidden),
            "act": nn.Tanh(),
            "drop": nn.Dropout(0.5),
            "head": nn.Sequential(nn.ReLU(), nn.Sequential(nn.Identity(), nn.Linear(hidden, classes))),
        },
        cut="stem",
    )


class OwnModel(nn.Module):
    """An app's model that splits itself."""

    def __init__(self) -> None:
        super().__init__()
        self.extractor = nn.Linear(4, 5)
        self.last = nn.Linear(5, 3)

    def features(self, x: Tensor) -> Tensor:
        return self.extractor(x).relu()

    def predict(self, features: Tensor) -> Tensor:
        return self.last(features)

    def forward(self, x: Tensor) -> Tensor:
        return self.predict(self.features(x))


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), batch=st.integers(1, 6))
def test_rest_of_network_gives_model_logits_from_every_cut(seed, batch):
    torch.manual_seed(seed)
    model = chain().eval()
    x = torch.randn(batch, 4)
    for depth, name in enumerate(model.stage_names, start=1):
        assert torch.equal(model.features(x, name), model.features(x, depth))
        assert torch.equal(model.predict(model.features(x, name), name), model(x))
    assert torch.equal(model.predict(model.features(x)), model(x))
    assert torch.equal(model.predictor(model.extractor(x)), model(x))


def test_a_cut_after_the_last_stage_gives_logits_and_takes_them():
    model = chain().eval()
    x = torch.randn(2, 4)
    assert torch.equal(model.features(x, "head"), model(x))
    assert torch.equal(model.predict(model(x), "head"), model(x))


def test_embedding_is_input_of_last_layer_however_deeply_nested():
    model = chain(hidden=6).eval()
    x = torch.randn(2, 4)
    last = model.stages.head[1][1]  # type: ignore[index]
    assert model.embedding(x).shape == (2, 6)
    assert torch.equal(last(model.embedding(x)), model(x))  # type: ignore[operator]


def test_extractor_state_fits_other_predictor_and_spares_it():
    giver, taker = chain(hidden=6), chain(hidden=11)
    giver(torch.randn(8, 4))  # moves the batch-norm statistics, which belong to the extractor too
    predictor = copy.deepcopy(taker.predictor.state_dict())
    taker.extractor.load_state_dict(giver.extractor.state_dict())
    x = torch.randn(3, 4)
    assert torch.equal(taker.eval().features(x), giver.eval().features(x))
    assert all(torch.equal(value, predictor[name]) for name, value in taker.predictor.state_dict().items())
    assert fingerprint(giver.extractor) == fingerprint(taker.extractor)
    assert fingerprint(giver) != fingerprint(taker)


def test_training_a_view_trains_the_model():
    model = chain()
    before = {name: value.clone() for name, value in model.named_parameters()}
    optimiser = torch.optim.SGD(model.predictor.parameters(), lr=1.0)
    model(torch.randn(4, 4)).square().sum().backward()
    optimiser.step()
    moved = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert moved
    assert all(name.startswith(("stages.middle", "stages.head")) for name in moved)


@pytest.mark.parametrize("cut", ["tail", 0, 6, -1, True, None, 1.5])
def test_missing_cut_is_refused_with_existing_ones(cut):
    with pytest.raises(ModelError, match=r"stem, middle, act, drop, head.*1 to 5"):
        chain().depth_of(cut)


def test_a_model_without_a_predictor_is_refused():
    with pytest.raises(ModelError, match="leave at least one stage"):
        SplitModel({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}, cut="b")
    with pytest.raises(ModelError):
        SplitModel({}, cut=1)


def test_a_plain_chain_is_split_by_name_or_by_count():
    layers = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    x = torch.randn(2, 4)
    by_name, by_count = split_sequential(layers, after="1"), split_sequential(layers, after=2)
    assert by_name.cut == by_count.cut == "1"
    assert torch.equal(by_name.features(x), layers[:2](x))
    assert by_name.predictor[0] is layers[2]
    with pytest.raises(ModelError, match=r"needs an nn\.Sequential, not Linear"):
        split_sequential(nn.Linear(4, 3), after=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("model", [chain(), OwnModel()], ids=["split", "own"])
def test_a_good_model_passes_and_is_left_as_it_was(model):
    model.train()
    before = copy.deepcopy(model.state_dict())
    assert check_local_model(model, torch.randn(4, 4), classes=3) is model
    assert all(part.training for part in model.modules())  # type: ignore[attr-defined]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())  # type: ignore[attr-defined]


def test_model_that_cannot_be_cut_is_refused_with_what_it_lacks():
    with pytest.raises(ModelError, match=r"Linear lacks features, predict, extractor.*split_sequential"):
        check_local_model(nn.Linear(4, 3))
    with pytest.raises(ModelError, match="not function"):
        check_local_model(lambda x: x)  # type: ignore[arg-type]


def test_a_model_whose_taps_disagree_is_refused():
    class Disagrees(OwnModel):
        def predict(self, features: Tensor) -> Tensor:
            return self.last(features) + 1

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.features(x))

    with pytest.raises(ModelError, match=r"differs from model\(x\)"):
        check_local_model(Disagrees(), torch.randn(2, 4))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda y: y * float("nan"), "returns NaN or infinity for the samples"),
        (lambda y: y + torch.randn(3), "returns other logits for the same samples in eval mode; remove random values"),
    ],
)
def test_faulty_logits_are_refused_with_their_cause(change, says):
    class Faulty(OwnModel):
        def forward(self, x: Tensor) -> Tensor:
            return change(super().forward(x))

    with pytest.raises(ModelError, match=says):
        check_local_model(Faulty(), torch.randn(2, 4))


@pytest.mark.parametrize("member", ["forward", "features", "predict"])
@pytest.mark.parametrize(
    ("change", "returned"),
    [
        (lambda y: (y, y), "a tuple"),
        (lambda y: {"logits": y}, "a dict"),
        (lambda y: [y], "a list"),
        (lambda y: y.numpy(), "a ndarray"),
        (lambda y: None, "None"),
    ],
)
def test_what_is_no_tensor_is_refused_with_its_type(member, change, returned):
    class Apart(OwnModel):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.extractor(x).relu())

    model = Apart()
    right = getattr(model, member)
    setattr(model, member, lambda x: change(right(x)))
    call = {"forward": "", "features": ".features", "predict": ".predict"}[member]
    with pytest.raises(ModelError, match=rf"^Apart{call}\(\w+\) returns {returned}, expected a tensor alone$"):
        check_local_model(model, torch.randn(2, 4))


def test_lazy_layers_must_have_weights():
    def lazy() -> nn.Sequential:
        return nn.Sequential(nn.Flatten(), nn.LazyLinear(5), nn.Linear(5, 3))

    with pytest.raises(ModelError, match=r"stages.1.weight has no shape yet; run the model once before you pass it"):
        check_local_model(split_sequential(lazy(), after=2))
    with pytest.raises(ModelError, match=r"has a lazy layer, whose .* has no shape yet"):
        check_local_model(split_sequential(nn.Sequential(nn.LazyBatchNorm1d(), nn.Linear(4, 3)), after=1))
    layers = lazy()
    layers(torch.zeros(1, 4))
    check_local_model(split_sequential(layers, after=2), torch.randn(2, 4), classes=3)


def test_the_remedy_is_that_of_the_cause():
    with pytest.raises(ModelError, match=r"build the model for inputs of shape \[7\]$"):
        check_local_model(chain(), torch.randn(2, 7))
    with pytest.raises(ModelError, match=r"its weights are torch.float64, convert them with model.float\(\)$"):
        check_local_model(chain().double(), torch.randn(2, 4))

    class Broken(OwnModel):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("my own mistake")

    with pytest.raises(ModelError, match=r"fails on samples of shape \(2, 4\): 'my own mistake'$"):
        check_local_model(Broken(), torch.randn(2, 4))


def test_samples_of_another_type_are_refused_in_one_line():
    with pytest.raises(ModelError, match="samples is a ndarray, expected a tensor"):
        check_local_model(chain(), torch.randn(2, 4).numpy())  # type: ignore[arg-type]


def test_an_extractor_that_training_would_not_reach_is_refused():
    class Foreign(OwnModel):
        def __getattribute__(self, name: str) -> object:
            return nn.Linear(4, 5) if name == "extractor" else super().__getattribute__(name)

    with pytest.raises(ModelError, match="parameters that the model does not contain"):
        check_local_model(Foreign())


def test_wrong_samples_and_wrong_class_numbers_are_refused():
    with pytest.raises(ModelError, match=r"fails on samples of shape \(2, 7\)"):
        check_local_model(chain(), torch.randn(2, 7))
    with pytest.raises(ModelError, match=r"shape \(2, 3\), expected \[2, 10\]"):
        check_local_model(chain(), torch.randn(2, 4), classes=10)


def test_eval_mode_restores_mode_of_every_part_even_after_error():
    model = chain().train()
    model.stages.stem.eval()  # type: ignore[union-attr]  # an app may freeze its batch-norm
    modes = [part.training for part in model.modules()]

    def fail_in_eval_mode() -> None:
        with evaluating(model):
            assert not any(part.training for part in model.modules())
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail_in_eval_mode()
    assert [part.training for part in model.modules()] == modes


def test_output_shape_is_of_one_sample_and_moves_no_statistics():
    model = chain()
    before = model.stages.stem[1].running_mean.clone()  # type: ignore[index, union-attr]
    assert output_shape(model.extractor, (4,)) == (5,)
    assert torch.equal(model.stages.stem[1].running_mean, before)  # type: ignore[index, union-attr]
    with pytest.raises(ModelError, match=r"does not accept samples of shape \(9,\)"):
        output_shape(model, (9,))


class Named(nn.Module):
    """One tensor [2, 3] called `value` and one parameter [1] called `other`."""

    def __init__(self, *, buffer: bool = False, dtype: torch.dtype = torch.float32, name: str = "value") -> None:
        super().__init__()
        value = torch.randn(2, 3).to(dtype)
        if buffer:
            self.register_buffer(name, value)
        else:
            self.register_parameter(name, nn.Parameter(value))
        self.other = nn.Parameter(torch.randn(1))


def test_the_fingerprint_is_the_digest_of_what_it_says():
    text = '{"cuts":["stem",2],"entries":[["other",[1],"float32","parameter"],["value",[2,3],"float16","buffer"]]}'
    model = Named(buffer=True, dtype=torch.float16)
    assert fingerprint(model, ("stem", 2)) == hashlib.sha256(text.encode()).hexdigest()


def test_fingerprint_tells_apart_architectures_and_nothing_else():
    variants = [
        fingerprint(Named()),
        fingerprint(Named(), ("stem",)),
        fingerprint(Named(), (1,)),
        fingerprint(Named(), ("1",)),
        fingerprint(Named(buffer=True)),
        fingerprint(Named(dtype=torch.float64)),
        fingerprint(Named(name="velue")),
        fingerprint(nn.Sequential(Named())),
    ]
    assert len(set(variants)) == len(variants)
    assert fingerprint(Named().eval()) == fingerprint(Named().requires_grad_(False)) == variants[0]


@given(order=st.permutations(["a", "b", "c", "d"]))
def test_fingerprint_ignores_order_of_registration(order):
    def build(names: list[str]) -> nn.Module:
        model = nn.Module()
        for name in names:
            model.add_module(name, nn.Linear(ord(name) - 90, 2))
        return model

    assert fingerprint(build(order)) == fingerprint(build(sorted(order)))


def test_models_of_other_layers_have_other_names_in_lists():
    """A class of the SDK says nothing of the architecture; the app's own class does."""

    class Own(SplitModel):
        pass

    plain = nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    assert display_name(chain()) == "3 Linear, BatchNorm1d"
    assert display_name(split_sequential(plain, 2)) == "2 Linear"
    assert display_name(wrap(plain, "1")) == "2 Linear"
    assert display_name(SplitModel({"a": nn.Flatten(), "b": nn.ReLU()}, cut="a")) == "SplitModel"
    assert display_name(Own(plain, 2)) == "Own"
    assert display_name(OwnModel()) == "OwnModel"


def test_a_model_without_shapes_has_no_fingerprint():
    with pytest.raises(ModelError, match="lazy"):
        fingerprint(nn.Sequential(nn.LazyLinear(3)))


def test_a_shared_parameter_counts_once_and_buffers_do_not():
    layer = nn.Linear(3, 3)  # 9 weights, 3 biases
    assert parameter_count(nn.Sequential(layer, layer, nn.BatchNorm1d(3))) == 12 + 6
