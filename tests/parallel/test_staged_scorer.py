"""A reward adapter in pipeline stages gives what one process gives: scores, loss, gradients."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

from onetrunk.parallel.staged import LayerForward, lowest_trained_layer, training_obstacle, verify_stages
from onetrunk.parallel.stages import LayerSplit
from onetrunk.reward_models.training import MODEL_INPUTS
from tests.parallel import staged_scorer_worker
from tests.parallel.staged_scorer_worker import a_batch, a_scorer
from tests.places import found_by_ranks

CASES = tuple(staged_scorer_worker.cases())
# By processes and stages: four stages of one layer, and two pipelines of two stages.
RUNS = {(2, 2): CASES, (4, 4): ("top-2",), (4, 2): ("llama",)}


def rows_of(batch):
    return {name: batch[name] for name in MODEL_INPUTS}


@torch.no_grad()
@pytest.mark.parametrize("sizes", [(2, 2), (1, 2, 1)])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_the_stages_one_after_the_other_score_ragged_rows_as_the_whole_model(family, sizes):
    model, split = a_scorer(family).eval(), LayerSplit(sizes)
    expected = model(**rows_of(a_batch())).logits
    states = None
    for stage in range(split.num_stages):
        states = LayerForward(model, split.layers(stage))(states, **rows_of(a_batch()))
    assert torch.equal(states.logits, expected) and expected.std() > 0.1
    # Nothing of the stages stays on the model.
    assert torch.equal(model(**rows_of(a_batch())).logits, expected)


def test_a_model_whose_layers_depend_on_each_other_is_rejected():
    model = a_scorer()
    body, seen = model.get_base_model().model, []
    # The last layer reads the embedding, which its stage does not have.
    body.embed_tokens.register_forward_hook(lambda *call: seen.append(call[-1].sum()))
    body.layers[3].register_forward_hook(lambda _module, _args, output: output + seen[-1])
    with pytest.raises(ValueError, match="not supported for LlamaForSequenceClassification: a layer returns or reads"):
        verify_stages(model, LayerSplit((2, 2)))


def test_what_cannot_be_trained_in_stages_is_refused_with_the_fix():
    model = a_scorer()
    assert training_obstacle(model) is None and lowest_trained_layer(model) == 0
    model = a_scorer(layers_to_transform=[2, 3])
    assert lowest_trained_layer(model) == 2
    assert "with dropout (" in training_obstacle(a_scorer(lora_dropout=0.1))
    with pytest.raises(ValueError, match="4 layers cannot be divided into 5 stages; launch fewer processes"):
        LayerSplit.even(model, 5)
    assert LayerSplit.even(model, 3).sizes == (2, 1, 1) and LayerSplit.even(model, 2, [1, 3]).sizes == (1, 3)


@cache
def launched(processes, stages):
    folder = Path(mkdtemp())
    cases = list(RUNS[processes, stages])
    return found_by_ranks(staged_scorer_worker.work, folder, processes, processes, stages, cases)


launches = [pytest.mark.multi_process, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("processes", "stages", "case"),
    [pytest.param(*key, case, marks=launches) for key, names in RUNS.items() for case in names],
)
def test_the_stages_have_the_scores_and_gradients_of_one_process(processes, stages, case):
    ranks = [rank[case] for rank in launched(processes, stages)]
    for rank, found in enumerate(ranks):
        assert all(found[name] <= 1e-6 for name in ("scores", "trained scores", "gradients")), found
        # Cut into microbatches, the sums of a batch have another order.
        assert found["gradients of the batch"] <= 1e-5
        assert found["identity"]
        parts = 1 if case == "one microbatch" else 5
        # Every stage computes the loss once per microbatch in each of two steps.
        mine = len(range(rank // stages, parts, processes // stages))
        assert len(found["losses"]) == 2 * mine
        assert found["schedules"] == 2 * ["ScheduleGPipe" if mine < stages else "Schedule1F1B"]
    lasts = [found["losses"] for found in ranks[stages - 1 :: stages]]
    assert sum(sum(losses) / 2 for losses in lasts) == pytest.approx(ranks[0]["loss"], rel=1e-6)
