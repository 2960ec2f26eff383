"""top_p and top_k in PPO: the weights of truncated samples, the first ratio, alarms, and evaluations."""

import pytest
import torch

from onetrunk.rollouts.local import LocalBackend
from tests.ppo.support import logged, make_trainer, prompts
from tests.ppo.test_importance_correction import CLIPPED, ESS, recorded

GAP = "sampling/logprob_gap_mean"


def test_a_token_weighs_what_its_nucleus_has_of_the_vocabulary_and_the_first_ratio_is_1(tmp_path):
    trainer, experiences = recorded(tmp_path, None, top_k=3, num_rollouts=2, num_ppo_epochs=2, temperature=0.8)
    # Of the first rollout, when the policy is still the base.
    first = experiences[: len(experiences) // 2]
    base = make_trainer(tmp_path / "base").model
    for experience in first:
        pack, mask = experience.pack, experience.pack.completion_mask
        for row, length in enumerate(mask.sum(1).tolist()):
            real = pack.attention_mask[row].bool()
            ids = pack.input_ids[row][real]
            with torch.no_grad():
                logits = base(input_ids=ids[None]).logits[0, len(ids) - length - 1 : -1]
            share = (logits / 0.8).softmax(-1).topk(3).values.sum(-1)
            assert share.max() < 0.9
            torch.testing.assert_close(experience.weights[row, :length], share, atol=1e-4, rtol=0)
    # No weight is above 1, so none is clipped.
    assert logged(trainer, CLIPPED) == [0, 0]
    assert all(0.5 < share < 1 for share in logged(trainer, ESS))
    # The mean of -log S.
    gap = -torch.cat([e.weights[e.pack.completion_mask].log() for e in first]).mean().item()
    assert logged(trainer, GAP)[0] == pytest.approx(gap, abs=1e-4)
    assert logged(trainer, "policy/ratio_max")[0] == 1.0


class Recording(LocalBackend):
    """Keeps the truncation of every call."""

    def generate(self, prompt_ids, params, keys, **keywords):
        self.__dict__.setdefault("calls", []).append((params.top_p, params.top_k))
        return super().generate(prompt_ids, params, keys, **keywords)


def test_evaluations_are_truncated_as_training_is(tmp_path):
    backend = Recording()
    trainer = make_trainer(tmp_path, rollout_backend=backend, eval_dataset=prompts(3), top_p=0.7, top_k=4)
    trainer.evaluate()
    assert backend.calls == [(0.7, 4)]
