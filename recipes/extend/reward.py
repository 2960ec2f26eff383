"""A reward of your own: a completion names what its row asks for.

onetrunk ppo --config recipes/extend/ppo.yaml
"""

from onetrunk.types import as_text


def names_the_task(prompts, completions, completion_ids=None, action=None, thing=None, place=None, **columns):
    """Return the share of the row's action, thing and place that the completion has; None for rows without them.

    Every column of the dataset arrives as a keyword, with one entry per completion.
    """
    if action is None:
        return [None] * len(completions)
    rows = zip(completions, action, thing, place, strict=True)
    return [sum(word in as_text(completion).lower() for word in words) / len(words) for completion, *words in rows]
