'''Rewards: one number per completion, from your own functions, functions written for TRL, a model or a judge.

A reward function is a plain function (or an async one, or an object with `__call__`) that takes keywords and returns
one number per completion, or None where it does not apply:

    def ends_politely(completions, min_words, **kwargs):
        """1 for a thank-you, 0 without; rows whose `min_words` is 0 are not judged."""
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        return [float("thank you" in text) if words else None for text, words in zip(texts, min_words)]

It receives `prompts`, `completions` (texts, or lists with one assistant message for conversations), `completion_ids`,
`completion_stopped` (False for a completion that was cut off at max_completion_length), `turn_ids` (the number of the
turn of each token, -1 at observations), `tools` in episodes that have some (their schemas), every other column of the
dataset (here `min_words`), `trainer_state`, `log_extra` and `log_metric`; `**kwargs` takes the ones it does not use.
All functions get the same lists, so it must not change them.

Several rewards are summed with weights:

    rewards = RewardSet([ends_politely, ModelReward("path/to/reward-model")], weights=[0.5, 1.0])
    scores = rewards.score(prompts, completions, completion_ids, {"min_words": [3, 0]})

In place of a number a function may return `PerTurn([...])` or `PerToken([...])`: rewards that arrive inside the
completion. Their sum is the score that penalties, normalisation and metrics see.

A row to which no function applies, or to which one gives NaN or infinity, has the total NaN and is left out of the
update. An error in a function stops the run and names the function.

A resumed run compares what its rewards are computed from (`content_of`): the name and source file of a function, the
columns that it reads, the weights of a model, the address of a server. A change is an error unless
`allow_config_change` is set. README.md lists what YAML can name.
'''

from onetrunk.utils.startup import imported_when_used

_HOMES = {
    "Completion": "reward",
    "JudgeReward": "judge",
    "ModelReward": "model",
    "PerToken": "reward",
    "PerTurn": "reward",
    "ProcessReward": "process_model",
    "RemoteReward": "remote",
    "RewardFunction": "reward",
    "RewardSet": "combine",
    "Scores": "reward",
    "resolve_reward": "combine",
}
__all__ = [*_HOMES]
__getattr__ = imported_when_used(__name__, _HOMES)
