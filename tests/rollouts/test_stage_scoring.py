"""Packs that run in the stages of a pipeline while it samples have the outputs that they have afterwards."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

from onetrunk.models.staged import StagedTrunk
from onetrunk.models.training_stage import StagePlace
from onetrunk.ops.packing import PackLimits, make_pack
from onetrunk.rollouts.stage_scoring import StageScoring
from tests.models.branches import a_trunk
from tests.places import CPU, GPU, found_by_ranks, on_gpus
from tests.rollouts import stage_scoring_worker
from tests.rollouts.small import PROMPTS
from tests.rollouts.stage_scoring_worker import CASES, PAD_ID, ROLES, ROWS, TEMPERATURE, equal


@cache
def launched(stages, place):
    folder = Path(mkdtemp())
    return found_by_ranks(stage_scoring_worker.work, folder, stages, stages, list(NAMES[stages]), place)


# Four stages of one layer each run some of the cases.
NAMES = {2: tuple(CASES), 4: ("llama", "cut, value adapter")}
RUNS = [
    run
    for stages, names in NAMES.items()
    for case in names
    for run in ((stages, CPU, case), on_gpus(stages, GPU, case, processes=stages))
]


@pytest.mark.slow
@pytest.mark.multi_process
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("stages", "place", "case"), RUNS)
def test_packs_scored_while_rows_decode_have_the_outputs_of_those_scored_after(stages, place, case):
    ranks = [rank[case] for rank in launched(stages, place)]
    for rank, found in enumerate(ranks):
        assert found["same_rows"] and found["repeats"]
        assert found["known"], "other bits"
        # Rows that were sampled ahead complete minibatches too.
        assert found["late"]
        # Only the last stage has outputs; all know which packs have run.
        assert found["has_outputs"] == [rank == stages - 1] * len(found["early"])
        assert found["early"] == ranks[0]["early"]
        assert 0 < found["share"] <= 1 and found["share"] == sum(map(len, found["early"])) / ROWS


def a_stage(trunk, layers):
    """Return a stage of two that no other process follows."""
    return StagedTrunk(trunk, StagePlace(layers, int(layers.start > 0), 2, group=None))


def scoring_of(stage, minibatches, **limits):
    return StageScoring(stage, PROMPTS, minibatches, PackLimits(2, **limits), PAD_ID, ROLES, TEMPERATURE)


COMPLETIONS = [[3, 5], [7], [11, 13, 17, 19], [23, 29, 31], [37, 41]]


@torch.no_grad()
@pytest.mark.parametrize("build", [a_trunk, CASES["cut, value adapter"][0], CASES["padding-free"][0]])
def test_two_stages_one_after_the_other_give_what_the_whole_trunk_gives(build):
    trunk = build().eval()
    first, second = (scoring_of(a_stage(trunk, layers), [[0, 2, 4], [1, 3]]) for layers in (range(2), range(2, 4)))
    first.add(dict(enumerate(COMPLETIONS)))
    while (begun := first.begin()) is not None:
        description, states = begun
        sent = list(states.flatten().split(7))

        def receive(count, sent=sent):
            numbers = torch.cat(sent)
            assert len(numbers) == count
            return numbers

        assert second.follow(description, receive) is None
    # Rows 1 and 3 are finished before row 4. In a pack: lengths 22 and 13; 8, 5 and 5.
    assert list(second.outputs) == list(first.outputs) == [(1, 3), (4, 0), (2,)]
    for rows, output in second.outputs.items():
        pack = make_pack([PROMPTS[row] for row in rows], [COMPLETIONS[row] for row in rows], PAD_ID)
        whole = trunk(pack=pack, roles=ROLES, temperature=TEMPERATURE)
        assert equal([output], [whole._replace(states=None)])
    assert first.scored_share == 1.0


def test_a_minibatch_is_scored_once_all_of_its_rows_are_finished():
    scoring = scoring_of(a_stage(a_trunk().eval(), range(2)), [[0, 1], [2, 3, 4]])
    assert scoring.begin() is None
    scoring.add({3: COMPLETIONS[3], 0: COMPLETIONS[0], 4: COMPLETIONS[4]})
    assert scoring.begin() is None and scoring.scored_share == 0
    scoring.add({2: COMPLETIONS[2]})
    with torch.no_grad():
        assert scoring.begin() is not None and scoring.begin() is not None and scoring.begin() is None
    lengths = {row: len(PROMPTS[row]) + len(COMPLETIONS[row]) for row in (2, 3, 4)}
    longest = sorted(lengths, key=lengths.get, reverse=True)
    assert list(scoring.outputs) == [tuple(longest[:2]), tuple(longest[2:])]
    assert scoring.scored_share == 3 / 5
