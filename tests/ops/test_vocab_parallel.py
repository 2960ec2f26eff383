"""A vocabulary split over 2 or 4 processes gives the logprobs, entropies and gradients of a whole head."""

import pytest

from tests.ops import vocab_worker
from tests.ops.vocab_worker import TOKENS, WIDTH
from tests.places import found_by_ranks

pytestmark = pytest.mark.multi_process


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"vocab{request.param}")
    return found_by_ranks(vocab_worker.work, folder, request.param, request.param)


def test_logprobs_entropies_and_gradients_are_those_of_the_whole_head(ranks):
    # All of WAYS x three vocabularies x entropy gradient x tile sizes; only the order of the sums differs.
    for facts in ranks:
        assert facts["float64"] < 1e-12
        assert facts["float32"] < 1e-6
        # A product of 32 terms, rounded to bfloat16 in both.
        assert facts["bfloat16"] < 1e-5


def test_the_processes_agree_to_the_bit_and_training_gives_the_logprobs_of_scoring(ranks):
    for facts in ranks:
        assert facts["ranks agree"]
        assert facts["ratio is 1"]
        assert facts["no tokens"] == 0


def test_a_target_with_the_highest_logit_of_all_processes_is_known(ranks):
    assert all(facts["top1"] == [True, True] for facts in ranks)


def test_whatever_the_vocabulary_four_numbers_per_token_are_exchanged_and_one_vector_in_a_forward_that_trains(ranks):
    sums = [[TOKENS], [3, TOKENS]]
    for facts in ranks:
        assert facts["scoring"]["shapes"] == sums
        assert facts["update"]["shapes"] == [*sums, [1, TOKENS, WIDTH]]
        assert facts["with entropy"]["shapes"] == [*sums, [2, TOKENS, WIDTH]]
        assert facts["larger vocabulary"] == facts["update"]
        # The backward exchanges nothing.
        assert facts["update"]["in_backward"] == facts["with entropy"]["in_backward"] == 0
