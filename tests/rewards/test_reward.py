"""What a reward function is: its name, how it is found, the content that a resumed run compares; a judge as one."""

import functools
import runpy
import sys

import pytest
import torch

import onetrunk.rewards
from onetrunk.judges.constitution import Constitution, RubricJudge
from onetrunk.judges.judge import Principle
from onetrunk.models.reward_model import read_score_adapter
from onetrunk.rewards import JudgeReward, ModelReward, RemoteReward, RewardSet, resolve_reward
from onetrunk.rewards.model import TrunkReward, load_reward
from onetrunk.rewards.reward import columns_read, content_of, reward_name
from tests.judges.fakes import ToldJudge
from tests.models.reward_adapters import saved_base, saved_reward_adapter
from tests.rewards.test_model import TEMPLATE, scorer
from tests.tiny import tiny_tokenizer


def length(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


class Named:
    name = "judge"

    def __call__(self, completions, **kwargs): ...


class Unnamed:
    async def __call__(self, completions, **kwargs): ...


def test_names_come_from_the_function_the_object_or_its_class_and_are_unique():
    assert reward_name(length) == "length"
    assert reward_name(functools.partial(functools.partial(length), scale=2)) == "length"
    assert reward_name(Named()) == "judge"
    assert reward_name(Unnamed()) == "Unnamed"
    assert reward_name(lambda **kwargs: []) == "lambda"

    def length_2(**kwargs):
        return []

    names = ["length", "length_2", "length_3", "length_4"]
    assert RewardSet([length, length_2, length, length]).names == names


def test_the_worked_example_of_the_package_runs_as_written():
    example = onetrunk.rewards.__doc__.split("\n\n")[2]
    assert example.startswith("    def ends_politely")
    scope = {}
    exec("\n".join(line[4:] for line in example.splitlines()), scope)
    answers = ["thank you", "no", "thank you"]
    messages = [[{"role": "assistant", "content": text}] for text in answers]
    rewards = RewardSet(scope["ends_politely"], weights=[0.5])
    scores = rewards.score(["p"] * 3, messages, [[1]] * 3, {"min_words": [3, 3, 0]})
    assert scores.total[:2].tolist() == [0.5, 0.0]
    assert scores.total.isfinite().tolist() == [True, True, False]
    assert scores.by_function["ends_politely"][:2].tolist() == [1.0, 0.0]


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "reward_package_of_a_user"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "good.py").write_text(
        "def one(completions, **kwargs):\n    return [1.0] * len(completions)\nNUMBER = 3\n"
    )
    (folder / "broken.py").write_text("import a_package_that_is_not_there\n")
    (folder / "raising.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.startswith(folder.name)]:
        del sys.modules[name]


def test_a_callable_passes_through_and_paths_are_imported(package):
    assert resolve_reward(length) is length
    # TRL's command line has these names.
    assert resolve_reward("think_format_reward")([[{"content": "<think>\nso\n</think>\nyes"}]]) == [1.0]
    assert resolve_reward("get_soft_overlong_punishment")(completion_ids=[[0] * 1281, [0]]) == [-1, 0]
    assert resolve_reward("reward_package_of_a_user.good.one")(completions=["a", "b"]) == [1.0, 1.0]
    by_file = resolve_reward(f"{package / 'good.py'}:one")
    assert by_file(completions=["a"]) == [1.0]
    assert resolve_reward(f"{package / 'good.py'}:one") is by_file


@pytest.mark.parametrize(
    ("spec", "error", "reason"),
    [
        ("no_such_package.one", ValueError, "there is no module 'no_such_package'"),
        ("reward_package_of_a_user.good.two", ValueError, "has no 'two'; it has one"),
        ("reward_package_of_a_user.good.oen", ValueError, r"has no 'oen'; did you mean one\?"),
        ("reward_package_of_a_user.good.NUMBER", TypeError, "is of type int; expected something to call"),
        ("reward_package_of_a_user.broken.one", RuntimeError, "No module named 'a_package_that_is_not_there'"),
        ("reward_package_of_a_user.raising.one", RuntimeError, "ZeroDivisionError"),
        ("collections.OrderedDict", TypeError, "is a class; give an instance"),
        ("owner/reward-model", ValueError, "give onetrunk.rewards.ModelReward"),
        ("prm:owner/model", ValueError, "give onetrunk.rewards.ProcessReward"),
        ("judge", ValueError, "give onetrunk.rewards.JudgeReward"),
        ("nowhere.py:one", ValueError, r"there is no file nowhere.py \(working folder /.*\)"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused_with_the_reason(package, spec, error, reason):
    with pytest.raises(error, match=reason):
        resolve_reward(spec)


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


SCRIPT = "STEPS = 10\n\ndef score(completions, **columns):\n    return [len(text) >= 3 for text in completions]\n"


@pytest.mark.parametrize(("change", "is_another"), [(("STEPS = 10", "STEPS = 20"), False), ((">=", ">"), True)])
def test_in_a_script_that_is_run_itself_the_function_counts_and_not_the_rest(tmp_path, change, is_another):
    def content(name, text):
        (tmp_path / name).write_text(text)
        return content_of(runpy.run_path(str(tmp_path / name), run_name="__main__")["score"])

    assert (content("one.py", SCRIPT) != content("two.py", SCRIPT.replace(*change))) == is_another


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


def test_an_adapter_is_known_by_its_weights_on_the_trunk_and_on_a_base_of_its_own(tmp_path):
    base = saved_base(tmp_path / "base")
    one, two = (saved_reward_adapter(tmp_path / f"rm-{seed}", base, seed=seed) for seed in (5, 6))
    for read in (lambda path: TrunkReward(read_score_adapter(str(path))), load_reward):
        assert content_of(read(one)) == content_of(read(one)) != content_of(read(two))


def test_a_judge_is_known_by_what_it_asks_and_by_the_constitution():
    def judged(text="Which is longer?", check=length):
        constitution = Constitution("rules", (Principle(text, tags=("long",)),))
        return content_of(JudgeReward(RubricJudge({"long": check}), constitution))

    others = [judged("Which is shorter?"), judged(check=takes_all)]
    assert judged() == judged() and len({judged(), *others}) == 3


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


TWO = Constitution("two", (Principle("Which is longer?", 3.0), Principle("Which is warmer?", 1.0, ("warm",))))


def rate(item, principle):
    """Rate a tenth of the number of words, 1 by warmth; abstain on "what", fail on "fails"."""
    if item.text in ("what", "fails"):
        return None if item.text == "what" else "down"
    return 1.0 if "warm" in principle.tags else len(item.text.split()) / 10


def test_a_judge_reads_the_column_with_known_good_answers():
    assert columns_read(JudgeReward(ToldJudge(rate, "words"), TWO), ["answer", "reference"]) == ["reference"]


def test_the_rating_is_the_weighted_mean_of_the_principles_by_hand():
    # 3 words of 10 count three times, 1.0 once: (3 * .3 + 1) / 4.
    reward = JudgeReward(ToldJudge(rate, "words"), TWO)
    found = reward(prompts=["p", "q", "r"], completions=["a b c", "what", "fails"])
    assert found == [pytest.approx(0.475), None, None]
    assert reward(prompts=[], completions=[]) == []
