"""Class statistics: the specification's oracles, and laws that hold for any features."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.testing import assert_allclose

from fleetdistill.errors import KnowledgeError
from fleetdistill.knowledge import Array
from fleetdistill.methods.classstats import gaussians as class_statistics
from fleetdistill.methods.classstats.gaussians import ClassSummary, clip, draw, draw_classes, merge, shrink, summarise
from fleetdistill.seeds import derive_seed

A_0 = np.array([[1.0, 0, 2], [3, 1, 2], [2, 2, 5], [0, 1, 3]])
B_0 = np.array([[4.0, 1, 0], [6, 3, 1]])
B_1 = np.array([[0.0, 5, 1], [1, 4, 1], [2, 6, 1]])
WITHIN = 1e-6


def of_half(rows_nf: Array, rank: int) -> ClassSummary:
    """With the specification's first cap on directions, (n - 1) // 2, which its oracles are of."""
    return summarise(rows_nf, rank, rows_per_direction=2)


def merged() -> dict[int, ClassSummary]:
    return {0: merge([of_half(A_0, 1), of_half(B_0, 1)], 1), 1: merge([of_half(B_1, 1)], 1)}


def assert_is(one: ClassSummary, count: int, mean: object, directions: object, variance: object) -> None:
    assert one.count == count
    for found, expected in ((one.mean, mean), (one.directions[0], directions), (one.variance, variance)):
        assert_allclose(found, expected, atol=WITHIN)  # type: ignore[call-overload]


# --- oracles


def test_sta_1_a_summary_has_the_exact_diagonal_and_few_directions() -> None:
    one = of_half(A_0, 1)
    assert_is(one, 4, [1.5, 1, 3], [0.2874462, 0.7737125, 1.3720919], [1.5840414, 0.0680357, 0.1173637])
    assert_allclose(one.diagonal, [1.6666667, 0.6666667, 2], atol=WITHIN)
    three = of_half(A_0, 3)
    assert three.directions.shape == (3, 3)
    assert (np.abs(three.directions).sum(axis=1) > 0).tolist() == [True, False, False]
    assert_allclose(three.diagonal, A_0.var(axis=0, ddof=1), atol=WITHIN)


def test_sta_2_two_rows_have_no_direction() -> None:
    assert_is(of_half(B_0, 1), 2, [5, 2, 0.5], [0, 0, 0], [2, 2, 0.5])
    assert_is(of_half(B_1, 1), 3, [1, 5, 1], [0.8660254, 0.8660254, 0], [0.25, 0.25, 0])


def test_sta_3_one_row_is_its_own_mean() -> None:
    assert_is(summarise(A_0[:1], 1), 1, A_0[0], [0, 0, 0], [0, 0, 0])


def test_sta_4_a_merge_has_the_pooled_diagonal() -> None:
    one = merged()[0]
    directions, variance = [1.5556933, 0.31825, -1.3991314], [2.0798183, 1.2320502, 0.9313202]
    assert_is(one, 6, [2.6666667, 1.3333333, 2.1666667], directions, variance)
    assert_allclose(one.diagonal, [4.5, 1.3333333, 2.8888889], atol=WITHIN)


def test_sta_5_merging_one_part_gives_it_back() -> None:
    one = of_half(B_1, 1)
    assert_is(merge([one], 1), one.count, one.mean, one.directions[0], one.variance)


def test_sta_6_shrinking_goes_towards_the_pooled_variance() -> None:
    found = shrink(merged(), 0.1)
    assert_is(
        found[0],
        6,
        merged()[0].mean,
        [1.4758603, 0.3019185, -1.3273326],
        [2.2051698, 1.2310674, 1.0307807],
    )
    assert_is(found[1], 3, merged()[1].mean, [0.8215838, 0.8215838, 0], [0.5583333, 0.3472222, 0.1925926])


def test_sta_7_rows_of_a_seed() -> None:
    rows = [[6.359937, 2.5270568, 3.2911207], [3.2506666, 0, 3.8395776], [2.5396807, 0.0908342, 2.3593661]]
    assert_allclose(draw(shrink(merged(), 0.1)[0], 3, 12345, nonnegative=True), rows, atol=WITHIN)


def test_sta_8_many_rows_have_the_moments_of_the_summary() -> None:
    one = ClassSummary(
        count=1,
        mean=np.array([1.0, 2, 3]),
        directions=np.array([[0.5, 0.5, 0]]),
        variance=np.array([0.01, 0.04, 0.09]),
    )
    rows = draw(one, 20_000, 7, nonnegative=True)
    assert_allclose(rows.mean(axis=0), [0.9992312, 1.9941076, 3.0003597], atol=WITHIN)
    assert_allclose(rows.var(axis=0), [0.2473477, 0.291006, 0.0892256], atol=WITHIN)
    assert np.cov(rows.T)[0, 1] == pytest.approx(0.243395, abs=WITHIN)


# --- laws


def features(rows: int | None = None) -> st.SearchStrategy[Array]:
    count = st.integers(1, 12) if rows is None else st.just(rows)
    shapes = st.tuples(count, st.integers(1, 6))
    return shapes.flatmap(lambda shape: arrays(np.float64, shape, elements=st.floats(-50, 50, width=32)))


ranks = st.integers(0, 8)


norms = st.floats(0.01, 200)


@given(rows=features(), norm=norms)
def test_clipped_rows_are_no_longer_than_that_and_shorter_ones_stay_as_they_are(rows: Array, norm: float) -> None:
    found, lengths = clip(rows, norm), np.linalg.norm(rows, axis=1)
    short = lengths <= norm
    assert found[short].tobytes() == rows[short].tobytes()
    assert_allclose(np.linalg.norm(found[~short], axis=1), norm, rtol=1e-12)
    assert_allclose(found * lengths[:, None], rows * np.linalg.norm(found, axis=1)[:, None], rtol=1e-9, atol=1e-9)


@given(rows=features(), norm=norms, data=st.data(), rank=ranks)
def test_one_row_moves_the_sums_of_clipped_rows_by_no_more_than_the_norm(
    rows: Array, norm: float, data: st.DataObject, rank: int
) -> None:
    another = data.draw(arrays(np.float64, (1, rows.shape[1]), elements=st.floats(-1e6, 1e6)))

    def sums(of: Array) -> tuple[Array, Array]:
        one = summarise(clip(of, norm), rank)
        return one.count * one.mean, (one.count - 1) * one.diagonal + one.count * np.square(one.mean)

    without, with_it = sums(rows), sums(np.concatenate([rows, another]))
    rounding = 1e-9 * len(rows)
    assert np.linalg.norm(with_it[0] - without[0]) <= norm * (1 + rounding)
    assert np.linalg.norm(with_it[1] - without[1]) <= norm**2 * (1 + rounding)
    assert np.linalg.norm(without[0]) <= len(rows) * norm * (1 + rounding)


@pytest.mark.parametrize(("rows", "directions"), [(9, 0), (10, 1), (19, 1), (20, 2), (29, 2), (90, 8)])
def test_there_are_ten_rows_for_each_direction(rows: int, directions: int) -> None:
    found = summarise(np.random.default_rng(rows).standard_normal((rows, 40)), 8).directions
    assert (np.abs(found).sum(axis=1) > 0).tolist() == [True] * directions + [False] * (8 - directions)


@given(rows=features(), rank=ranks, rows_per_direction=st.integers(2, 12))
def test_a_summary_keeps_mean_and_diagonal_and_no_more_directions_than_its_rows_allow(
    rows: Array, rank: int, rows_per_direction: int
) -> None:
    one = summarise(rows, rank, rows_per_direction)
    assert one.directions.shape == (rank, rows.shape[1])
    assert (one.variance >= 0).all()
    assert_allclose(one.mean, rows.mean(axis=0), atol=1e-9)
    expected = rows.var(axis=0, ddof=1) if len(rows) > 1 else np.zeros(rows.shape[1])
    assert_allclose(one.diagonal, expected, atol=1e-6)
    most = min(len(rows) // rows_per_direction, (len(rows) - 1) // 2)
    assert (np.abs(one.directions).sum(axis=1) > 0).sum() <= most


@given(rows=features(), rank=ranks)
def test_directions_are_orthogonal_longest_first_and_of_one_sign(rows: Array, rank: int) -> None:
    found = of_half(rows, rank).directions
    products = found @ found.T
    lengths = products.diagonal()
    assert_allclose(products - np.diag(lengths), 0, atol=1e-6 * max(1.0, float(lengths.max(initial=0))))
    assert (np.diff(lengths) <= 1e-9 * max(1.0, float(lengths.max(initial=0)))).all()
    assert all(row[np.abs(row).argmax()] >= 0 for row in found)


@given(rows=features(rows=9), rank=ranks)
def test_directions_are_those_of_a_singular_value_decomposition(rows: Array, rank: int) -> None:
    scaled = (rows - rows.mean(axis=0)) / np.sqrt(8)
    values = np.linalg.svd(scaled, compute_uv=False)[: min(rank, 4)]
    found = np.sqrt(np.square(of_half(rows, rank).directions).sum(axis=1))[: len(values)]
    assert_allclose(found, values, atol=1e-5 * max(1.0, float(values.max(initial=0))))


def many(shape: tuple[int, int], spectrum: Array) -> Array:
    """Rows whose singular values are these, and none beyond."""
    generator, rank = np.random.default_rng(5), len(spectrum)
    left, right = (np.linalg.qr(generator.standard_normal((size, rank))).Q for size in shape)
    return np.asarray(left * spectrum @ right.T)


@pytest.mark.parametrize("shape", [(60, 50), (50, 60)])
@pytest.mark.parametrize("spectrum", [0.9 ** np.arange(20), np.array([4.0, 4, 4, 1]), np.array([3.0]), np.zeros(1)])
def test_directions_of_known_spectra(shape: tuple[int, int], spectrum: Array) -> None:
    """Also where more are alike than are wanted, and where there are fewer."""
    rows = many(shape, spectrum)
    found = class_statistics._principal(rows, 2, 2)
    expected = np.pad(spectrum, (0, 1))[:2]
    assert_allclose(np.linalg.norm(found, axis=1), expected, atol=WITHIN)
    assert_allclose(np.linalg.norm(rows @ found.T, axis=0), expected**2, atol=WITHIN)
    assert abs(found[0] @ found[1]) < WITHIN


@given(data=st.data(), rank=ranks, parts=st.integers(1, 4))
def test_a_merge_has_the_pooled_moments_whatever_the_order(data: st.DataObject, rank: int, parts: int) -> None:
    size = data.draw(st.integers(1, 5))
    elements = st.floats(-50, 50, width=32)
    rows = [
        data.draw(arrays(np.float64, (data.draw(st.integers(1, 9)), size), elements=elements)) for _ in range(parts)
    ]
    summaries = [of_half(one, rank) for one in rows]
    one, other = merge(summaries, rank), merge(summaries[::-1], rank)
    total = sum(len(part) for part in rows)
    mean = np.concatenate(rows).mean(axis=0)
    pooled = sum(
        len(part) / total * (summary.diagonal + (summary.mean - mean) ** 2)
        for part, summary in zip(rows, summaries, strict=True)
    )
    assert one.count == other.count == total
    assert (one.variance >= 0).all()
    scale = 1e-9 * max(1.0, float(np.max(pooled)))
    for found in (one, other):
        assert_allclose(found.mean, mean, atol=1e-8)
        assert_allclose(found.diagonal, pooled, atol=1e3 * scale)


@given(rows=features(), rank=ranks)
def test_merging_one_part_gives_it_back_whatever_it_is(rows: Array, rank: int) -> None:
    one = of_half(rows, rank)
    again = merge([one], rank)
    scale = 1e-7 * max(1.0, float(one.diagonal.max()))
    assert_allclose(again.mean, one.mean, atol=1e-9)
    assert_allclose(again.variance, one.variance, atol=scale)
    assert_allclose(again.directions.T @ again.directions, one.directions.T @ one.directions, atol=scale)


@given(rows=features(rows=8), share=st.floats(0, 0.99))
def test_shrinking_keeps_the_pooled_variance_and_zero_changes_nothing(rows: Array, share: float) -> None:
    classes = {3: of_half(rows, 2), 5: of_half(rows[:5] * 2 + 1, 2)}
    found = shrink(classes, share)

    def pooled(of: dict[int, ClassSummary]) -> Array:
        return np.asarray(sum(one.count * one.diagonal for one in of.values()) / 13)

    assert_allclose(pooled(found), pooled(classes), rtol=1e-9, atol=1e-12)
    if share == 0:
        assert_allclose(found[5].directions, classes[5].directions)
        assert_allclose(found[5].variance, classes[5].variance)
    assert shrink({}, share) == {}


@given(rows=features(rows=7), seed=st.integers(0, 2**64 - 1), count=st.integers(0, 20))
def test_drawn_rows_are_named_by_their_seed(rows: Array, seed: int, count: int) -> None:
    one = of_half(rows, 2)
    found = draw(one, count, seed, nonnegative=False)
    assert found.shape == (count, rows.shape[1])
    assert np.array_equal(found, draw(one, count, seed, nonnegative=False))
    assert np.array_equal(np.maximum(found, 0), draw(one, count, seed, nonnegative=True))
    if count and one.diagonal.max() > 1e-3:
        assert not np.array_equal(found, draw(one, count, (seed + 1) % 2**64, nonnegative=False))


@given(rows=features(rows=7), seed=st.integers(0, 2**63 - 1))
def test_every_class_is_drawn_from_a_seed_of_its_own(rows: Array, seed: int) -> None:
    """Two classes of one summary: the same Gaussian, other noise; each class's rows do not depend on the others."""
    one = of_half(rows, 2)
    found, labels = draw_classes({2: one, 5: one}, 4, seed, nonnegative=False)
    assert labels.tolist() == [2] * 4 + [5] * 4
    if one.diagonal.max() > 1e-3:
        assert not np.array_equal(found[:4], found[4:])
    alone, _ = draw_classes({5: one}, 4, seed, nonnegative=False)
    assert np.array_equal(alone, found[4:])
    expected = draw(one, 4, derive_seed(seed, "class", 5), nonnegative=False)
    assert np.array_equal(alone, expected.astype(np.float32))


@settings(max_examples=2)
@given(seed=st.integers(0, 2**63 - 1))
def test_the_same_seed_gives_the_same_rows_at_any_thread_count(seed: int) -> None:
    code = (
        "import hashlib, numpy as np; from fleetdistill.methods.classstats.gaussians import ClassSummary, draw\n"
        "r = np.random.default_rng(3)\n"
        "s = ClassSummary(count=9, mean=r.random(300), directions=r.random((8, 300)), variance=r.random(300))\n"
        f"print(hashlib.sha256(draw(s, 200, {seed}, nonnegative=True).tobytes()).hexdigest())\n"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads},
            check=True,
            capture_output=True,
        ).stdout
        for threads in ("1", "2")
    }
    assert len(said) == 1


@pytest.mark.parametrize("rows", [np.zeros((0, 3)), np.array([[1.0, np.nan]]), np.array([[np.inf]])])
def test_what_has_no_moments_is_refused(rows: Array) -> None:
    with pytest.raises(KnowledgeError, match="cannot summarise"):
        summarise(rows, 2)


def test_nothing_to_merge_is_refused() -> None:
    with pytest.raises(KnowledgeError, match="no summary to merge"):
        merge([], 2)


def test_the_benchmark_measures_every_step(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    small = {"features": 64, "classes": 3, "devices": 2, "rank": 2, "rows": 9, "large-rows": 40, "drawn-rows": 3}
    arguments = [word for name, value in small.items() for word in (f"--{name}", str(value))]
    importlib.import_module("class_statistics").main(arguments)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("64 features, 3 classes, 2 devices, rank 2; ")
    assert [line.split()[0] for line in printed[2:]] == ["summarise", "summarise", "merge", "shrink", "draw"]
