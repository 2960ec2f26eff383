"""A sampler of your own: `generate` of transformers, one prompt at a time. A completion depends on its key alone."""

import torch

from onetrunk.types import Rollout
from onetrunk.utils.randomness import derived_seed


class TransformersBackend:
    def sync(self, model, version):
        self.model, self.version = model, version  # A server would receive the adapter of `model` here.

    def generate(self, prompt_ids, params, keys):
        ids, logprobs = zip(*(self._sample(*row, params) for row in zip(prompt_ids, keys, strict=True)), strict=True)
        stopped = [row[-1] in params.stop_token_ids for row in ids]
        return Rollout(prompt_ids, list(ids), list(logprobs), stopped, self.version)

    def _sample(self, ids, key, params):
        draws = {"do_sample": True, "temperature": params.temperature} if params.temperature else {"do_sample": False}
        draws |= {"max_new_tokens": params.max_completion_length, "eos_token_id": list(params.stop_token_ids)}
        draws |= {"pad_token_id": params.pad_token_id}
        draws |= {"top_k": params.top_k, "top_p": params.top_p, "output_scores": True}
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(derived_seed(*key))
            prompt = torch.tensor([ids], device=self.model.device)
            output = self.model.generate(input_ids=prompt, return_dict_in_generate=True, **draws)
        completion = output.sequences[0, len(ids) :].cpu()
        logprobs = torch.cat(output.scores).float().log_softmax(-1).cpu().gather(1, completion[:, None])[:, 0]
        return completion.tolist(), logprobs
