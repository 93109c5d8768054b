"""Canonical bytes: joining canonical members gives what canonicalising the whole gives."""

from __future__ import annotations

import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from libxd import canon

NUMBERS = st.integers(-(2**53) + 1, 2**53 - 1) | st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.none() | st.booleans() | NUMBERS | st.text()
VALUES = st.recursive(SCALARS, lambda part: st.lists(part, max_size=4) | st.dictionaries(st.text(), part, max_size=4))


@given(st.dictionaries(st.text(), VALUES, max_size=8))
def test_join_is_byte_identical_to_canonicalising_the_whole(value):
    assert canon.join({name: canon.dumps(item) for name, item in value.items()}) == rfc8785.dumps(value)


def test_names_are_sorted_by_utf16_code_units():
    """U+FB33 sorts after U+1F600 there, and before it by code points: a join by str order would differ."""
    value = {"\ufb33": 1, "\U0001f600": 2, "a": 3}
    assert canon.join({name: canon.dumps(item) for name, item in value.items()}) == canon.dumps(value)
    assert sorted(value) == ["a", "\ufb33", "\U0001f600"]
    assert canon.dumps(value).decode() == '{"a":3,"\U0001f600":2,"\ufb33":1}'
