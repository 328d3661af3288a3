"""Parts and tensors must be those of the contract and the ask."""

from __future__ import annotations

import numpy as np
import pytest
from intake.taken_in import FLOAT32, refusal, said, take_in
from support.wire_samples import (
    CUT_SHAPE,
    f32,
    i32,
    i64,
    make_contract,
    make_knowledge,
    make_metrics,
    make_payload,
)

from fleetdistill import knowledge as k
from fleetdistill.errors import RefusedError
from fleetdistill.knowledge.reports import MAX_METRICS
from fleetdistill.wire.codec import Payload, encode
from fleetdistill.wire.codes import Code
from fleetdistill.wire.payload import ELEMENT_TYPES, slots
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2
from fleetdistill_server.intake.ingest import Ingest

BAD_TENSORS: dict[str, tuple[Payload, str, str]] = {
    "wrong feature shape": (
        make_payload(features={"cut": np.zeros((4, 2, 3), FLOAT32)}),
        "knowledge/features/cut has shape [4, 2, 3], expected [N, 2, 2]",
        "knowledge/features/cut",
    ),
    "wrong number of classes": (
        make_payload(logits=np.zeros((4, 10), FLOAT32)),
        "knowledge/logits has shape [4, 10], expected [N, 3]",
        "knowledge/logits",
    ),
    "too few axes": (
        make_payload(logits=np.zeros(4, FLOAT32)),
        "knowledge/logits has shape [4], expected [N, 3]",
        "knowledge/logits",
    ),
    "a scalar": (
        make_payload(labels=i32(1)),
        "knowledge/labels has shape [], expected [N]",
        "knowledge/labels",
    ),
    "features in half precision": (
        encode({"knowledge": make_knowledge()}, np.float16),
        "knowledge/features/cut is float16, expected float32",
        "knowledge/features/cut",
    ),
    "labels of the wrong type": (
        make_payload(labels=np.zeros(4, np.int64)),
        "knowledge/labels is int64, expected int32",
        "knowledge/labels",
    ),
    "unknown column": (
        make_payload(features={"cut": np.zeros((4, *CUT_SHAPE), FLOAT32), "deep": np.zeros((4, 1), FLOAT32)}),
        "tensor 'knowledge/features/deep' is not part of the contract",
        "knowledge/features/deep",
    ),
    "columns that disagree": (
        make_payload(labels=np.zeros(3, np.int32)),
        "knowledge/labels has 3 rows, but knowledge/sample_ids has 4; they must agree",
        "knowledge/labels",
    ),
    "no rows at all": (
        make_payload(0),
        "knowledge/sample_ids has no rows, expected at least 1",
        "knowledge/sample_ids",
    ),
    "labels missing": (
        make_payload(labels=None),
        "part 'knowledge' lacks labels, which feddkc needs",
        "labels",
    ),
    "everything missing": (
        encode({"knowledge": k.SampleKnowledge(sample_ids=np.arange(4))}),
        "part 'knowledge' lacks logits, labels, features/cut, which feddkc needs",
        "logits",
    ),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_tensor_not_fitting_contract_is_refused_before_any_data(name: str) -> None:
    payload, sentence, tensor = BAD_TENSORS[name]
    error = refusal(payload, chunks=[])
    assert said(error) == (Code.BAD_TENSOR, f"device d1: {sentence}")
    assert error.details["tensor"] == tensor


def test_each_feature_column_of_the_contract_must_be_there() -> None:
    two = [contract_pb2.NamedShape(name=name, shape=CUT_SHAPE) for name in ("cut", "deep")]
    error = refusal(make_payload(), contract=make_contract(features=two))
    assert said(error) == (Code.BAD_TENSOR, "device d1: part 'knowledge' lacks features/deep, which feddkc needs")


def test_sample_ids_are_always_needed() -> None:
    payload = make_payload()
    parts = knowledge_pb2.Parts()
    parts.CopyFrom(payload.parts)
    parts.parts[0].sample_knowledge.ClearField("sample_ids")
    header = knowledge_pb2.PayloadHeader(parts=parts, data_bytes=slots(parts)[-1].stop, sha256=b"s" * 32)
    error = refusal(payload, header=header, chunks=[])
    assert said(error) == (Code.BAD_TENSOR, "device d1: part 'knowledge' lacks sample_ids, which feddkc needs")


def test_predictions_without_values_are_refused() -> None:
    payload = encode({"x": k.WeightedPredictions(noise_seed=1, values=np.zeros((1, 3), FLOAT32))})
    payload.parts.parts[0].weighted_predictions.ClearField("values")
    header = knowledge_pb2.PayloadHeader(parts=payload.parts, sha256=b"s" * 32)
    error = refusal(payload, header=header, chunks=[], expects={"x": "weighted_predictions"})
    assert said(error) == (Code.BAD_TENSOR, "device d1: part 'x' lacks values")


def test_predictions_have_as_many_rows_as_the_contract_declares() -> None:
    declared = contract_pb2.PartShapes(part="x", tensors=[contract_pb2.NamedShape(name="values", shape=[2, 3])])
    payload = encode({"x": k.WeightedPredictions(noise_seed=1, values=np.zeros((1, 3), FLOAT32))})
    error = refusal(payload, contract=make_contract(uploads=[declared]), expects={"x": "weighted_predictions"})
    assert said(error) == (Code.BAD_TENSOR, "device d1: x/values has shape [1, 3], expected [2, 3]")


def test_knowledge_about_another_proxy_set_is_refused() -> None:
    payload = encode({"x": k.ProxyKnowledge(valid=True, proxy_digest=b"a" * 32)})
    error = refusal(payload, contract=make_contract(proxy_digest=b"b" * 32), expects={"x": "proxy_knowledge"})
    assert said(error) == (
        Code.CONTRACT_MISMATCH,
        "device d1: part 'x' has the digest of another proxy set; expected the contract's",
    )


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ({}, "the answer has parts none, expected knowledge (sample_knowledge)"),
        (
            {"metrics": make_metrics()},
            "the answer has parts metrics (metrics), expected knowledge (sample_knowledge), metrics (metrics)",
        ),
        (
            {"knowledge": make_knowledge(), "model": k.ModelParameters(parameters={})},
            "the answer has parts knowledge (sample_knowledge), model (model_parameters), "
            "expected knowledge (sample_knowledge)",
        ),
        (
            {"knowledge": k.RefinedKnowledge(valid=False)},
            "the answer has parts knowledge (refined_knowledge), expected knowledge (sample_knowledge)",
        ),
        (
            {"knowledge": make_knowledge(), "metrics": k.Plan(values={})},
            "the answer has parts knowledge (sample_knowledge), metrics (plan), "
            "expected knowledge (sample_knowledge), metrics (metrics)",
        ),
    ],
)
def test_parts_other_than_those_asked_for_are_refused(parts: dict[str, k.Kind], sentence: str) -> None:
    assert said(refusal(encode(parts))) == (Code.BAD_MESSAGE, f"device d1: {sentence}")


def test_two_parts_of_one_name_are_refused() -> None:
    payload = encode({"x": k.Plan(values={})})
    payload.parts.parts.add().CopyFrom(payload.parts.parts[0])
    error = refusal(payload, expects={"x": "plan"})
    assert said(error) == (Code.BAD_MESSAGE, "device d1: two parts have the same name")


def test_server_only_part_is_refused_even_if_named_in_ask() -> None:
    payload = encode({"x": k.RefinedKnowledge(valid=True, values=np.zeros((1, 3), FLOAT32))})
    error = refusal(payload, expects={"x": "refined_knowledge"})
    assert said(error) == (Code.BAD_TENSOR, "device d1: tensor 'x/values' is not part of the contract")


def test_every_model_tensor_has_type_from_contract() -> None:
    """A running mean in int64 would be the sum over the devices, as counters are, and not their mean."""
    right = k.ModelParameters(parameters={"w": f32([1])}, buffers={"running_mean": f32([1]), "counter": i64(3)})
    contract = make_contract()
    shapes = contract.uploads.add(part="x")
    for name, shape in k.Weights.of(right).tensors.items():
        shapes.tensors.add(name=name, shape=shape, element_type=ELEMENT_TYPES[shape.dtype])
    Ingest("d1", encode({"x": right}).header(), contract, {"x": "model_parameters"})
    for name, array, wanted in (
        ("running_mean", i64([1]), "float32"),
        ("counter", f32(3), "int64"),
        ("counter", np.uint8(3), "int64"),
    ):
        wrong = k.ModelParameters(parameters=right.parameters, buffers={**right.buffers, name: np.asarray(array)})
        with pytest.raises(RefusedError) as error:
            Ingest("d1", encode({"x": wrong}).header(), contract, {"x": "model_parameters"})
        text = f"device d1: x/buffers/{name} is {np.asarray(array).dtype.name}, expected {wanted}"
        assert said(error.value) == (Code.BAD_TENSOR, text)


@pytest.mark.parametrize("samples", [3, 4])
def test_a_device_has_no_more_rows_than_samples(samples: int) -> None:
    if samples == 4:
        take_in(make_payload(), samples=samples)
        return
    error = refusal(make_payload(), samples=samples)
    text = "device d1: knowledge/sample_ids has 4 rows, but the device declared 3 samples"
    assert said(error) == (Code.BAD_VALUE, text)
    assert error.details["check_in"] == "again"


def test_metrics_are_counted_and_each_is_there_once() -> None:
    def sent(*names: str) -> k.Metrics:
        return k.Metrics(metrics=[k.Metric(name=name, split="test", sum=1, count=1) for name in names])

    knowledge = make_knowledge()
    take_in(encode({"knowledge": knowledge, "metrics": sent(*(f"m{n}" for n in range(MAX_METRICS)))}))
    for wrong in (sent(*(f"m{n}" for n in range(MAX_METRICS + 1))), sent("a", "a")):
        error = refusal(encode({"knowledge": knowledge, "metrics": wrong}))
        text = f"device d1: part 'metrics' has {len(wrong.metrics)} metrics, must be at most 100 with distinct names"
        assert said(error) == (Code.BAD_VALUE, text)


def test_a_metric_names_a_class_once() -> None:
    twice = k.Metric(name="m", split="test", sum=1, count=1, by_class=[k.ClassCount(label=1, sum=1, count=1)] * 2)
    error = refusal(encode({"knowledge": make_knowledge(), "metrics": k.Metrics(metrics=[twice])}))
    assert said(error) == (Code.BAD_VALUE, "device d1: metric 'm' has a duplicate or unknown class")


def test_a_refusal_quotes_the_first_few_parts() -> None:
    parts = encode({f"{number}{'x' * 200}": k.Metrics(metrics=[]) for number in range(50)})
    text = str(refusal(parts))
    assert "and 45 more, expected knowledge (sample_knowledge)" in text
    assert len(text) < 600
    too_many = encode({str(number): k.Metrics(metrics=[]) for number in range(50)})
    for number in range(51):
        too_many.parts.parts.add(name=f"p{number}").metrics.SetInParent()
    assert said(refusal(too_many)) == (Code.BAD_MESSAGE, "device d1: the payload has 101 parts, must be at most 100")


def test_settings_of_an_answer_are_bounded() -> None:
    error = refusal(encode({"x": k.Plan(values={"a": "x" * 70_000})}), expects={"x": "plan"})
    assert error.code == Code.TOO_LARGE


def test_malformed_header_is_refused_with_protocol_sentence() -> None:
    payload = make_payload()
    payload.parts.parts[0].sample_knowledge.logits.encoding = 9  # type: ignore[assignment]
    error = refusal(payload)
    assert said(error) == (
        Code.BAD_MESSAGE,
        "device d1: tensor 'knowledge/logits' has encoding 9, must be raw or channel steps",
    )
