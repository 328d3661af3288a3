"""State files: what goes in comes out, and nothing that is damaged is taken for state."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from fleetdistill.errors import StateError
from fleetdistill.state.state_check import damage_of
from fleetdistill.state.state_file import pack_state, unpack_state

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
STATES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
    max_leaves=8,
)


def assert_same(found: Any, expected: Any) -> None:
    """Equal in type and, for tensors, in every bit."""
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.equal(found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


@given(STATES)
def test_nested_state_comes_back_with_its_types(state: Any) -> None:
    assert_same(unpack_state(pack_state(state)), state)


def test_equal_states_have_equal_bytes_and_changes_are_noticed() -> None:
    state = {"a": torch.arange(3.0), "crc32c": '"crc32c": "00000000"', "b": [1, None]}
    packed = pack_state(state)
    assert all(pack_state(state) == packed for _ in range(20))
    for at in range(8 * len(packed)):
        changed = bytearray(packed)
        changed[at // 8] ^= 1 << at % 8
        try:
            result = unpack_state(bytes(changed))
        except StateError:
            continue
        assert_same(result, state)


def test_a_tensor_in_several_places_is_packed_once() -> None:
    shared, alike = torch.arange(4096.0), torch.arange(4096.0)
    state = {"a": shared, "b": [shared.detach()], "first": shared[:2], "turned": shared.reshape(64, 64).T}
    packed = pack_state(state)
    assert_same(unpack_state(packed), state)
    assert len(packed) < 2.2 * shared.nbytes  # itself, and what is read of it in another way
    assert len(pack_state({"a": shared, "b": alike, "c": alike})) < 1.1 * shared.nbytes
    assert len(pack_state({"a": shared, "b": alike.int()})) > 2 * shared.nbytes


def test_equal_tensors_come_back_as_tensors_of_their_own() -> None:
    """An optimizer changes its restored tensors in place, such as two that both begin with zeros."""
    zeros = torch.zeros(4096)
    result = unpack_state(pack_state({"a": zeros, "b": torch.zeros(4096), "minus": -zeros}))
    result["a"].add_(1)
    assert_same(result["b"], zeros)
    assert torch.signbit(result["minus"]).all()


@pytest.mark.parametrize("key", [0, "tensor", "items", ""])
def test_key_that_looks_like_words_of_the_file_is_only_a_key(key: str | int) -> None:
    state = {key: torch.ones(2), "more": {key: {key: [torch.zeros(1)]}}}
    assert_same(unpack_state(pack_state(state)), state)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([0.0, -0.0, math.nan, math.inf]),
        torch.tensor(3, dtype=torch.int64),
        torch.zeros(0, 4),
        torch.tensor([True, False]),
        torch.ones(2, dtype=torch.bfloat16),
        torch.arange(6.0).reshape(2, 3).T.contiguous(),
    ],
)
def test_tensors_come_back_to_the_bit(tensor: torch.Tensor) -> None:
    assert_same(unpack_state(pack_state([tensor])), [tensor])


def test_views_and_tied_tensors_are_packed_as_what_they_show() -> None:
    base = torch.arange(6.0).reshape(2, 3)
    result = unpack_state(pack_state({"view": base.T, "again": base, "tied": base}))
    torch.testing.assert_close(result["view"], base.T)
    torch.testing.assert_close(result["tied"], base)


def test_a_packed_state_does_not_change_with_the_model() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    packed = pack_state({"w": weight})
    with torch.no_grad():
        weight.zero_()
    result = unpack_state(packed)["w"]
    assert_same(result, torch.ones(2))
    assert not result.requires_grad


def _trained(steps: int) -> tuple[torch.nn.Module, torch.optim.SGD]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    _train(model, optimizer, steps)
    return model, optimizer


def _train(model: torch.nn.Module, optimizer: torch.optim.SGD, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((4, 3), float(step))).square().sum().backward()
        optimizer.step()


def test_training_goes_on_to_the_bit_from_a_packed_optimizer() -> None:
    expected, _ = _trained(5)
    model, optimizer = _trained(2)
    packed = pack_state({"model": model.state_dict(), "method": {"optimizer": optimizer.state_dict()}})
    torch.manual_seed(99)
    fresh = torch.nn.Linear(3, 2)
    again = torch.optim.SGD(fresh.parameters(), lr=0.5, momentum=0.9)
    state = unpack_state(packed)
    fresh.load_state_dict(state["model"])
    again.load_state_dict(state["method"]["optimizer"])
    for step in range(2, 5):
        again.zero_grad()
        fresh(torch.full((4, 3), float(step))).square().sum().backward()
        again.step()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor)


def test_a_tuple_comes_back_as_a_list() -> None:
    assert_same(unpack_state(pack_state((1, (2,)))), [1, [2]])


SUPPORTED = "expected tensors, dicts, lists, numbers, str or None"


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"seen": {1, 2}}, f"a state contains a set; {SUPPORTED}"),
        ([b"bytes"], f"a state contains a bytes; {SUPPORTED}"),
        (torch.nn.Linear(1, 1), f"a state contains a Linear; {SUPPORTED}"),
        ({(1, 2): 3}, "a key of a state is a tuple, must be str or int"),
        ({None: 3}, "a key of a state is a NoneType, must be str or int"),
    ],
)
def test_other_types_are_refused_before_anything_is_written(state: Any, message: str) -> None:
    with pytest.raises(StateError) as error:
        pack_state(state)
    assert str(error.value) == message


PACKED = pack_state({"w": torch.arange(100.0), "n": 3})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a state",
        PACKED[:7],
        PACKED[:60],
        PACKED[:-1],
        PACKED + b"more",
        b"\xff" * len(PACKED),
        save({"w": torch.ones(1)}),
        save({}, metadata={"outline": json.dumps({"tensor": "0"})}),
        save({}, metadata={"outline": "{"}),
    ],
)
def test_a_damaged_state_is_a_state_error(data: bytes) -> None:
    with pytest.raises(StateError, match=r"the saved state is damaged: ."):
        unpack_state(data)


@given(st.integers(0, len(PACKED) - 1))
def test_a_state_cut_short_anywhere_is_a_state_error(length: int) -> None:
    with pytest.raises(StateError):
        unpack_state(PACKED[:length])


def test_damage_of_a_state_without_pytorch_is_found_too() -> None:
    file = io.BytesIO()
    np.savez(file, rows=np.arange(100))
    whole = file.getvalue()
    assert damage_of(whole) == ""
    assert all(damage_of(whole[:length]) for length in range(len(whole)))
    assert damage_of(whole[:300] + bytes([whole[300] ^ 1]) + whole[301:]) == "it does not match its checksum"
