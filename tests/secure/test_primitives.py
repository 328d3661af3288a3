"""Primitives of secure sums against published vectors, and numbers on the wire."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from secure.demo_session import SID
from support.uninstalled import without

from fleetdistill.errors import WireError
from fleetdistill.secure.primitives import (
    agree,
    from_bytes,
    hkdf,
    lift,
    mask,
    public_key,
    seal,
    sign,
    stream,
    tag,
    to_bytes,
    unseal,
    verification_key,
    verify_signature,
    wrap,
)

PAIR_KEY = bytes.fromhex("77394a76fd6c4a48e2d224b5bfdf067a6660afbd8ad42008174683320891939b")
widths = st.integers(4, 8)


def test_sa01_x25519_of_rfc_7748():
    secret = bytes.fromhex("a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4")
    public = bytes.fromhex("e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c")
    assert agree(secret, public).hex() == "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552"


def test_sa01_hkdf_of_rfc_5869():
    found = hkdf(b"\x0b" * 22, bytes(range(13)), bytes(range(0xF0, 0xFA)), 42).hex()
    assert found == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"


def test_sa01_chacha20_of_rfc_8439():
    found = stream(bytes(32), 32).hex()
    assert found == "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"


@pytest.mark.parametrize(
    ("width", "numbers"),
    [
        (4, [2910822643, 4177047790, 3294808890]),
        (6, [194539159527667, 215928595478776, 77842470407078]),
        (8, [17940283654789898483, 2075046339198241594, 6761919949497255628]),
    ],
)
def test_sa04_first_numbers_of_a_pair_key(width, numbers):
    assert mask(PAIR_KEY, 3, width).tolist() == numbers


def test_sa08_a_negative_number_in_six_bytes():
    numbers = wrap(np.array([-5]), 6)
    assert numbers.tolist() == [281474976710651]
    assert lift(numbers, 6).tolist() == [-5]


def test_sa15_top_bits_of_masks_are_uniform():
    """Chi-square with 15 degrees of freedom; the 99.9 % point is 37.7. The keys are fixed."""
    keys = [hkdf(bytes([i]), SID, tag("self mask")) for i in range(8)]
    tops = np.concatenate([mask(key, 4000, 6) >> np.uint64(44) for key in keys]).astype(int)
    counts = np.bincount(tops, minlength=16)
    assert round(float((np.square(counts - 2000) / 2000).sum()), 3) == 12.821


@given(data=st.data(), width=widths)
def test_numbers_come_back_from_their_bytes(data, width):
    limit = 2 ** (8 * width - 1)
    values = data.draw(st.lists(st.integers(-limit, limit - 1), max_size=9))
    numbers = wrap(np.array(values, dtype=np.int64), width)
    sent = to_bytes(numbers, width)
    assert sent == b"".join((value % (2 * limit)).to_bytes(width, "little") for value in values)
    assert from_bytes(sent, width).tolist() == numbers.tolist()
    assert lift(numbers, width).tolist() == values


def test_bytes_of_half_a_number_are_refused():
    with pytest.raises(WireError, match="multiple of 6 bytes, got 7"):
        from_bytes(bytes(7), 6)


@pytest.mark.parametrize("public", [bytes(32), b"\x01" + bytes(31), bytes(31)])
def test_a_public_key_that_leaves_no_secret_is_refused(public):
    with pytest.raises(WireError, match="not one of X25519"):
        agree(b"\x05" * 32, public)


def test_both_sides_agree():
    ours, theirs = b"\x05" * 32, b"\x06" * 32
    assert agree(ours, public_key(theirs)) == agree(theirs, public_key(ours))


@given(flipped=st.integers(0, 37), bit=st.integers(0, 7))
def test_a_box_with_a_flipped_bit_does_not_open(flipped, bit):
    box = bytearray(seal(b"k" * 32, b"twenty-two bytes long.", b"between"))
    assert unseal(b"k" * 32, bytes(box), b"between") == b"twenty-two bytes long."
    box[flipped] ^= 1 << bit
    with pytest.raises(WireError, match="does not open"):
        unseal(b"k" * 32, bytes(box), b"between")


@pytest.mark.parametrize("box", [b"", b"short"])
def test_what_is_no_box_does_not_open(box):
    with pytest.raises(WireError, match="does not open"):
        unseal(b"k" * 32, box, b"")


@given(public=st.binary(max_size=40), signature=st.binary(max_size=70))
def test_garbage_is_no_signature(public, signature):
    assert not verify_signature(public, b"message", signature)


def test_a_signature_is_for_one_message():
    identity = bytes(range(32))
    signature = sign(identity, b"message")
    assert verify_signature(verification_key(identity), b"message", signature)
    assert not verify_signature(verification_key(identity), b"Message", signature)


def test_without_cryptography_the_extra_is_named(tmp_path):
    code = (
        "import sys, fleetdistill\nfrom fleetdistill.errors import ConfigurationError\n"
        "try:\n    import fleetdistill.secure.session\nexcept ConfigurationError as error:\n    print(error)\n"
    )
    environment = without(tmp_path, "cryptography")
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert said.stdout == "secure sums need the package cryptography: pip install 'fleetdistill[tls]'\n", said.stderr
