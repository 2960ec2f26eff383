"""A process reward model: which tokens it reads, where the score of a step arrives, and what is rejected."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForTokenClassification, PreTrainedTokenizerFast

from onetrunk.rewards import ProcessReward
from onetrunk.rewards.reward import content_of
from tests.models.reward_adapters import a_scorer, scorer_config
from tests.ppo.support import base_model, logged, make_trainer, trained
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer

WORDS = tiny_tokenizer()


def saved(folder, tokenizer, **overrides):
    """Save a tiny token-classification model with its tokenizer; return it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForTokenClassification(scorer_config(**{"num_labels": 2, "vocab_size": 300, **overrides})).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def bytes_tokenizer(*merged):
    """Return a tokenizer of bytes, and of the texts in `merged`, two characters each."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [tuple(pair.replace("\n", "\u010a")) for pair in merged]
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", *alphabet, *map("".join, merges)])}
    backend = Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")


def read(model, ids, places):
    """Return the probability of the last label at some tokens of a row, without onetrunk."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, places]
    return (logits.softmax(-1)[:, 1] if logits.shape[1] == 2 else logits.sigmoid()[:, 0]).tolist()


def words(text):
    return WORDS.convert_tokens_to_ids(text.split())


def check(reward, prompt, ids, expected, stopped=True, turns=None):
    given = {"completions": ["-"], "completion_stopped": [stopped], "turn_ids": turns and [turns]}
    [found] = reward(prompts=[prompt], completion_ids=[ids], **given)
    assert found.rewards == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("num_labels", [1, 2])
def test_the_score_of_a_step_arrives_at_its_separator(tmp_path, num_labels):
    model = saved(tmp_path, WORDS, num_labels=num_labels)
    reward = ProcessReward(tmp_path, WORDS, separator=" .")
    first, second = read(model, words("<bos> a fish the cat . dog sings ."), [5, 8])
    check(reward, "a fish", words("the cat . dog sings . <eos>"), [0, 0, first, 0, 0, second, 0])
    # A last step without a separator is read with one, as in training, and arrives at the last token.
    check(reward, "a fish", words("the cat . dog sings <eos>"), [0, 0, first, 0, 0, second])
    check(reward, "a fish", words("the cat . dog sings"), [0, 0, first, 0, second], stopped=False)
    # Nothing between two separators is no step.
    check(reward, "a fish", words("the cat . . dog sings . <eos>"), [0, 0, first, 0, 0, 0, second, 0])
    check(reward, "a fish", words("<eos>"), [0])


def test_an_end_token_that_a_policy_spells_is_characters(tmp_path):
    tokenizer = bytes_tokenizer()
    model = saved(tmp_path, tokenizer)
    spelled = [tokenizer.convert_tokens_to_ids(char) for char in "a<eos>b"]
    row = [*tokenizer("p")["input_ids"], *spelled, *tokenizer("\n")["input_ids"]]
    expected = [0] * len(spelled) + read(model, row, [len(row) - 1])
    check(ProcessReward(tmp_path, tokenizer), "p", [*spelled, tokenizer.eos_token_id], expected)


def test_a_conversation_is_rendered_with_the_variables_of_its_row(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}{% if tools %} {{ tools[0].name }}{% endif %} bird"
    model = saved(tmp_path, tokenizer)
    reward = ProcessReward(tmp_path, tokenizer, separator=" .")
    given = {"prompts": [[{"role": "user", "content": "the cat"}]], "completions": ["-"]}
    [found] = reward(**given, completion_ids=[words("dog . <eos>")], tools=[[{"name": "fish"}]])
    expected = read(model, words("<bos> the cat fish bird dog ."), [6])
    assert found.rewards == pytest.approx([0, *expected, 0], abs=1e-6)


def test_a_call_in_a_prompt_has_no_arguments_of_another_rows_call(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.tool_calls or '' }}{% endfor %} cat"
    saved(tmp_path, tokenizer)
    reward = ProcessReward(tmp_path, tokenizer)
    calls = [{"name": "f", "arguments": {"city": "bird", **others}} for others in ({}, {"day": None})]
    plain, filled = (
        [{"role": "assistant", "content": "a", "tool_calls": [call]}, {"role": "user", "content": "b"}]
        for call in calls
    )
    assert reward._text(filled, {}) == reward._text(plain, {})


# Separator, prompt, steps, then input_ids and labels as PRMTrainer.tokenize_row of TRL 1.9 made them (-100: no label).
# Later versions of TRL have no PRMTrainer.
TRL_ROWS = [
    (" .", "a fish", ["the cat", "dog sings"], [2, 7, 12, 8, 9, 60, 10, 38, 60], {5: 1, 8: 0}),
    (" .", "red", ["the", "small dog", "cat"], [2, 23, 8, 60, 29, 10, 60, 9, 60], {3: 0, 6: 1, 8: 1}),
    ("\n", "p:", ["a\u00e9", "b", "cd"], [81, 27, 66, 129, 104, 200, 67, 200, 68, 69, 200], {5: 1, 7: 0, 10: 1}),
    ("\n\n", "p:", ["a", "bc"], [81, 27, 66, 200, 200, 67, 68, 200, 200], {4: 0, 8: 1}),
]


@pytest.mark.parametrize("separator", [" .", "\n", "\n\n"])
def test_a_model_that_learned_rows_of_trl_scores_their_steps_where_it_learned_them(tmp_path, separator):
    tokenizer = WORDS if separator == " ." else bytes_tokenizer()
    rows = [row[1:] for row in TRL_ROWS if row[0] == separator]
    model = saved(tmp_path, tokenizer)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        for _, _, ids, labels in rows:
            target = torch.tensor([[labels.get(place, -100) for place in range(len(ids))]])
            model(input_ids=torch.tensor([ids]), labels=target).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.save_pretrained(tmp_path)
    reward = ProcessReward(tmp_path, tokenizer, separator=separator)
    for prompt, steps, ids, labels in rows:
        start = min(labels) + 1 - len(tokenizer(steps[0] + separator)["input_ids"])
        [found] = reward([prompt], ["-"], [ids[start:]], completion_stopped=[False])
        expected = [labels.get(start + i, 0) for i in range(len(ids) - start)]
        assert found.rewards == pytest.approx(expected, abs=0.05) and any(expected)
        assert [place for place, r in enumerate(found.rewards) if r] == [place - start for place in labels]


def test_a_model_with_another_tokenizer_reads_the_text_and_its_scores_arrive_at_the_policys_tokens(tmp_path):
    own, policy = bytes_tokenizer(), bytes_tokenizer("\nb", "\nc")
    model = saved(tmp_path, own)
    # A token of the policy holds the end of a step and the beginning of the next one.
    ids = policy("a\u00e9\nb\ncd\n")["input_ids"] + [1]
    assert [policy.decode([token]) for token in ids] == ["a", "\ufffd", "\ufffd", "\nb", "\nc", "d", "\n", "<eos>"]
    one, two, three = read(model, own("p:a\u00e9\nb\ncd\n")["input_ids"], [5, 7, 10])
    check(ProcessReward(tmp_path, policy), "p:", ids, [0, 0, 0, one, two, 0, three, 0])


def test_rows_of_a_batch_do_not_touch_each_other(tmp_path):
    own, texts = bytes_tokenizer(), ["a\nbb\n", "c", "dddd\ne\nf", "g\n\n"]
    saved(tmp_path, own)
    given = {"prompts": ["p", "qqq", "", "r"], "completions": texts, "completion_stopped": [False] * 4}
    given["completion_ids"] = [own(text)["input_ids"] for text in texts]
    single, batched = (ProcessReward(tmp_path, own, batch_size=size)(**given) for size in (1, 3))
    for one, other, count in zip(single, batched, (2, 1, 3, 1), strict=True):
        assert one.rewards == pytest.approx(other.rewards, abs=1e-6) and sum(map(bool, one.rewards)) == count


def test_in_an_episode_only_the_policys_steps_have_a_reward(tmp_path):
    own = bytes_tokenizer()
    model = saved(tmp_path, own)
    ids, turns = own("a\nx\nyz\n")["input_ids"], [0, 0, -1, -1, -1, 1, 1]
    first, _, third = read(model, own("pa\nx\nyz\n")["input_ids"], [2, 4, 7])
    # "x" is all observation; "yz" begins in one. One number per sampled token.
    check(ProcessReward(tmp_path, own), "p", ids, [0, first, 0, third], False, turns)
    # A step that ends in an observation arrives at the policy's last token.
    check(ProcessReward(tmp_path, own), "p", ids, [first, 0, third], False, [0, -1, -1, -1, 1, 1, -1])


def test_conversations_go_through_the_models_own_template_and_long_prompts_lose_their_beginning(tmp_path):
    model = saved(tmp_path, tiny_tokenizer(chat_template=CHAT_TEMPLATE), max_position_embeddings=6)
    reward = ProcessReward(tmp_path, WORDS, separator=" .")
    prompt = [{"role": "user", "content": "fish"}]
    [score] = read(model, words("<bos> <user> fish <assistant> cat ."), [5])
    check(reward, prompt, words("cat . <eos>"), [0, score, 0])
    [score] = read(model, words("<bos> fish <assistant> the cat ."), [5])
    check(reward, prompt, words("the cat . <eos>"), [0, 0, score, 0])
    assert reward([prompt], ["-"], [words("a a a a a a . <eos>")], completion_stopped=[True]) == [None]


def test_ppo_trains_on_it_and_a_resumed_run_knows_it(tmp_path):
    saved(tmp_path / "prm", WORDS)
    spec = f"prm:{tmp_path / 'prm'}#separator=%20cat"
    trainer = trained(tmp_path / "run", reward=spec)
    assert 0 < logged(trainer, "score/prm")[0] and logged(trainer, "reward/turn_0") == logged(trainer, "score/mean")
    contents = {content_of(ProcessReward(tmp_path / "prm", WORDS, separator=mark)) for mark in ("\n", ".")}
    assert len(contents) == 2 and content_of(ProcessReward(tmp_path / "prm", WORDS)) in contents


def test_what_is_no_process_reward_model_is_rejected_before_the_policy_loads(tmp_path):
    for folder, model in {"scorer": a_scorer(), "language": base_model()}.items():
        model.save_pretrained(tmp_path / folder)
        WORDS.save_pretrained(tmp_path / folder)
    saved(tmp_path / "prm", WORDS)
    here = f"prm:{tmp_path}"
    for spec, error, message in (
        (f"{here}/scorer", ValueError, "is LlamaForSequenceClassification; expected a token-classification model, as"),
        (f"{here}/language", ValueError, "is LlamaForCausalLM; expected a token-classification model"),
        (f"{here}/nowhere", RuntimeError, "there is no such folder"),
        (f"{here}/prm#colour=red", ValueError, "unknown option 'colour' after '#'; there is separator=TEXT"),
        (f"{here}/prm#separator=", ValueError, "separator is '' and batch_size 16"),
        ("prm:", ValueError, "'prm:' names no model"),
        (f"{tmp_path}/prm", ValueError, "classifies tokens; write 'prm:"),
    ):
        with pytest.raises(error, match=message):
            make_trainer(tmp_path / "run", reward=spec)
