"""The mathematics of one exchange: oracles (FIX-1 to FIX-12), which were computed independently, and laws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from fleetdistill.errors import ConfigurationError, KnowledgeError
from fleetdistill.knowledge import Array, ClassSpace
from fleetdistill.methods.classstats.class_space import (
    best_temperature,
    class_prior,
    coordinates,
    leave_one_out,
    logits,
    make_space,
    projection,
    shrinkage_rule,
    shrunk,
    usual_dimensions,
)
from fleetdistill.methods.classstats.shared_statistics import (
    Moments,
    from_wire,
    in_int8,
    max_directions,
    merge,
    moments_of,
    to_wire,
)
from fleetdistill.models import build_model
from fleetdistill.models.scattering import Scattering, low_pass, morlet, scales_of
from fleetdistill.training.figures import likelihood
from fleetdistill.training.portable_noise import splitmix64
from fleetdistill.wire.codec import decode, encode

A = np.array([[1, 0, 2], [3, 1, 2], [2, 2, 5], [0, 1, 3]], float)  # device A, class 0
B = np.array([[4, 1, 0], [6, 3, 1]], float)  # device B, class 0
C = np.array([[0, 5, 1], [1, 4, 1], [2, 6, 1]], float)  # device B, class 1
ROWS, LABELS = np.concatenate([A, B, C]), np.array([0] * 6 + [1] * 3)
POINT = np.array([[2.0, 2.0, 2.0]])


def device_a() -> Moments:
    return moments_of(A, np.zeros(4, int), min_samples=2)


def device_b() -> Moments:
    return moments_of(np.concatenate([B, C]), np.array([0, 0, 1, 1, 1]), min_samples=2)


def space_of_all(shrinkage: float = 0.1) -> ClassSpace:
    return make_space(merge([device_a(), device_b()]), shrinkage, ridge=0.0)


# --- FIX-1 to FIX-4: the extractor


def test_fix_1_the_projection_is_the_bits_of_splitmix64() -> None:
    assert splitmix64(1, 2).tolist() == [10451216379200822465, 13757245211066428519]
    signs = np.sign(projection(5, 4)[:3]).astype(int)  # the first rows do not depend on F but for their size
    assert signs.tolist() == [[1, -1, -1, -1], [-1, -1, 1, 1], [-1, -1, 1, 1]]
    assert_allclose(np.abs(projection(5, 4)), 5**-0.5, rtol=1e-6)


def test_fix_1_features_of_few_numbers_stay_as_they_are() -> None:
    rows = np.random.default_rng(0).random((3, 4))
    assert (rows @ projection(4, 4) == rows).all()
    assert (projection(3, 4) == np.eye(3)).all()


def test_fix_2_kernels() -> None:
    finest = morlet(0, 0.0)
    assert finest.shape == (2, 7, 7)
    assert_allclose(finest[:, 3, 3], (0.1081052, 0), atol=5e-8)
    assert_allclose(finest[:, 3, 4], (-0.0530967, 0.0424945), atol=5e-8)
    assert_allclose(finest[:, 4, 3], (0.0889249, 0), atol=5e-8)
    assert_allclose(finest.sum(axis=(1, 2)), 0, atol=1e-15)
    assert_allclose(np.hypot(*finest).sum(), 1)
    next_scale = morlet(1, np.pi / 4)
    assert next_scale.shape == (2, 11, 11)
    assert_allclose(next_scale[:, 5, 5], (0.0272684, 0), atol=5e-8)
    assert_allclose(next_scale[:, 6, 6], (-0.0064966, 0.0226767), atol=5e-8)
    assert_allclose((low_pass(0)[3, 3], low_pass(0)[3, 4]), (0.2486782, 0.1138532), atol=5e-8)


def chequered() -> torch.Tensor:
    place = torch.arange(8, dtype=torch.float64)
    return ((place[:, None] * 3 + place[None] * 5) % 7 / 6)[None, None].float()


def test_fix_3_scattering_of_an_image() -> None:
    result = Scattering((1, 8, 8))(chequered())
    assert result.shape == (1, 81, 4, 4)
    assert_allclose(result[0, [0, 1, 9, 73], 0, 0], (3.639597, 2.2189903, 0.5394725, 2.0538034), atol=2e-6)
    assert result.mean().item() == pytest.approx(0.7933317, abs=2e-6)
    assert result.square().sum().item() == pytest.approx(1443.3817, abs=2e-3)
    coarse = Scattering((1, 8, 8), step=4)(chequered())
    assert coarse.shape == (1, 81, 2, 2)
    assert coarse.mean().item() == pytest.approx(0.8051992, abs=2e-6)
    assert coarse.square().sum().item() == pytest.approx(369.11395, abs=1e-3)


def test_fix_3_scattering_of_a_constant() -> None:
    result = Scattering((1, 8, 8), step=4)(torch.full((1, 1, 8, 8), 0.5))
    assert result[0, 0, 0, 0].item() == pytest.approx(np.log(51), abs=1e-6)
    assert result[0, 1:].abs().max().item() < 1.1e-4


@pytest.mark.parametrize(("side", "scales", "step", "maps"), [(8, 2, 2, 81), (14, 2, 4, 81), (28, 3, 8, 217)])
def test_fix_4_maps_and_grid_follow_from_the_smaller_side(side: int, scales: int, step: int, maps: int) -> None:
    assert scales_of(side) == (scales, step)
    places = -(-side // step)
    assert build_model("scattering", input_shape=(1, side, side))(torch.rand(2, 1, side, side)).shape == (
        *(2, maps),
        *(places, places),
    )


@pytest.mark.parametrize(("scales", "maps"), [(1, 9), (2, 81), (3, 217), (4, 417)])
def test_fix_4_number_of_maps(scales: int, maps: int) -> None:
    assert 1 + 8 * scales + 64 * scales * (scales - 1) // 2 == maps


def test_fix_4_larger_images_colours_and_oblong_ones() -> None:
    assert scales_of(32) == (3, 8)
    assert scales_of(64) == (4, 16)
    assert Scattering((3, 32, 32))(torch.rand(1, 3, 32, 32)).shape == (1, 651, 4, 4)
    assert Scattering((1, 64, 64))(torch.rand(1, 1, 64, 64)).shape == (1, 417, 4, 4)
    assert Scattering((1, 9, 20))(torch.rand(1, 1, 9, 20)).shape == (1, 81, 5, 10)


def test_colours_are_opponent_colours() -> None:
    """Order 0 of a constant image is its colours, smoothed."""
    red, green, blue = 0.9, 0.6, 0.3
    image = torch.tensor([red, green, blue])[None, :, None, None].expand(1, 3, 8, 8)
    result = Scattering((3, 8, 8))(image)[0, :3, 0, 0]
    wanted = np.array([(red + green + blue) / 3, (red - green) / 2, (red + green) / 4 - blue / 2])
    assert_allclose(result, np.sign(wanted) * np.log1p(np.abs(wanted) / 0.01), rtol=1e-5)


@pytest.mark.parametrize("shape", [(1, 7, 9), (1, 8), (64,)])
def test_what_is_no_image_of_8_pixels_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError):
        build_model("scattering", input_shape=shape)


def test_extractor_sends_nothing_and_names_one_architecture() -> None:
    net = build_model("scattering", input_shape=(1, 8, 8))
    assert list(net.state_dict()) == list(net.parameters()) == []


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 16, 16)])
def test_the_extractor_agrees_on_one_and_on_many_threads(shape: tuple[int, ...]) -> None:
    images, net = torch.rand(5, *shape, generator=torch.Generator().manual_seed(0)), Scattering(shape)
    before = torch.get_num_threads()
    try:
        result = []
        for threads in (1, 4):
            torch.set_num_threads(threads)
            result.append(net(images))
    finally:
        torch.set_num_threads(before)
    assert_allclose(result[0], result[1], atol=1e-5)


def test_dimensions_follow_from_the_image() -> None:
    assert usual_dimensions((1, 8, 8)) == 256
    assert usual_dimensions((1, 14, 14)) == usual_dimensions((3, 32, 32)) == usual_dimensions((500,)) == 384


# --- FIX-5 to FIX-9: summary, merge, head, leave-one-out, encoding


def test_fix_5_summaries() -> None:
    a, b = device_a(), device_b()
    assert_allclose(a.covariance, [[5 / 3, 1 / 3, 0], [1 / 3, 2 / 3, 1], [0, 1, 2]], atol=1e-12)  # type: ignore[arg-type]
    assert_allclose(b.covariance, [[4 / 3, 1, 1 / 3], [1, 4 / 3, 1 / 3], [1 / 3, 1 / 3, 1 / 6]], atol=1e-12)
    assert (a.df, b.df) == (3, 3)


def test_fix_6_the_merge_is_that_of_all_rows_together() -> None:
    merged = merge([device_a(), device_b()])
    assert (merged.counts.tolist(), merged.df) == ([6, 3], 7)
    assert_allclose(merged.means, [[2.6666667, 1.3333333, 2.1666667], [1, 5, 1]], atol=5e-8)  # type: ignore[arg-type]
    expected = [
        [3.6190476, 1.2380952, -1.5238095],
        [1.2380952, 1.0476190, 0.0952381],
        [-1.5238095, 0.0952381, 2.1190476],
    ]
    assert_allclose(merged.covariance, expected, atol=5e-8)
    assert_allclose(merged.covariance, moments_of(ROWS, LABELS).covariance, atol=1e-12)


def test_fix_7_closed_form() -> None:
    merged = merge([device_a(), device_b()])
    weights = np.linalg.solve(shrunk(merged.covariance, 0.1, ridge=0.0), merged.means.T).T
    biases = -(merged.means * weights).sum(axis=1) / 2
    assert_allclose(weights, [[1.8813363, -0.9146347, 2.2770523], [-2.7508711, 7.8316258, -1.6252138]], atol=5e-8)
    assert_allclose(biases, [-4.3654986, -17.3910221], atol=5e-8)
    assert_allclose(POINT @ weights.T + biases, [[2.1220092, -10.4799401]], atol=5e-8)
    space = space_of_all()
    result = logits(space, coordinates(space, POINT), 2)
    assert result[0, 0] - result[0, 1] == pytest.approx(2.1220092 + 10.4799401, abs=1e-6)


def whole_space(shrinkage: float = 0.1) -> ClassSpace:
    """All D whitened directions, in which leave-one-out is exact: rho is 0."""
    merged = merge([device_a(), device_b()])
    values, vectors = np.linalg.eigh(shrunk(merged.covariance, shrinkage, ridge=0.0))
    whitening = vectors / np.sqrt(values)
    origin = merged.means.mean(axis=0) @ whitening
    return ClassSpace(
        labels=[0, 1],
        counts=merged.counts,
        directions=whitening,
        origin=origin,
        centres=merged.means @ whitening - origin,
        df=np.array(7),
        shrinkage=np.array(shrinkage),
        outside=np.array(0.0),
    )


def test_fix_8_exact_leave_one_out() -> None:
    space = whole_space()
    result = leave_one_out(space, coordinates(space, ROWS), LABELS, {0, 1}, 2)
    assert_allclose(result[0], (-1.7355725, -29.0376695), atol=5e-8)
    assert_allclose(result[8], (-29.8312576, -1.3387937), atol=5e-8)


@pytest.mark.parametrize("row", range(9))
def test_fix_8_is_leaving_the_row_out_by_hand(row: int) -> None:
    space, share = whole_space(), 0.1
    result = leave_one_out(space, coordinates(space, ROWS), LABELS, {0, 1}, 2)
    left = np.arange(9) != row
    means = np.stack([ROWS[left & (label == LABELS)].mean(axis=0) for label in (0, 1)])
    error = ROWS[left] - means[LABELS[left]]
    target = np.diag(np.diag(merge([device_a(), device_b()]).covariance))  # the diagonal of all rows is kept
    away = ROWS[row] - means
    inverse = np.linalg.inv((1 - share) * error.T @ error / 7 + share * target)
    assert_allclose(result[row], -((away @ inverse) * away).sum(axis=1) / 2, atol=1e-9)


def test_fix_9_int8_rows() -> None:
    whole, steps = in_int8(np.array([[0.5, -1.27, 0.013], [0, 0, 0]]))
    assert whole.dtype == np.int8
    assert_allclose(whole[0] * steps.astype(float)[0], (0.5001068, -1.2702713, 0.0100021), atol=5e-8)
    assert float(steps[0]) == pytest.approx(0.0100021, abs=5e-8)
    assert whole[1].tolist() == [0, 0, 0]
    assert float(steps[1]) == 1


def many_rows(classes: int, each: int, size: int, seed: int = 0) -> tuple[Array, Array]:
    generator = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), each)
    return generator.standard_normal((len(labels), size)) + 3 * generator.random((classes, size))[labels], labels


def test_fix_10_bytes_on_the_wire() -> None:
    moments = moments_of(*many_rows(10, 60, 384))
    up = encode({"statistics": to_wire(moments, 128)})
    down = encode({"space": make_space(moments, 0.1)})
    assert (up.data_bytes, down.data_bytes) == (57_900, 7_174)
    as_float32 = encode({"statistics": to_wire(moments, 128)}, np.float32)  # whatever the run's knowledge type is
    assert as_float32.data_bytes == 57_900


def test_fix_11_the_space() -> None:
    space = space_of_all()
    assert_allclose(space.directions[:, 0], (-0.6956285, 1.3134447, -0.5860116), atol=5e-8)
    assert_allclose(space.origin, [1.9560707], atol=5e-8)
    assert_allclose(space.centres[:, 0], (-3.3295124, 3.3295124), atol=5e-8)
    assert float(space.outside) == pytest.approx(1.5635342, abs=5e-8)
    result = logits(space, coordinates(space, POINT), 2)
    assert result[0, 0] - result[0, 1] == pytest.approx(12.6019493, abs=5e-7)
    left_out = leave_one_out(space, coordinates(space, ROWS), LABELS, {0, 1}, 2)
    assert_allclose(left_out[0], (-1.8050560, -29.1473618), atol=5e-7)
    assert_allclose(left_out[8], (-32.9239377, -3.5022660), atol=5e-7)


def test_fix_12_the_rule_and_the_cap_on_directions() -> None:
    assert [shrinkage_rule(384, df) for df in (190, 1000, 2990, 60000)] == [0.5, 0.096, 0.05, 0.05]
    assert max_directions(128, 7, 384) == 3


# --- laws


@given(seed=st.integers(0, 2**32 - 1), devices=st.integers(1, 6))
def test_any_partition_of_the_rows_gives_the_same_merge(seed: int, devices: int) -> None:
    rows, labels = many_rows(4, 9, 5, seed)
    owner = np.random.default_rng(seed).integers(devices, size=len(labels))
    merged = merge([moments_of(rows[owner == item], labels[owner == item]) for item in range(devices)])
    whole = moments_of(rows, labels)
    assert (merged.labels, merged.df) == (whole.labels, whole.df)
    assert merged.counts.tolist() == whole.counts.tolist()
    assert_allclose(merged.means, whole.means, atol=1e-12)
    assert_allclose(merged.covariance, whole.covariance, atol=1e-12)


@given(seed=st.integers(0, 2**32 - 1))
def test_the_merge_without_a_device_is_that_of_the_others(seed: int) -> None:
    parts = [from_wire(to_wire(moments_of(*many_rows(3, 6, 4, seed + item)), 2)) for item in range(3)]
    without = merge([parts[0], parts[2]])
    again = merge([parts[0], parts[1], parts[2]][::2])
    assert (without.covariance == again.covariance).all()
    assert (without.means == again.means).all()


@given(seed=st.integers(0, 2**32 - 1), shrinkage=st.floats(0, 0.9))
def test_space_orders_classes_as_linear_discriminant_analysis(seed: int, shrinkage: float) -> None:
    rows, labels = many_rows(4, 8, 6, seed)
    moments = moments_of(rows, labels)
    space = make_space(moments, shrinkage)
    weights = np.linalg.solve(shrunk(moments.covariance, shrinkage), moments.means.T).T
    whole = rows @ weights.T - (moments.means * weights).sum(axis=1) / 2
    few = logits(space, coordinates(space, rows), 4)
    assert_allclose(few - few[:, :1], whole - whole[:, :1], atol=1e-6 * max(1.0, float(np.abs(whole).max())))


def test_scikit_learn_gives_the_same_classes() -> None:
    """The second opinion: its shrinkage goes to a multiple of the unit matrix, so features are scaled alike here."""
    rows, labels = many_rows(5, 40, 12)
    rows = rows / np.sqrt(np.diag(moments_of(rows, labels).covariance))
    fitted = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.1, priors=np.full(5, 0.2)).fit(rows, labels)
    others = np.random.default_rng(1).standard_normal((500, 12)) + 2
    space = make_space(moments_of(rows, labels), 0.1)
    mine = logits(space, coordinates(space, others), 5).argmax(axis=1)
    assert (mine == fitted.predict(others)).mean() > 0.99


@given(seed=st.integers(0, 2**32 - 1), rank=st.integers(0, 40))
def test_received_moments_keep_diagonal_and_direction_limit(seed: int, rank: int) -> None:
    moments = moments_of(*many_rows(3, 7, 10, seed))
    sent: Any = decode(encode({"statistics": to_wire(moments, rank)}))["statistics"]
    arrived, directions = from_wire(sent), sent.directions
    result, wanted = np.diag(arrived.covariance), np.diag(moments.covariance)
    some_left = sent.variances > 0  # else the directions' own rounding has gone over the variance
    assert_allclose(result[some_left], wanted[some_left], rtol=1e-3)
    assert_allclose(result, wanted, rtol=2e-2)
    assert (0 if directions is None else len(directions)) == min(rank, moments.df // 2, 10)
    assert (np.linalg.eigvalsh(arrived.covariance) > -1e-9).all()


def test_leave_one_out_needs_no_row_of_another_device() -> None:
    """The figures of one device are the same whether others' rows are asked about too."""
    space = space_of_all()
    all_rows = leave_one_out(space, coordinates(space, ROWS), LABELS, {0, 1}, 2)
    own = leave_one_out(space, coordinates(space, A), np.zeros(4, int), {0}, 2)
    assert_allclose(own, all_rows[:4], atol=1e-12)


def test_rows_that_were_not_counted_are_not_taken_out() -> None:
    space = space_of_all()
    result = leave_one_out(space, coordinates(space, POINT), np.array([0]), set(), 2)
    general = logits(space, coordinates(space, POINT), 2)
    assert_allclose(result[:, 0] - result[:, 1], general[:, 0] - general[:, 1], atol=1e-9)


def test_a_class_that_is_not_in_the_space_lies_below_all_others() -> None:
    space = space_of_all()
    result = logits(space, coordinates(space, ROWS), 4)
    assert result.shape == (9, 4)
    assert (result[:, 2:] == result[:, :2].min(axis=1, keepdims=True) - 20).all()


def test_the_temperature_is_the_likeliest_one() -> None:
    sharp = np.array([[40.0, 0.0], [0.0, 40.0], [0.0, 40.0]])
    prior = class_prior(np.array([0, 1, 0]), 2)
    assert_allclose(prior, [2.5 / 4, 1.5 / 4])
    assert best_temperature(sharp, np.array([0, 1, 1]), prior) == 1
    assert best_temperature(sharp, np.array([0, 1, 0]), prior) == 8
    assert likelihood(np.zeros((1, 2)), np.array([0])) == pytest.approx(-np.log(2))


# --- what makes no space


def test_one_class_makes_no_space() -> None:
    with pytest.raises(KnowledgeError, match="two classes"):
        make_space(device_a(), 0.1)


def test_features_that_never_vary_make_no_space() -> None:
    with pytest.raises(KnowledgeError, match="varies within a class"):
        make_space(moments_of(np.array([[1.0], [1.0], [2.0], [2.0]]), np.array([0, 0, 1, 1])), 0.1)


def test_nothing_to_merge() -> None:
    with pytest.raises(KnowledgeError, match="no part has a class"):
        merge([moments_of(A, np.zeros(4, int), min_samples=9)])


def test_features_that_are_not_finite_are_refused_with_their_row() -> None:
    with pytest.raises(KnowledgeError, match="row 2 of the features is not finite"):
        moments_of(np.array([[0.0], [1.0], [np.nan]]), np.zeros(3, int))


@pytest.mark.parametrize(("scale", "what"), [(1e5, "means"), (1e9, "directions")])
def test_features_that_do_not_fit_float16_are_refused(scale: float, what: str) -> None:
    rows, labels = many_rows(2, 6, 3)
    rows = rows * scale if what == "means" else (rows - rows.mean(axis=0)) * scale
    with pytest.raises(KnowledgeError, match=r"reach .*float16 holds at most 65504; scale the features down"):
        to_wire(moments_of(rows, labels), 8)


def test_a_device_without_a_large_enough_class_sends_no_tensor() -> None:
    sent = to_wire(moments_of(A, np.zeros(4, int), min_samples=5), 8)
    assert sent.labels == []
    assert encode({"statistics": sent}).data_bytes == 0
    assert from_wire(sent).labels == ()
