"""How deep a JSON text nests, whatever its strings hold, and what a bounded client leaves of a response."""

import json

import pytest

from onetrunk.judges.calls import run_async
from onetrunk.judges.http import MAX_DEPTH, guarded_client, nesting
from tests.judges.stub_server import StubServer


@pytest.mark.parametrize(
    ("value", "depth"),
    [
        (1, 0),
        ([], 1),
        ({"a": [[], {}]}, 3),
        ([[]] * 5, 2),
        (["[[[[", "\\", '"[', '\\"[{', "\\\\"], 1),
        ({"[{": "]}"}, 1),
    ],
)
def test_the_depth_is_that_of_lists_and_objects_outside_strings(value, depth):
    assert nesting(json.dumps(value).encode()) == depth


def test_a_text_that_is_cut_is_as_deep_as_it_got():
    assert nesting(b'[[[{"a[[[') == 4 and nesting(b"]]]]") == 0 and nesting(b"") == 0


def test_a_response_within_bounds_is_as_it_was():
    deep = {"scores": [1.0], "more": json.loads("[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1))}
    with StubServer(routes={"/rate": lambda body: (418, deep)}) as stub:

        async def post():
            async with guarded_client(stub.root, None, 1) as client:
                return await client.post(f"{stub.root}/rate", json={})

        response = run_async(post())
    assert (response.status_code, response.json()) == (418, deep)
    assert response.headers["content-type"] == "application/json" and "date" in response.headers
    assert response.request.method == "POST" and not response.is_success
