"""What a reward is computed from: another file, value, weight or address is another text, and nothing else is."""

import functools
import runpy

import pytest
import torch

from onetrunk.judges.constitution import Constitution
from onetrunk.judges.judge import Principle
from onetrunk.judges.rubric import RubricJudge
from onetrunk.models.reward_model import ScoreScale, read_score_adapter
from onetrunk.rewards import EnsembleReward, ModelReward, PairwiseReward, RemoteReward, RewardSet, resolve_reward
from onetrunk.rewards.contents import columns_read, content_of
from onetrunk.rewards.ensemble import load_reward
from onetrunk.rewards.model import TrunkReward
from tests.models.reward_adapters import saved_base, saved_reward_adapter
from tests.rewards.test_model import TEMPLATE, scorer
from tests.tiny import tiny_tokenizer

RULES = "LEAST = 3\n\ndef kind(completions, **columns):\n    return [len(text) > LEAST for text in completions]\n"


def test_a_function_is_known_by_the_bytes_of_its_file(tmp_path):
    path = tmp_path / "rules.py"
    path.write_text(RULES)
    kind = resolve_reward(f"{path}:kind")
    before = content_of(kind)
    assert before.startswith("kind, sha256 ")
    path.write_text(RULES.replace("LEAST = 3", "LEAST = 4"))
    assert content_of(kind) != before
    path.write_text(RULES)
    assert content_of(kind) == before


def at_least(completions, number, **columns):
    return [len(text) >= number for text in completions]


def test_a_partial_counts_with_its_arguments():
    three, four = (functools.partial(at_least, number=number) for number in (3, 4))
    assert content_of(three) == content_of(functools.partial(at_least, number=3)) != content_of(four)


def doubled(function):
    @functools.wraps(function)
    def both(**columns):
        return [2 * score for score in function(**columns)]

    return both


def test_a_decorated_function_counts_with_the_file_of_its_own(tmp_path):
    path = tmp_path / "rules.py"
    path.write_text(RULES)
    kind = doubled(resolve_reward(f"{path}:kind"))
    before = content_of(kind)
    path.write_text(RULES + "# changed\n")
    assert content_of(kind) != before


class Least:
    def __init__(self, number):
        self.number = number

    def __call__(self, completions, **columns):
        return [len(text) >= self.number for text in completions]


def test_an_object_counts_with_its_values():
    assert content_of(Least(3)) == content_of(Least(3)) != content_of(Least(4))


SCRIPT = "STEPS = 10\n\ndef score(completions, **columns):\n    return [len(text) >= 3 for text in completions]\n"


@pytest.mark.parametrize(("change", "is_another"), [(("STEPS = 10", "STEPS = 20"), False), ((">=", ">"), True)])
def test_in_a_script_that_is_run_itself_the_function_counts_and_not_the_rest(tmp_path, change, is_another):
    def content(name, text):
        (tmp_path / name).write_text(text)
        return content_of(runpy.run_path(str(tmp_path / name), run_name="__main__")["score"])

    assert (content("one.py", SCRIPT) != content("two.py", SCRIPT.replace(*change))) == is_another


def test_a_function_without_a_file_counts_with_its_name():
    assert content_of(len) == content_of(len) != content_of(max)


def test_a_model_is_known_by_its_weights_its_tokenizer_and_what_it_reads(tmp_path):
    scorer().save_pretrained(tmp_path / "rm")
    tiny_tokenizer().save_pretrained(tmp_path / "rm")
    before = content_of(ModelReward(tmp_path / "rm"))
    assert content_of(ModelReward(tmp_path / "rm", batch_size=2, name="other")) == before
    assert content_of(ModelReward(tmp_path / "rm", max_length=8)) != before
    assert content_of(ModelReward(tmp_path / "rm", tiny_tokenizer(chat_template=TEMPLATE))) != before
    trained = scorer()
    with torch.no_grad():
        trained.score.weight += 0.01
    trained.save_pretrained(tmp_path / "rm")
    assert content_of(ModelReward(tmp_path / "rm")) != before


class Halved(ModelReward):
    def __call__(self, prompts, completions, **columns):
        return [score / 2 for score in super().__call__(prompts, completions)]


def test_a_reward_of_ones_own_on_a_model_counts_with_both():
    half, whole = Halved(scorer(), tiny_tokenizer()), ModelReward(scorer(), tiny_tokenizer())
    assert content_of(half).startswith(f"{content_of(whole)}, Halved, sha256 ")


def test_an_adapter_is_known_by_its_weights_on_the_trunk_and_on_a_base_of_its_own(tmp_path):
    base = saved_base(tmp_path / "base")
    one, two = (saved_reward_adapter(tmp_path / f"rm-{seed}", base, seed=seed) for seed in (5, 6))
    for read in (lambda path: TrunkReward(read_score_adapter(str(path))), load_reward):
        assert content_of(read(one)) == content_of(read(one)) != content_of(read(two))
    for path in (one, two):
        ScoreScale(0.0, 1.0).save(path)
    ensemble = content_of(EnsembleReward([one, two]))
    assert ensemble == content_of(EnsembleReward([one, two])) != content_of(EnsembleReward([one, two], penalty=1.0))
    ScoreScale(0.0, 2.0).save(two)
    assert content_of(EnsembleReward([one, two])) != ensemble


def test_a_server_is_known_by_its_address_and_the_name_of_its_model():
    reward = RemoteReward("http://127.0.0.1:1/classify", model="rm")
    assert content_of(reward) == "server http://127.0.0.1:1/classify, model rm"


def test_a_judge_is_known_by_what_it_asks_and_by_the_constitution():
    def judged(text="Which is longer?", check=None, **settings):
        principles = (Principle(text, tags=("long",)),)
        return content_of(
            PairwiseReward(RubricJudge({"long": check or at_least}), Constitution("rules", principles), **settings)
        )

    others = [judged("Which is shorter?"), judged(check=takes_all), judged(beta=2.0), judged(floor=0.1)]
    assert judged() == judged() and len({judged(), *others}) == 5


def takes_answer(completions, answer): ...


def takes_all(completions, **rest): ...


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (takes_answer, ["answer"]),
        (takes_all, ["answer", "source"]),
        (functools.partial(takes_answer, completions=[]), ["answer"]),
        (len, []),
        (RemoteReward("http://127.0.0.1:1/classify"), []),
    ],
)
def test_a_column_is_read_by_its_name_or_by_a_function_that_takes_all_keywords(function, expected):
    assert columns_read(function, ["answer", "source"]) == expected


def test_a_set_reads_what_any_of_its_functions_reads_and_no_prompts():
    rewards = RewardSet([len, takes_answer])
    assert rewards.columns_read(["prompt", "prompt_ids", "source", "answer"]) == ["answer"]
    assert set(rewards.contents) == {"len", "takes_answer"}
