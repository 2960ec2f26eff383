"""Advantages of your own: a score counts relative to the mean of the prompt's other completions (RLOO).

Set num_generations to 2 or more, and whiten_advantages to False. Works on any number of processes.
"""

import torch

from onetrunk import ExperienceStream, PPOTrainer


class LeaveOneOut(ExperienceStream):
    def shape_scores(self, scored):
        scores = super().shape_scores(scored)
        prompts = torch.tensor([completion // self.config.num_generations for *_, completion in scored.batch.keys])
        rows = torch.stack([scores.nan_to_num(), scores.isfinite().float(), prompts.float()], 1)
        everyone = self.data_parallel.gather(rows.to(self.accelerator.device)).cpu()
        of_prompt = (prompts[:, None] == everyone[None, :, 2]).float()
        total, count = (of_prompt @ everyone[:, :2]).T
        return scores - (total - scores.nan_to_num()) / (count - 1).clamp(min=1)

    def advantages(self, pack, output, rewards, stopped):
        returns = rewards.flip(1).cumsum(1).flip(1) * pack.completion_mask
        return returns, returns


class LeaveOneOutTrainer(PPOTrainer):
    stream_class = LeaveOneOut
