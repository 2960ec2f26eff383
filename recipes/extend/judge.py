"""A judge of your own: better is the completion that takes up more words of its prompt. As a reward: `on_topic`."""

import re

from onetrunk.judges.constitution import Constitution
from onetrunk.judges.judge import Judge, Pair, Principle, Rating, Verdict, logistic
from onetrunk.rewards.judge import JudgeReward
from onetrunk.types import as_text


class OnTopicJudge(Judge):
    name, identity = "on-topic", {"kind": "on-topic", "version": 1}  # Another version asks for new answers.

    def _answer(self, items, principle, keep):
        for i, item in enumerate(items):
            if isinstance(item, Pair):
                lead = share(item.prompt, item.first) - share(item.prompt, item.second)
                keep(i, Verdict(logistic(5 * lead)))  # The probability that the completion shown first is better.
            else:
                keep(i, Rating(share(item.prompt, item.text)))


def share(prompt, completion):
    asked, said = (set(re.findall(r"\w{4,}", as_text(text).lower())) for text in (prompt, completion))
    return len(asked & said) / max(len(asked), 1)


on_topic = JudgeReward(OnTopicJudge(), Constitution("on-topic", (Principle("Which keeps to the prompt?"),)))
