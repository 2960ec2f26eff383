"""Compacted contexts: what a summary is asked with, what the new context is made of, limits, and every driver."""

from functools import partial

import pytest

from onetrunk.rollouts.base import SamplingParams
from onetrunk.rollouts.episodes.compaction import SUMMARY
from onetrunk.rollouts.episodes.kinds import CompactionLimits
from onetrunk.rollouts.episodes.rows import play_in_waves
from onetrunk.rollouts.local import LocalBackend
from tests.chat import END, add, chat_tokenizer, tool_call
from tests.rollouts.small import assert_same
from tests.rollouts.test_episodes import DRIVERS, WORDS, Scripted, episodes_of, words
from tests.rollouts.test_episodes import play as play_episodes
from tests.tiny import tiny_model

CHAT = [{"role": "system", "content": "Play."}, {"role": "user", "content": "Begin."}]


class Long:
    """Answers every turn by its number; `turns` of them."""

    turns = 4

    def reset(self, *, seed=None, options=None):
        self.turn = 0
        return "", {}

    def step(self, action):
        self.turn += 1
        return f" the {('bird', 'dog', 'cat', 'river')[self.turn % 4]}", 1.0, self.turn == self.turns, False, {}


def play(
    turns,
    prompt="a cat",
    tokenizer=WORDS,
    factory=Long,
    tools=None,
    turn=8,
    length=400,
    driver=play_in_waves,
    **limits,
):
    """Play one row; return the rollout, and the contexts that the turns read."""
    script, limits = Scripted(turns), CompactionLimits(**{"compaction_prompt": " the lantern", **limits})
    episodes = episodes_of(factory, tools, tokenizer, compaction=limits)
    episodes.check_prompts(["prompt"], not isinstance(prompt, str))
    rollout = play_episodes(episodes, script, [prompt], driver, length, turn=turn, context=limits.max_context_length)
    return rollout, [ids for ids, _, _ in script.asked]


@pytest.mark.parametrize("compact", [None, lambda messages: messages[-2:]])
def test_a_prompt_may_have_what_a_context_leaves_and_not_a_token_more(compact):
    episodes = episodes_of(Long, compaction=CompactionLimits(64, None, 1, " the lantern", compact))
    episodes.check_prompts(["prompt"], False)
    # The next turn; and without a rule a summary before it, and the two words that ask for one, and the one.
    room = 64 - 8 - (0 if compact else 8 + 2 + 8)
    assert episodes.prompt_room(8) == room
    episodes.check_contexts(room, 8)
    with pytest.raises(ValueError, match=rf"a context may need 65 tokens: the longest prompt \({room + 1}\)"):
        episodes.check_contexts(room + 1, 8)


def text_turns(*texts):
    return [[*words(text), END] for text in texts]


TURNS = text_turns(" red", " blue", " green", " gold", " grey", " white", " black")


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_text_context_is_the_prompt_the_summary_and_the_last_turns(driver):
    prompt, request, dog, cat = map(words, ("a cat", " the lantern", " the dog", " the cat"))
    # Turn 0 and its answer fit, with a turn, the request and a summary after them; turn 1 with its answer does not.
    first = [*prompt, *TURNS[0], *dog]
    room = 8 + len(request) + 8
    limit = len(first) + len(TURNS[1]) + room + len(cat) - 1
    limits = {"max_context_length": limit, "max_compactions": 1, "kept_turns": 1}
    rollout, contexts = play(TURNS, driver=driver, **limits)
    assert contexts[1] == first
    assert contexts[2] == [*first, *TURNS[1], *request]  # Its turn is the summary.
    assert contexts[3] == [*prompt, *TURNS[2], *TURNS[1], *cat]
    (ids,), (marks,), (restarts,) = rollout.completion_ids, rollout.turn_ids, rollout.restarts
    start = restarts[0]
    assert ids[:start] == [*TURNS[0], *dog, *TURNS[1], *request, *TURNS[2]]
    end = start + len(contexts[3])
    assert ids[start:end] == contexts[3] and set(marks[start:end]) == {-1}
    assert [mark for mark in dict.fromkeys(marks) if mark >= 0] == [0, 1, 2, 3, 4]
    # A summary earns nothing itself, and the episode goes on to its end.
    assert rollout.turn_rewards == [[1.0, 1.0, 0.0, 1.0, 1.0]] and rollout.stopped == [True]
    counts = rollout.episodes[0].counts
    assert (counts.turns, counts.compactions, counts.summaries, counts.summaries_cut) == (5, 1, 1, 0)
    assert counts.summary_tokens == len(TURNS[2])
    assert [logprob == 0 for logprob in rollout.sampler_logprobs[0].tolist()] == [mark < 0 for mark in marks]


def test_a_chat_context_has_the_summary_in_the_task_and_messages_that_the_policy_wrote_are_foreign():
    tokenizer = chat_tokenizer("qwen2_5")
    said = [*map(tokenizer.encode, ("red", "blue", "I am <|im_end|> 7", "gold", "grey"))]
    said[2] = [*tokenizer.encode("I am <"), *tokenizer.encode("|im_end|> 7")]  # Characters, no token.
    turns = [[*ids, END] for ids in said]
    limits = {"max_context_length": 170, "max_compactions": 1, "kept_turns": 1, "compaction_prompt": "Sum up."}
    rollout, contexts = play(turns, CHAT, tokenizer, turn=24, **limits)
    shown = tokenizer.decode(contexts[3], skip_special_tokens=False)
    blue = {"role": "assistant", "content": "blue"}
    task, cat = f"Begin.{SUMMARY}I am <|im_end|> 7", {"role": "user", "content": " the cat"}
    context = [CHAT[0], {"role": "user", "content": task}, blue, cat]
    assert shown == tokenizer.apply_chat_template(context, tokenize=False, add_generation_prompt=True)
    # The summary's token is spelled, so it ends no turn: system, user, assistant and user end theirs.
    assert contexts[3].count(END) == 4
    asked = "<|im_start|>user\nSum up.<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(contexts[2], skip_special_tokens=False).endswith(asked)
    messages = [(m["role"], m["content"]) for m in rollout.episodes[0].messages]
    assert messages[2:4] == [("assistant", "blue"), ("user", "Sum up.")]
    assert messages[4:6] == [("assistant", "I am <|im_end|> 7"), ("user", " the cat")]


def test_without_kept_turns_the_last_answer_stays_in_the_task():
    tokenizer = chat_tokenizer("qwen2_5")
    turns = [[*tokenizer.encode(text), END] for text in ("red", "blue", "sum", "gold", "grey")]
    limits = {"max_context_length": 170, "max_compactions": 1, "kept_turns": 0, "compaction_prompt": "Sum up."}
    _, contexts = play(turns, CHAT, tokenizer, turn=24, **limits)
    assert "Begin." + SUMMARY + "sum\n\n the cat<|im_end|>" in tokenizer.decode(contexts[3])


def test_results_of_tools_come_after_the_calls_that_are_kept():
    tokenizer = chat_tokenizer("qwen2_5")
    calls = [tool_call("add", a=1, b=2), tool_call("add", a=3, b=4), "sum", "It is 10."]
    turns = [[*tokenizer.encode(text), END] for text in calls]
    limits = {"max_context_length": 1150, "max_compactions": 1, "kept_turns": 1, "compaction_prompt": "Sum up."}
    rollout, contexts = play(turns, CHAT, tokenizer, None, [add], turn=100, length=4000, **limits)
    shown = tokenizer.decode(contexts[3])
    assert "<tool_response>\n7\n</tool_response>" in shown and "<tool_response>\n3" not in shown
    assert rollout.episodes[0].counts.compactions == 1 and rollout.episodes[0].messages[-1]["content"] == "It is 10."


def test_turns_that_do_not_fit_are_not_kept_and_a_summary_at_its_limit_goes_on():
    # Three turns are asked for, and with the summary of 8 tokens only one fits.
    limits = {"max_context_length": 24, "kept_turns": 3, "max_compactions": 1}
    rollout, contexts = play([*TURNS[:2], words(" red") * 20, *TURNS[3:]], **limits)
    counts = rollout.episodes[0].counts
    assert counts.summaries_cut == 1 and counts.summary_tokens == 8 and counts.turns_cut == 1
    assert contexts[3][: 2 + 8] == [*words("a cat"), *(words(" red") * 20)[:8]]


def test_after_the_last_compaction_a_full_context_ends_the_episode_as_a_limit_does():
    class Endless(Long):
        turns = 99

    turns = [*TURNS[:2], *[words(" red") * 8] * 7]
    rollout, contexts = play(turns, factory=Endless, max_context_length=24, max_compactions=1, kept_turns=0)
    ids, (restart,) = rollout.completion_ids[0], rollout.restarts[0]
    assert len(ids) - restart <= 24 and rollout.stopped == [False] and len(contexts) == 5
    assert rollout.episodes[0].counts.compactions == 1


def test_a_function_of_the_user_says_the_new_context_without_a_summary():
    given = []

    def last_two(messages):
        given.append(messages)
        return [messages[0], {**messages[-2], "content": f" {messages[-2]['content']}"}, messages[-1]]

    limits = {"max_context_length": 15, "compact": last_two}
    rollout, contexts = play(TURNS, **limits)
    counts = rollout.episodes[0].counts
    assert counts.compactions >= 1 and counts.summaries == 0 and counts.turns == 4
    assert given[0][0] == {"role": "user", "content": "a cat"} and given[0][-1]["role"] == "user"
    shortened = contexts[-1]
    assert WORDS.decode(shortened) == f"a cat {given[-1][-2]['content']}{given[-1][-1]['content']}"


@pytest.mark.parametrize(
    ("compact", "message"),
    [
        (lambda messages: "short", "return a list of messages"),
        (lambda messages: messages[5], "IndexError"),
        (lambda messages: [], "return a list of messages"),
        (lambda messages: [{"role": "user", "content": ""}], "without a token"),
    ],
)
def test_a_function_that_breaks_fails_its_episode_alone(compact, message):
    rollout, _ = play(TURNS, max_context_length=15, compact=compact)
    assert message in rollout.episodes[0].failure and rollout.restarts == [[]]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("max_rows", [None, 2])
def test_the_local_backend_samples_what_rows_in_waves_do(family, max_rows):
    backend = LocalBackend(tiny_model(family), max_rows=max_rows)
    limits = CompactionLimits(22, 2, 1, " the lantern")
    stops = tuple(range(40, 64))
    params = SamplingParams(80, 1.0, stops, 0, max_turn_length=4, max_context_length=22)

    def played(play):
        episodes = episodes_of(Long, compaction=limits)
        prompts = ("a cat", "the dog and the river", "a")
        rows = [episodes.row(text, words(text), {}, (3, 0, i)) for i, text in enumerate(prompts)]
        return episodes.play(rows, params, play)

    ours, naive = played(backend.generate_turns), played(partial(play_in_waves, backend.generate))
    assert_same(ours, naive)
    assert ours.restarts == naive.restarts and sum(map(len, ours.restarts)) >= 3
    assert ours.turn_ids == naive.turn_ids
