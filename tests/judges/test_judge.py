"""What a ledger keys on: equal questions have equal digests, and nothing else has."""

import pytest

from onetrunk.judges.judge import Principle
from onetrunk.utils.files import digest


def test_a_digest_does_not_depend_on_the_order_of_keys():
    assert digest({"a": 1, "b": [2, "\u00e9"]}) == digest({"b": [2, "\u00e9"], "a": 1})
    assert digest({"a": 1}) != digest({"a": "1"})


def test_what_is_no_json_value_has_no_digest():
    with pytest.raises(ValueError):
        digest({"a": float("nan")})


def test_the_weight_of_a_principle_buys_nothing_anew():
    assert Principle("Be kind.", weight=2.0).key == Principle("Be kind.").key
    assert Principle("Be kind.", tags=("kind",)).key != Principle("Be kind.").key
