"""Two different things never feed the hash the same bytes, and the order in which fields are named does not matter."""

import array
import itertools
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from looseleaf.identity import digest

LOOKALIKES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 10, 2**64, -(2**64), 0.0, -0.0, 1.0, 10.0, float("inf"), float("nan"),
    "", "0", "1", "1.0", "True", "None", "n", "b1", "i", "a", "ab", "a\0b", "ä", "a\u0308",
    b"", b"0", b"1", b"a", b"ab", b"a\0b",
    [], [[]], [[], []], [None], [0], [1], ["1"], [1, 2], [2, 1], [12], ["12"], ["1", "2"], [1, [2]], [[1], 2],
    [[1, 2]], [[1], [2]], ["a", "b"], ["ab"], ["ab", ""], ["", "ab"], ["a", "", "b"], [b"a", b"b"], [True], [1.0],
    {}, {"": ""}, {"a": "b"}, {"a": None}, {"b": "a"}, {"ab": ""}, {"": "ab"}, {"a": ["b"]}, {"a": {"b": None}},
    {"a": 1}, {"a": "1"}, {"a": 1, "b": 2}, {"a": 2, "b": 1}, [["a", 1], ["b", 2]], ["a", 1, "b", 2],
)  # fmt: skip


def test_no_two_of_many_lookalikes_share_an_identity() -> None:
    seen: dict[str, Any] = {}
    for value in LOOKALIKES:
        mine = digest("kind", field=value)
        assert mine not in seen, f"{value!r} and {seen[mine]!r} have one identity"
        seen[mine] = value


@pytest.mark.parametrize("value", LOOKALIKES, ids=repr)
def test_the_same_value_always_has_the_same_identity(value: Any) -> None:
    assert digest("kind", field=value) == digest("kind", field=value)


def test_an_identity_is_a_whole_sha256_in_hex() -> None:
    assert len(digest("kind")) == 64
    assert int(digest("kind"), 16) >= 0


def test_identities_do_not_change_from_one_release_to_the_next() -> None:
    """What lies on a disk is found by these: a change here must be meant."""
    got = digest("image", size=(2, 1), rgb=b"\0\1\2\3\4\5", note=None, share=0.5, exact=True, more={"b": [1], "a": "é"})
    assert got == "874b6b230311461dd3e8c14285cad3777cf36f37cb93eef666d8abc70edcf8d2"


def test_the_order_in_which_fields_are_named_is_irrelevant() -> None:
    fields = {"one": 1, "two": [2], "three": {"x": 1, "y": 2}, "four": None}
    identities = {digest("kind", **dict(order)) for order in itertools.permutations(fields.items())}
    assert len(identities) == 1
    assert digest("kind", field={"a": 1, "b": 2}) == digest("kind", field={"b": 2, "a": 1})


def test_labels_and_kind_are_part_of_it_and_do_not_run_into_each_other() -> None:
    different = [
        digest("kind"), digest("Kind"), digest("kin", d=1), digest("kind", d=1), digest("kindd", d=1),
        digest("kind", dd=1), digest("kind", d=None), digest("kind", d={}), digest("", kindd=1),
        digest("kind", a="b", c="d"), digest("kind", a="bc", d=""), digest("kind", ab="", c="d"),
        digest("kind", fields={"a": "b", "c": "d"}),
    ]  # fmt: skip
    assert len(set(different)) == len(different)


def test_lists_and_tuples_are_one_kind_of_sequence() -> None:
    assert digest("kind", field=(1, (2,))) == digest("kind", field=[1, [2]])
    assert digest("kind", field=bytearray(b"ab")) == digest("kind", field=b"ab")


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, np.int64(1), np.zeros(2), torch.zeros(2), 1j, iter([1])],
    ids=lambda value: type(value).__name__,
)
def test_anything_but_plain_values_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="plain values"):
        digest("kind", field=value)
    with pytest.raises(TypeError, match="plain values"):
        digest("kind", field=[{"deep": value}])


def test_a_view_of_wide_elements_is_known_by_its_bytes() -> None:
    wide = array.array("I", [1, 2])
    assert digest("kind", field=memoryview(wide)) == digest("kind", field=wide.tobytes())


SMALL = st.one_of(
    st.none(), st.booleans(), st.integers(-1, 12), st.sampled_from([0.0, 1.0, -0.0, 12.0]),
    st.text("a1", max_size=3), st.binary(max_size=2),
)  # fmt: skip
VALUES = st.recursive(
    SMALL,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text("a1", max_size=2), inner, max_size=2),
    ),
    max_leaves=6,
)


def spelled(value: Any) -> Any:
    """The value with its types spelled out, so that Python's own == does not confuse 1 with True."""
    if isinstance(value, Mapping):
        return "m", tuple(sorted((label, spelled(one)) for label, one in value.items()))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return "l", tuple(spelled(one) for one in value)
    if isinstance(value, float):
        return "f", struct.pack("<d", value).hex()
    return type(value).__name__, repr(value)


@settings(max_examples=300, deadline=None)
@given(VALUES, VALUES)
def test_identities_are_equal_exactly_when_the_values_are(one: Any, other: Any) -> None:
    assert (digest("kind", field=one) == digest("kind", field=other)) == (spelled(one) == spelled(other))


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3),
    st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3),
)
def test_sets_of_fields_are_told_apart_too(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert (digest("kind", **one) == digest("kind", **other)) == (spelled(one) == spelled(other))
