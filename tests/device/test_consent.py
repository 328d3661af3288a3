"""The gate: nothing leaves a device that its app has not allowed."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.wire_samples import make_knowledge, make_metrics

from fleetdistill import COLUMNS
from fleetdistill import knowledge as k
from fleetdistill.device.consent import ColumnWithdrawn, Consent, check_may_leave
from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import KINDS

ROW = np.zeros((1, 3), np.float32)
IDS = np.zeros(1, np.int64)
MODEL = k.ModelParameters(parameters={"w": ROW})
HOLDS: list[tuple[k.Kind, set[str]]] = [
    (make_knowledge(), {"features", "logits", "labels"}),
    (k.SampleKnowledge(sample_ids=IDS), set()),
    (k.SampleKnowledge(sample_ids=IDS, features={"cut": ROW}), {"features"}),
    (k.SampleKnowledge(sample_ids=IDS, logits=ROW), {"logits"}),
    (k.SampleKnowledge(sample_ids=IDS, labels=IDS), {"labels"}),
    (k.ProxyKnowledge(valid=True, logits=ROW), {"logits"}),
    (k.ProxyKnowledge(valid=True, embeddings=ROW), {"features"}),
    (k.ProxyKnowledge(valid=True, logits=ROW, embeddings=ROW), {"features", "logits"}),
    (k.ProxyKnowledge(valid=False), set()),
    (k.WeightedPredictions(noise_seed=1, values=ROW), {"logits"}),
    (k.SharedStatistics(labels=[]), {"class_statistics", "counts"}),
    (k.ClassSums(counts=ROW, sums=ROW, second_moment=ROW, mu=1.0, discrete=True), {"class_statistics", "counts"}),
    (k.SecureMessage(numbers=ROW), {"class_statistics", "counts"}),
    (k.SecureMessage(gradient=ROW), {"gradients"}),
    (MODEL, {"parameters"}),
    (k.Generator(parameters=MODEL, noise_size=3), {"parameters"}),
    (k.Discriminator(parameters=MODEL, shares_extractor=True), {"parameters"}),
    (k.DistillationGradient(gradients={"w": ROW}, batch_size=1, loss=0.0), {"gradients"}),
    (k.HeadGradient(gradient=ROW, scale=1.0, loss=0.0, rows=1), {"gradients"}),
    (k.NamedTensors(tensors={"means": ROW}, reveals=["features", "counts"]), {"features", "counts"}),
    (k.NamedTensors(tensors={"means": ROW}), set()),
    (make_metrics(), {"metrics"}),
]
NEVER: list[k.Kind] = [
    k.RefinedKnowledge(valid=True, sample_ids=IDS, values=ROW),
    k.Plan(values={"cut": 1}),
    k.ProxySet(name="p", licence="none", inputs=ROW, labels=IDS),
    k.ClassSpace(
        labels=[0, 1], counts=IDS, directions=ROW, origin=ROW, centres=ROW, df=IDS, shrinkage=ROW, outside=ROW
    ),
    k.LinearHead(labels=[0, 1], counts=IDS, mean=ROW, weights=ROW),
    k.NetworkFile(onnx=np.zeros(3, np.uint8)),
    k.PrivateRows(ROW, IDS, 2),
]


def test_the_line_to_add_allows_all_that_is_missing() -> None:
    parts = {"statistics": k.SharedStatistics(labels=[]), "more": k.SampleKnowledge(sample_ids=IDS, logits=ROW)}
    line = 'Device(allow=["class_statistics", "counts", "metrics", "logits"])'
    with pytest.raises(ConfigurationError, match=re.escape(f"nothing is sent; to allow it, set {line}")):
        check_may_leave(parts, ("metrics",))


def test_every_kind_has_its_place_here() -> None:
    """A new kind must be given a column, or be kept in, before it can be sent."""
    assert {type(kind) for kind, _ in HOLDS} | {type(kind) for kind in NEVER} - {k.PrivateRows} == set(KINDS.values())


@pytest.mark.parametrize(("kind", "columns"), HOLDS)
def test_what_a_part_tells_about_the_device(kind: k.Kind, columns: set[str]) -> None:
    assert set(kind.columns()) == columns
    assert columns <= set(kind.possible_columns or ()) <= set(COLUMNS)


@given(
    st.dictionaries(st.text(min_size=1), st.sampled_from(HOLDS), max_size=4),
    st.sets(st.sampled_from(COLUMNS)),
)
def test_parts_pass_exactly_when_every_column_is_allowed(
    held: dict[str, tuple[k.Kind, set[str]]], allow: set[str]
) -> None:
    parts = {name: kind for name, (kind, _) in held.items()}
    if all(columns <= allow for _, columns in held.values()):
        check_may_leave(parts, sorted(allow))
        return
    with pytest.raises(ConfigurationError, match="which the app does not allow; nothing is sent"):
        check_may_leave(parts, sorted(allow))


def test_the_refusal_names_part_and_column() -> None:
    with pytest.raises(ConfigurationError) as error:
        check_may_leave({"metrics": make_metrics(), "knowledge": make_knowledge()}, ["metrics", "features", "logits"])
    assert str(error.value) == (
        "part 'knowledge' contains labels, which the app does not allow; nothing is sent; to allow it, set "
        'Device(allow=["metrics", "features", "logits", "labels"])'
    )


@pytest.mark.parametrize("kind", NEVER)
def test_kinds_that_no_column_lets_out_never_leave(kind: k.Kind) -> None:
    with pytest.raises(ConfigurationError) as error:
        check_may_leave({"extra": kind}, COLUMNS)
    assert str(error.value) == (
        f"part 'extra' is a {type(kind).__name__}, which must never leave a device; nothing is sent"
    )


@pytest.mark.parametrize("withdrawn", ["features", "logits", "labels"])
def test_each_column_of_a_stored_answer_is_checked(withdrawn: str) -> None:
    columns = ("features", "logits", "labels")
    consent = Consent(columns)
    consent.check_stored({"knowledge": columns})
    consent.narrow([column for column in columns if column != withdrawn])
    with pytest.raises(ColumnWithdrawn, match=f"part 'knowledge' contains {withdrawn}, which the app no longer allows"):
        consent.check_stored({"knowledge": columns})
