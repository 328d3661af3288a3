"""FedDKC's refinement: the specification's oracles DKC-1 to DKC-16 and DKC-18, the laws behind them, and the edges."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from fleetdistill.errors import ConfigurationError, FleetDistillError, KnowledgeError
from fleetdistill.methods.feddkc.ranges import (
    KERNELS,
    check_epsilon,
    check_kernel_name,
    check_target_entropy,
    check_target_peak,
)
from fleetdistill_server.methods.feddkc import refined as blocks
from fleetdistill_server.methods.feddkc.kernels import kkr_kernel
from fleetdistill_server.methods.feddkc.kkr import kkr, linear_scale, stretch
from fleetdistill_server.methods.feddkc.refined import Refined, RefinementTag, no_refinement
from fleetdistill_server.methods.feddkc.skr import row_gaps, skr, unit_bracket

Kernel = Callable[[Tensor], Tensor]
Refinement = Callable[[Tensor], Refined]


def f64(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def logits_of(*probabilities: list[float]) -> Tensor:
    """Logits whose softmax at temperature 1 is the given distribution."""
    return f64(*probabilities).log()


def entropy_bits(probs: Tensor) -> Tensor:
    bits: Tensor = torch.special.entr(probs).sum(dim=1) / math.log(2)
    return bits


def bracket(logits: Tensor, target: float) -> tuple[Tensor, Tensor]:
    """The ends between which the search looks for θ, in the unit of the logits."""
    gaps = row_gaps(logits)
    low, high = unit_bracket(gaps, target)
    return low * 2 * gaps.half_span_b, high * 2 * gaps.half_span_b


def spec_rows() -> Tensor:
    return torch.from_numpy(np.random.default_rng(1).normal(size=(1000, 10)) * 3)


def tags(refined: Refined) -> list[str]:
    return [RefinementTag(code).word for code in refined.codes.tolist()]


def check(refined: Refined, rows: list[list[float]], expected: list[str], atol: float = 1e-6) -> None:
    assert_close(refined.probabilities, f64(*rows), atol=atol, rtol=0)
    assert tags(refined) == expected


PEAKED = [0.7, 0.2, 0.1]


# Oracles: KKR


def test_dkc_1_kkr_flattens_towards_the_target() -> None:
    check(kkr(logits_of(PEAKED), 0.5), [[0.5, 0.272727, 0.227273]], ["affine"])


def test_dkc_2_kkr_is_affine_stretch_around_uniform_distribution() -> None:
    refined = kkr(logits_of(PEAKED), 0.5).probabilities
    stretch = (refined - 1 / 3) / (f64(PEAKED) - 1 / 3)
    assert_close(stretch, torch.full_like(stretch, 0.5 / 1.1))  # (CT-1)/(C·v_m-1) = .454545


def test_dkc_3_kkr_rectifies_a_negative_class() -> None:
    logits = logits_of(PEAKED)
    assert_close(stretch(f64(PEAKED), 0.9), f64([0.9, 0.127273, -0.027273]), atol=1e-6, rtol=0)
    check(kkr(logits, 0.9), [[0.9, 0.05, 0.05]], ["rectified"])
    check(kkr(logits, 0.7), [PEAKED], ["affine"], atol=1e-12)
    largest = 1 / 3 + (0.7 - 1 / 3) * (1 / 3) / (1 / 3 - 0.1)
    assert largest == pytest.approx(0.857143, abs=1e-6)
    assert tags(kkr(logits, largest - 1e-6))[0] == "affine"
    assert tags(kkr(logits, largest + 1e-6))[0] == "rectified"
    rounding = kkr(logits, largest + 1e-13)  # pushes a class to -6e-14: rounding, clipped
    check(rounding, [[largest, 1 - largest, 0]], ["affine"], atol=1e-12)
    assert rounding.probabilities.min() >= 0


def test_dkc_4_kkr_returns_a_constant_row_uniform() -> None:
    check(kkr(torch.zeros(1, 4), 0.5), [[0.25] * 4], ["degenerate"], atol=0)


def test_dkc_5_kkr_shares_the_peak_between_ties_where_it_fits() -> None:
    check(kkr(logits_of([0.4, 0.4, 0.2]), 0.45), [[0.45, 0.45, 0.1]], ["affine"])
    check(kkr(logits_of([0.4, 0.4, 0.2]), 0.6), [[0.6, 0.2, 0.2]], ["rectified"])
    check(kkr(logits_of([0.34, 0.34, 0.2, 0.12]), 0.49), [[0.49, 0.49, 0.01, 0.01]], ["rectified-tied"])


@pytest.mark.parametrize("target", [1 / 3, 0.2, 1.0, math.nan])
def test_dkc_6_kkr_refuses_a_peak_out_of_range(target: float) -> None:
    with pytest.raises(ConfigurationError, match=r"must be in \(1/C, 1\) = \(0.333333, 1\)"):
        kkr(logits_of(PEAKED), target)


def test_dkc_7_kkr_on_random_rows() -> None:
    logits = spec_rows()
    refined = kkr(logits, 0.3)
    probs = refined.probabilities
    assert (probs.sum(dim=1) - 1).abs().max() < 1e-12
    assert probs.min() >= 0
    assert (probs.amax(dim=1) - 0.3).abs().max() < 1e-12
    assert probs.gather(1, logits.argsort(dim=1)).diff(dim=1).min() >= -1e-12
    assert refined.counts() == {"affine": 973, "rectified": 27}
    assert kkr(logits, 0.12).counts() == {"affine": 1000}


# Oracles: SKR


@pytest.mark.parametrize(
    ("target", "theta", "row", "ends"),
    [
        (0.5, 0.7778, [0.9111, 0.0696, 0.0193], (0.39695, 3.98916)),
        (1.0, 1.2867, [0.7642, 0.1615, 0.0742], (0.54763, 7.39891)),
        (1.5, 3.7022, [0.4933, 0.2874, 0.2194], (0.70393, 50.94112)),
    ],
)
def test_dkc_8_skr(target: float, theta: float, row: list[float], ends: tuple[float, float]) -> None:
    refined = skr(f64([3, 1, 0]), target)
    check(refined, [row], ["ok"], atol=6e-5)
    assert refined.scale.item() == pytest.approx(theta, abs=6e-5)
    assert abs(entropy_bits(refined.probabilities).item() - target) < 5e-4
    low, high = bracket(f64([3, 1, 0]), target)
    assert (low.item(), high.item()) == pytest.approx(ends, abs=6e-6)


def test_dkc_9_the_bracket_holds_over_ten_orders_of_magnitude(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "MAX_HALVINGS", 15)
    rng = np.random.default_rng(9)
    for classes in range(2, 101):
        for _ in range(3):
            scale = 10 ** rng.uniform(-6, 4, size=(17, 1))
            logits = torch.from_numpy(rng.normal(size=(17, classes)) * scale)
            target = rng.uniform(0.001, 0.999) * math.log2(classes)
            low, high = bracket(logits, target)
            assert (low < high).all()
            assert (entropy_bits((logits / low[:, None]).softmax(1)) <= target).all()
            assert (entropy_bits((logits / high[:, None]).softmax(1)) >= target).all()
            refined = skr(logits, target)
            assert ((entropy_bits(refined.probabilities) - target).abs() < 5e-4 + 1e-12).all()


def test_dkc_10_skr_solves_tiny_logits_missed_by_fixed_bracket() -> None:
    logits = f64([3, 2, 1]) * 1e-6
    for theta, entropy in ((1e-4, 1.58491), (1000, 1.58496)):
        assert entropy_bits((logits / theta).softmax(1)).item() == pytest.approx(entropy, abs=1e-5)
    low, high = bracket(logits, 1.0)
    assert (low.item(), high.item()) == pytest.approx((2.738e-7, 4.933e-6), rel=2e-4)
    assert skr(logits, 1.0).scale.item() == pytest.approx(7.545e-7, rel=2e-4)


def test_dkc_11_skr_reaches_only_entropies_above_log2_of_ties() -> None:
    logits = f64([5, 5, 0])
    check(skr(logits, 0.8), [[0.5, 0.5, 0]], ["unreachable"], atol=0)
    assert tags(skr(logits, 1.0))[0] == "unreachable"
    assert tags(skr(f64([7, 7, 7, 7, 7, 7, 7, 7, 0]), 3.0))[0] == "unreachable"
    refined = skr(logits, 1.3)
    check(refined, [[0.464158, 0.464158, 0.071684]], ["ok"], atol=2e-6)
    assert refined.scale.item() == pytest.approx(2.67672, abs=1e-5)


def test_dkc_12_skr_returns_a_constant_row_uniform() -> None:
    refined = skr(f64([0, 0, 0, 0], [-0.0, 0, -0.0, 0], [7, 7, 7, 7]), 1.0)
    check(refined, [[0.25] * 4] * 3, ["degenerate"] * 3, atol=0)
    assert refined.scale.isnan().all()


@pytest.mark.parametrize("target", [0.0, math.log2(3), 2.0, math.nan])
def test_dkc_13_skr_refuses_an_entropy_out_of_range(target: float) -> None:
    with pytest.raises(ConfigurationError, match=r"must be in \(0, log2 C\) = \(0, 1.58496\)"):
        skr(f64([3, 1, 0]), target)


def test_dkc_14_entropy_rises_with_theta_which_follows_logits() -> None:
    logits = f64([3, 1, 0])
    theta = torch.logspace(math.log10(0.05), 2, 60, dtype=torch.float64)
    assert (entropy_bits((logits / theta[:, None]).softmax(1)).diff() > 0).all()
    assert_close(skr(logits + 100, 1.0).probabilities, skr(logits, 1.0).probabilities, atol=1e-9, rtol=0)
    ratio = skr(10 * logits, 1.0, epsilon=1e-9).scale / skr(logits, 1.0, epsilon=1e-9).scale
    assert ratio.item() == pytest.approx(10, abs=1e-6)


# Oracles: other kernels


@pytest.mark.parametrize(
    ("kernel", "target", "row", "t"),
    [
        ("exp", 0.5, [0.5, 0.265778, 0.234222], 1.13029),
        ("exp", 0.8, [0.8, 0.11884, 0.081159], 0.37459),
        (torch.exp, 0.5, [0.5, 0.265778, 0.234222], 1.13029),
        (torch.exp, 0.8, [0.8, 0.11884, 0.081159], 0.37459),
        ("softplus", 0.5, [0.5, 0.26855, 0.23145], 0.64054),
        (lambda x: 2 * x + 1, 0.5, [0.5, 0.272727, 0.227273], 1.14286),
        ("quadratic", 0.5, [0.5, 0.258064, 0.241935], 0.94761),
        ("quadratic", 0.8, [0.8, 0.122581, 0.07742], 0.29077),
    ],
)
def test_dkc_15_kernels_reach_the_peak(kernel: str | Kernel, target: float, row: list[float], t: float) -> None:
    refined = kkr_kernel(logits_of(PEAKED), target, kernel=kernel, epsilon=1e-6)
    check(refined, [row], ["ok"], atol=2e-6)
    assert refined.scale.item() == pytest.approx(t, abs=1e-5)


@pytest.mark.parametrize(
    ("kernel", "target"), [("softplus", 0.8), (lambda x: 2 * x + 1, 0.8), ("sigmoid", 0.5), ("sigmoid", 0.8)]
)
def test_dkc_15_kernels_missing_peak_fall_back_to_rectified_row(kernel: str | Kernel, target: float) -> None:
    refined = kkr_kernel(logits_of(PEAKED), target, kernel=kernel, epsilon=1e-6)
    check(refined, [[target, (1 - target) / 2, (1 - target) / 2]], ["unreachable"])
    assert refined.scale.isnan().all()


def test_dkc_16_the_linear_kernels_scale_in_closed_form() -> None:
    logits = logits_of(PEAKED)
    assert linear_scale(f64(PEAKED), 0.5).item() == pytest.approx(0.571429, abs=1e-6)
    assert linear_scale(f64(PEAKED), 0.9).item() == pytest.approx(-0.168067, abs=1e-6)
    assert kkr(logits, 0.5).scale.item() == pytest.approx(0.571429, abs=1e-6)
    assert kkr(logits, 0.9).scale.isnan().all()


def test_dkc_16_the_linear_kernel_by_name_is_kkr() -> None:
    logits = spec_rows()
    for target in (0.12, 0.3, 0.8):
        by_name, closed = kkr_kernel(logits, target, kernel="linear"), kkr(logits, target)
        assert torch.equal(by_name.probabilities, closed.probabilities)
        assert torch.equal(by_name.codes, closed.codes)


def test_dkc_18_the_demos_entropy_leaves_an_eighth_of_a_bit() -> None:
    assert math.log2(10) - 3.2 == pytest.approx(0.121928, abs=1e-6)
    check_target_entropy(3.2, 10)
    check_epsilon(0.2438, target_entropy=3.2, classes=10)
    with pytest.raises(ConfigurationError, match=r"epsilon=0.244 must be < .* = 0.243856"):
        check_epsilon(0.244, target_entropy=3.2, classes=10)


# Laws


@st.composite
def knowledge(draw: st.DrawFn, smallest: float = -6, largest: float = 4) -> Tensor:
    """Rows of normal logits, one order of magnitude drawn for all; a few entries repeated so that rows tie."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    rows, classes = draw(st.integers(1, 8)), draw(st.integers(2, 100))
    logits = torch.randn(rows, classes, dtype=torch.float64, generator=generator)
    if draw(st.booleans()):
        logits = logits.round(decimals=0)
    return logits * 10 ** draw(st.floats(smallest, largest))


fractions = st.floats(0.02, 0.98)


def peak_at(fraction: float, logits: Tensor) -> float:
    return 1 / logits.shape[1] + fraction * (1 - 1 / logits.shape[1])


def entropy_at(fraction: float, logits: Tensor) -> float:
    return fraction * math.log2(logits.shape[1])


def assert_simplex(refined: Refined) -> None:
    probs = refined.probabilities
    assert probs.min() >= 0
    assert_close(probs.sum(dim=1), torch.ones(len(probs), dtype=torch.float64), atol=1e-10, rtol=0)


def assert_order_kept(logits: Tensor, probs: Tensor) -> None:
    for row, refined in zip(logits, probs, strict=True):
        assert refined[row.argsort()].diff().min() >= -1e-12


def with_tag(refined: Refined, *wanted: RefinementTag) -> Tensor:
    return torch.isin(refined.codes, torch.tensor(wanted, dtype=torch.int8))


@given(knowledge(-2, 2), fractions)
def test_kkr_gives_every_row_the_target_peak(logits: Tensor, fraction: float) -> None:
    target = peak_at(fraction, logits)
    refined = kkr(logits, target)
    flat = with_tag(refined, RefinementTag.DEGENERATE)
    probs = refined.probabilities
    assert_simplex(refined)
    assert ((probs[~flat].amax(dim=1) - target).abs() < 1e-9).all()
    assert ((probs[flat] - 1 / logits.shape[1]).abs() == 0).all()
    affine = with_tag(refined, RefinementTag.AFFINE)
    assert_order_kept(logits[affine], probs[affine])
    # A rectified row keeps its best class at least.
    assert (probs.gather(1, logits.argmax(dim=1, keepdim=True)).squeeze(1)[~flat] > target - 1e-9).all()


@given(knowledge(-2, 2), fractions)
def test_kkr_agrees_with_the_papers_fraction_on_affine_rows(logits: Tensor, fraction: float) -> None:
    target, classes = peak_at(fraction, logits), logits.shape[1]
    refined = kkr(logits, target)
    probs = logits.softmax(dim=1)
    peak = probs.amax(dim=1, keepdim=True)
    paper = ((classes * target - 1) * probs + peak - target) / (classes * peak - 1)
    affine = with_tag(refined, RefinementTag.AFFINE) & (classes * peak.squeeze(1) - 1 > 1e-3)  # else it cancels
    assert_close(refined.probabilities[affine], paper[affine], atol=1e-9, rtol=0)


@given(knowledge(), fractions)
def test_skr_gives_every_row_the_target_entropy(logits: Tensor, fraction: float) -> None:
    target = entropy_at(fraction, logits)
    refined = skr(logits, target)
    solved = with_tag(refined, RefinementTag.OK)
    assert_simplex(refined)
    assert_order_kept(logits, refined.probabilities)
    assert ((entropy_bits(refined.probabilities[solved]) - target).abs() < 5e-4 + 1e-12).all()
    assert_close(
        refined.probabilities[solved],
        (logits[solved] / refined.scale[solved][:, None]).softmax(dim=1),
        atol=1e-9,
        rtol=0,
    )
    # Unsolved exactly where the number of equal maxima forbids it.
    ties = (logits == logits.amax(dim=1, keepdim=True)).sum(dim=1)
    assert solved.tolist() == [math.log2(int(m)) < target and int(m) < logits.shape[1] for m in ties]


@given(knowledge(), fractions)
def test_skrs_root_lies_in_its_bracket(logits: Tensor, fraction: float) -> None:
    target = entropy_at(fraction, logits)
    theta, (low, high) = skr(logits, target).scale, bracket(logits, target)
    root = ~theta.isnan()
    assert ((low < theta) & (theta < high))[root].all()


@given(knowledge(-2, 2), fractions, st.sampled_from(["exp", "quadratic", "softplus"]))
def test_a_kernel_that_reaches_the_peak_keeps_the_order(logits: Tensor, fraction: float, kernel: str) -> None:
    target = peak_at(fraction, logits)
    refined = kkr_kernel(logits, target, kernel=kernel)
    solved = with_tag(refined, RefinementTag.OK)
    flat = with_tag(refined, RefinementTag.DEGENERATE)
    assert_simplex(refined)
    assert_order_kept(logits[solved], refined.probabilities[solved])
    assert ((refined.probabilities[solved].amax(dim=1) - target).abs() < 5e-4 + 1e-12).all()
    assert ((refined.probabilities[~solved & ~flat].amax(dim=1) - target).abs() < 1e-12).all()


@pytest.mark.long
@given(knowledge(-2, 2), fractions)
@example(torch.tensor([[1.0, 0, 0, 1]], dtype=torch.float64), 1 / 3)  # two maxima, and a peak of 1/2 is wanted
def test_closed_bracket_of_exp_kernel_finds_same_as_scan(logits: Tensor, fraction: float) -> None:
    target = peak_at(fraction, logits)
    closed = kkr_kernel(logits, target, epsilon=1e-9)
    scanned = kkr_kernel(logits, target, kernel=torch.exp, epsilon=1e-9)
    # M equal maxima come as near to 1/M as ε for large x and never there: no root, which the scan cannot tell.
    ties = (logits == logits.amax(dim=1, keepdim=True)).sum(dim=1)
    both = with_tag(scanned, RefinementTag.OK) & (1 / ties > target + 1e-9)  # where e^x does not overflow on the way
    assert with_tag(closed, RefinementTag.OK)[both].all()
    assert_close(closed.probabilities[both], scanned.probabilities[both], atol=1e-7, rtol=0)


@given(knowledge(-2, 2), fractions, st.floats(-100, 100))
def test_refinements_ignore_a_shift_of_the_logits(logits: Tensor, fraction: float, shift: float) -> None:
    # A multiple of the logits' last digit, so that shifting rounds nothing away and ties stay ties.
    grid = logits.mul(2**20).round() / 2**20
    moved = grid + round(shift)
    peak, entropy = peak_at(fraction, grid), entropy_at(fraction, grid)
    assert_close(kkr(moved, peak).probabilities, kkr(grid, peak).probabilities, atol=1e-12, rtol=0)
    assert_close(skr(moved, entropy).probabilities, skr(grid, entropy).probabilities, atol=1e-12, rtol=0)


@given(knowledge(), fractions, st.floats(-3, 3))
def test_theta_scales_with_the_logits(logits: Tensor, fraction: float, exponent: float) -> None:
    target, factor = entropy_at(fraction, logits), 2.0 ** round(exponent * 10)
    base, scaled = skr(logits, target), skr(logits * factor, target)
    assert torch.equal(scaled.codes, base.codes)
    assert_close(scaled.scale, base.scale * factor, rtol=1e-12, atol=0, equal_nan=True)
    assert_close(scaled.probabilities, base.probabilities, rtol=0, atol=1e-12)


@given(knowledge(-2, 2), fractions)
def test_a_batch_refines_as_its_rows_do_one_by_one(logits: Tensor, fraction: float) -> None:
    peak, entropy = peak_at(fraction, logits), entropy_at(fraction, logits)
    refinements: list[Refinement] = [lambda z: kkr(z, peak), lambda z: skr(z, entropy), lambda z: kkr_kernel(z, peak)]
    for refine in refinements:
        whole, single = refine(logits), [refine(row[None]) for row in logits]
        assert_close(whole.probabilities, torch.cat([item.probabilities for item in single]), atol=1e-12, rtol=0)
        assert tags(whole) == [tags(item)[0] for item in single]


@pytest.mark.long
def test_blocks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = spec_rows()
    logits[::50] = 1.5
    whole = [kkr(logits, 0.3), skr(logits, 1.5), kkr_kernel(logits, 0.3, kernel="quadratic")]
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", 70)
    for before, after in zip(
        whole, [kkr(logits, 0.3), skr(logits, 1.5), kkr_kernel(logits, 0.3, kernel="quadratic")], strict=True
    ):
        assert_close(after.probabilities, before.probabilities, atol=1e-12, rtol=0)
        assert_close(after.scale, before.scale, equal_nan=True)
        assert torch.equal(after.codes, before.codes)


@given(knowledge(-2, 2), st.floats(0.05, 20))
def test_no_refinement_is_softmax(logits: Tensor, temperature: float) -> None:
    refined = no_refinement(logits, temperature=temperature)
    assert_close(refined.probabilities, (logits / temperature).softmax(dim=1), atol=1e-12, rtol=1e-9)
    assert set(tags(refined)) == {"ok"}


@given(knowledge(-2, 2), fractions, st.floats(0.1, 10))
def test_the_temperature_of_kkr_divides_the_logits(logits: Tensor, fraction: float, temperature: float) -> None:
    target = peak_at(fraction, logits)
    refined = kkr(logits, target, temperature=temperature)
    affine = with_tag(refined, RefinementTag.AFFINE)
    expected = stretch((logits / temperature).softmax(dim=1), target)
    assert_close(refined.probabilities[affine], expected[affine], atol=1e-6, rtol=1e-6)


# Edges

REFINEMENTS: dict[str, Refinement] = {
    "none": lambda z: no_refinement(z, temperature=0.15),
    "kkr": lambda z: kkr(z, 0.75, temperature=0.15),
    "skr": lambda z: skr(z, 0.5),
    "exp": lambda z: kkr_kernel(z, 0.75),
    "softplus": lambda z: kkr_kernel(z, 0.75, kernel="softplus"),
}
every_refinement = pytest.mark.parametrize("refine", REFINEMENTS.values(), ids=REFINEMENTS.keys())


@every_refinement
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_float_type_gives_float64_without_gradient(refine: Refinement, dtype: torch.dtype) -> None:
    logits = torch.tensor([[3.0, 1, 0], [2, 2, 2], [-1, 5, 5]], dtype=dtype, requires_grad=True)
    refined = refine(logits)
    assert_close(refined.probabilities, refine(logits.detach().double()).probabilities)
    assert refined.probabilities.dtype == refined.scale.dtype == torch.float64
    assert refined.codes.dtype == torch.int8
    assert not refined.probabilities.requires_grad


@every_refinement
def test_no_rows_and_two_classes_work(refine: Refinement) -> None:
    empty = refine(torch.zeros(0, 3))
    assert empty.probabilities.shape == (0, 3)
    assert tags(empty) == []
    assert empty.counts() == {}
    assert_simplex(refine(torch.randn(20, 2, generator=torch.Generator().manual_seed(0))))


@every_refinement
def test_logits_at_the_ends_of_float64_stay_finite(refine: Refinement) -> None:
    logits = f64(
        [1.7e308, -1.7e308, 0],
        [1e300, 1e299, -1e300],
        [3e-300, 1e-300, 0],
        [5e-324, 0, 0],
        [0, -5e-324, -1.7e308],
        [1, 1 - 2**-53, -1e300],
        [0.0, -0.0, 0.0],
    )
    refined = refine(logits)
    assert refined.probabilities.isfinite().all()
    assert_simplex(refined)


def test_skr_solves_what_float64_can_hold() -> None:
    logits = f64([1.7e308, -1.7e308, 0], [1e300, 1e299, -1e300], [3e-300, 1e-300, 0], [1, 1 - 2**-53, -1e200])
    refined = skr(logits, 0.5)
    assert tags(refined) == ["ok"] * 4
    assert_close(entropy_bits(refined.probabilities), torch.full((4,), 0.5, dtype=torch.float64), atol=5e-4, rtol=0)


def test_skr_takes_a_gap_of_1e_300_of_the_largest_for_a_tie() -> None:
    check(skr(f64([0, -1e-3, -1e300]), 0.5), [[0.5, 0.5, 0]], ["unreachable"], atol=0)


def test_epsilon_below_float64_precision_ends_at_precision() -> None:
    refined = skr(spec_rows(), 1.5, epsilon=1e-30)
    assert (entropy_bits(refined.probabilities) - 1.5).abs().max() < 1e-12


def test_kkr_does_not_depend_on_rounding_of_ties() -> None:
    wobble = f64([0.4, 0.4 * (1 + 1e-12), 0.2]).log()
    check(kkr(wobble, 0.6), [[0.6, 0.2, 0.2]], ["rectified"])
    wobble = f64([0.34, 0.34 * (1 - 1e-12), 0.2, 0.12]).log()
    check(kkr(wobble, 0.49), [[0.49, 0.49, 0.01, 0.01]], ["rectified-tied"])


def test_exp_kernel_reaches_at_most_one_over_number_of_ties() -> None:
    ties = logits_of([0.4, 0.4, 0.2])
    check(kkr_kernel(ties, 0.5), [[0.5, 0.5, 0]], ["unreachable"])
    check(kkr_kernel(ties, 0.6), [[0.6, 0.2, 0.2]], ["unreachable"])
    check(kkr_kernel(ties, 0.49), [[0.49, 0.49, 0.02]], ["ok"], atol=2e-3)


def test_a_kernel_returns_a_constant_row_uniform() -> None:
    for kernel in KERNELS:
        check(kkr_kernel(torch.full((1, 4), 3.0), 0.5, kernel=kernel), [[0.25] * 4], ["degenerate"])


@every_refinement
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_first_non_finite_row_is_named(refine: Refinement, bad: float) -> None:
    logits = torch.zeros(5, 3)
    logits[2, 1] = logits[4, 0] = bad
    with pytest.raises(KnowledgeError, match=r"^non-finite logits at row 2$"):
        refine(logits)


@every_refinement
@pytest.mark.parametrize("shape", [(3,), (2, 3, 4), (5, 1), (5, 0)])
def test_logits_of_another_shape_are_refused(refine: Refinement, shape: tuple[int, ...]) -> None:
    with pytest.raises(KnowledgeError, match="expected"):
        refine(torch.zeros(shape))


def test_messages_name_the_value_and_the_range() -> None:
    with pytest.raises(ConfigurationError) as peak:
        check_target_peak(0.1, 10)
    assert str(peak.value) == "target peak T=0.1 must be in (1/C, 1) = (0.1, 1)"
    with pytest.raises(ConfigurationError) as entropy:
        check_target_entropy(3.4, 10)
    assert str(entropy.value) == "target entropy E=3.4 must be in (0, log2 C) = (0, 3.32193)"


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan, math.inf])
def test_an_epsilon_that_is_not_positive_is_refused(epsilon: float) -> None:
    for refine in (lambda: skr(f64([3, 1, 0]), 1.0, epsilon=epsilon), lambda: check_epsilon(epsilon)):
        with pytest.raises(ConfigurationError, match="epsilon must be > 0"):
            refine()
    for kernel in KERNELS:
        with pytest.raises(ConfigurationError, match="epsilon must be > 0"):
            kkr_kernel(f64([3, 1, 0]), 0.5, kernel=kernel, epsilon=epsilon)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_a_temperature_that_is_not_positive_is_refused(temperature: float) -> None:
    logits = f64([3, 1, 0])
    refused: list[Callable[[], Refined]] = [
        lambda: kkr(logits, 0.5, temperature=temperature),
        lambda: kkr_kernel(logits, 0.5, temperature=temperature),
        lambda: no_refinement(logits, temperature=temperature),
    ]
    for refine in refused:
        with pytest.raises(ConfigurationError, match="temperature must be"):
            refine()


@pytest.mark.parametrize(
    ("kernel", "fault"),
    [
        (lambda x: 3 * x, "not positive"),
        (lambda x: x**2, "not positive"),
        (lambda x: torch.clamp(x, min=1e-6), "proportional"),
        (lambda x: x - 1, "not positive"),
        (lambda x: torch.exp(-x), "does not increase"),
        (lambda x: torch.ones_like(x), "does not increase"),
        (lambda x: 2 + torch.sin(x), "does not increase"),
        (lambda x: 1 + torch.floor(x), "jumps"),
        (lambda x: 1 + x + (x > 3.3), "jumps"),
        (lambda x: 1 / x, "not finite"),
    ],
)
def test_an_unfit_kernel_is_refused(kernel: Kernel, fault: str) -> None:
    with pytest.raises(ConfigurationError, match="kernel must be positive, increasing and not proportional to x") as e:
        kkr_kernel(f64([3, 1, 0]), 0.5, kernel=kernel)
    assert fault in str(e.value)


def test_kernels_by_name_are_those_that_the_configuration_knows() -> None:
    for name in KERNELS:
        check_kernel_name(name)
        assert_simplex(kkr_kernel(spec_rows(), 0.3, kernel=name))
    for refuse in (lambda: check_kernel_name("relu"), lambda: kkr_kernel(f64([3, 1]), 0.6, kernel="relu")):
        with pytest.raises(FleetDistillError, match="unknown kernel 'relu', expected one of exp, linear"):
            refuse()
    with pytest.raises(ConfigurationError, match="same shape"):
        kkr_kernel(f64([3, 1]), 0.6, kernel=lambda x: x.sum())


def test_tags_are_words_and_are_counted() -> None:
    refined = kkr(torch.cat([logits_of(PEAKED, [1 / 3] * 3), logits_of([0.4, 0.4, 0.2])]), 0.5)
    assert tags(refined) == ["affine", "degenerate", "affine"]
    assert refined.codes[1] == RefinementTag.DEGENERATE
    assert refined.counts() == {"affine": 2, "degenerate": 1}
    assert refined.counts()["rectified"] == 0


def test_the_ranges_are_checked_without_torch() -> None:
    code = "import sys; import fleetdistill.methods.feddkc.ranges; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("given", [np.array([[3.0, 1.0, 0.0]]), [[3.0, 1.0, 0.0]], np.array([[3, 1, 0]], np.float32)])
def test_arrays_and_lists_are_taken(given: object) -> None:
    expected = skr(torch.tensor([[3.0, 1.0, 0.0]], dtype=torch.float64), 1.0)
    assert torch.equal(skr(given, 1.0).probabilities, expected.probabilities)  # type: ignore[arg-type]
    assert kkr(given, 0.5).probabilities.max() == pytest.approx(0.5)  # type: ignore[arg-type]
