"""From settings to a judge: every kind of spec, through the command line too, and every mistake as one message."""

import sys

import pytest

from onetrunk.judges.judge import Pair, Single
from onetrunk.judges.judge_config import JudgeConfig, load_judge, names_a_judge
from onetrunk.judges.local import CausalJudge, RewardModelJudge
from onetrunk.judges.server import ServerJudge
from onetrunk.judges.template import question_messages
from onetrunk.models.build import train_tokenizer
from onetrunk.stages.arguments import parse
from tests.judges.test_constitution import SHORT, short
from tests.models.reward_adapters import a_scorer
from tests.processes import python
from tests.tiny import tiny_model, tiny_tokenizer

URL = "http://127.0.0.1:9/v1"


@pytest.fixture(autouse=True)
def in_folder(empty_folder):
    (empty_folder / "checks.py").write_text("def short(completions, **columns): ...\n")


def test_limits_and_bodies_of_calls_come_out_of_yaml_and_out_of_the_command_line(tmp_path):
    (tmp_path / "c.yaml").write_text(
        f"judge: ['{URL}']\njudge_model: m\njudge_timeout_s: 5\njudge_verdict_tokens: 512\n"
        "judge_extra_body: {chat_template_kwargs: {enable_thinking: false}}\n"
    )
    words = f"--judge_timeout_s 5 --judge {URL} --judge_model m --judge_verdict_tokens 512".split()
    words += ["--judge_extra_body", '{"chat_template_kwargs": {"enable_thinking": false}}']
    for argv in (["--config", "c.yaml"], words):
        (settings,) = parse(argv, "prefs", (JudgeConfig,))
        judge = load_judge(settings)
        assert (judge.policy.call_timeout_s, judge.verdict_tokens) == (5, 512)
        body = {"chat_template_kwargs": {"enable_thinking": False}}
        assert judge.extra_body == judge.identity["extra_body"] == body


def test_an_answer_is_known_by_what_it_depends_on_and_limits_and_addresses_are_no_part_of_that():
    def loaded(url=URL, **settings):
        return load_judge(JudgeConfig(judge=[url], judge_model="owner/judge 7b", **settings))

    judge = loaded()
    for same in (loaded(judge_timeout_s=5, judge_verdict_tokens=512), loaded("https://example.com/v1")):
        assert same.identity == judge.identity and same.name == "judge-7b"
    for other in (loaded(judge_extra_body={"reasoning_effort": "low"}), loaded(judge_samples=3)):
        assert other.identity != judge.identity


def test_a_reward_model_and_an_ensemble_in_which_servers_are_asked_last():
    a_scorer().save_pretrained("reward")
    tiny_tokenizer().save_pretrained("reward")
    judge = load_judge(JudgeConfig(judge=["reward:reward"], judge_device="cpu", judge_batch_size=3))
    assert isinstance(judge, RewardModelJudge) and judge.batch_size == 3 and judge.name == "reward"
    specs = [f"{URL}#model=a", "reward:reward", f"{URL}#model=b", "rubric"]
    ensemble = load_judge(JudgeConfig(judge=specs, rubric={"short": short}, judge_device="cpu"))
    assert list(ensemble.members) == ["reward", "rubric", "a", "b"]
    # Servers of one model are one judge.
    alone, shared = (load_judge(JudgeConfig(judge=urls, judge_model="m")) for urls in ([URL], [URL, f"{URL}/2"]))
    assert isinstance(shared, ServerJudge) and shared.identity == alone.identity


def test_anything_else_is_a_causal_model():
    (message,) = question_messages(Pair("p", "a", "b"), SHORT, "c0ffee")
    tiny_model("llama", vocab_size=512, max_position_embeddings=1024).save_pretrained("causal")
    train_tokenizer([message["content"]], 400, ()).save_pretrained("causal")
    judge = load_judge(JudgeConfig(judge=["causal"], judge_device="cpu"))
    assert isinstance(judge, CausalJudge)
    assert "label mass" in judge.compare([Pair("p", "a", "b")], SHORT)[0].reason  # An untrained model.


def test_a_causal_model_without_the_labels_in_its_vocabulary_is_refused():
    tiny_model("llama").save_pretrained("causal")
    tiny_tokenizer().save_pretrained("causal")
    with pytest.raises(ValueError, match="the labels A, B are not single tokens"):
        load_judge(JudgeConfig(judge=["causal"], judge_device="cpu"))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({}, "judge is []; give rubric; reward:FOLDER"),
        ({"judge": ["reward:"]}, "judge is ['reward:']; give rubric"),
        ({"judge": [URL]}, "judge_model is not set, and the server http://127.0.0.1:9/v1 may have several models"),
        ({"judge": [f"{URL}#name=m"]}, "'#name=m' after it; expected '#model=NAME'"),
        ({"judge": ["rubric"]}, "judge is rubric and rubric is not set"),
        ({"judge": ["a/b"], "rubric": {"short": short}}, "rubric is set and judge is a/b; add rubric to judge"),
        ({"judge": ["reward:x"], "judge_device": "gpu"}, "judge_device is 'gpu'; expected a device such as cpu"),
        ({"judge": ["rubric"], "rubric": {"short": short}, "constitution": "no.yaml"}, "no.yaml does not exist"),
        ({"judge": ["rubric"], "rubric": {"short": "checks.py:shrot"}}, "did you mean short?"),
        ({"judge": ["rubric"], "rubric": {"short": "no.py:x"}}, "the rubric's check for the tag 'short': "),
        ({"judge_samples": 0}, "judge_samples is 0; set it to 1 or more"),
        ({"judge_timeout_s": 0.0}, "judge_timeout_s is 0.0; set a finite number above 0"),
        ({"judge_extra_body": {"max_tokens": 9}}, "sets max_tokens, which the judge sets itself; set judge_verdict"),
        ({"rubric": "short"}, "rubric is 'short'; expected a mapping, as JSON"),
    ],
)
def test_a_mistake_is_one_error_message(settings, message):
    with pytest.raises(ValueError) as caught:
        load_judge(JudgeConfig(**settings))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_rubric_loads_no_http_client_and_no_model():
    code = (
        "import sys; from onetrunk.judges.judge_config import *; load_judge(JudgeConfig('rubric', rubric={'a': len}));"
        "print([m for m in ('httpx2', 'onetrunk.judges.server', 'onetrunk.judges.local', 'peft') if m in sys.modules])"
    )
    assert python("-c", code).stdout.strip() == "[]"


OWN_JUDGE = """
from onetrunk.judges.judge import Judge, Pair, Rating, Verdict

class Shorter(Judge):
    name, identity = "shorter", {"kind": "shorter", "version": 1}

    def _answer(self, items, principle, keep):
        for i, item in enumerate(items):
            is_pair = isinstance(item, Pair)
            keep(i, Verdict(float(len(item.first) < len(item.second))) if is_pair else Rating(1 / len(item.text)))

class Counting(Shorter):
    def __init__(self, size):
        self.size = size

class Nameless(Shorter):
    name = "two words"

class Unknown(Shorter):
    identity = {"model": object()}

counting = Counting(3)
number = 3
"""


@pytest.mark.parametrize("spec", ["own_judges.py:Shorter", "own_judges.py:counting", "own_judges.Shorter"])
def test_a_judge_of_the_user_s_is_named_in_yaml(tmp_path, monkeypatch, spec):
    (tmp_path / "own_judges.py").write_text(OWN_JUDGE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_judges", raising=False)
    (tmp_path / "c.yaml").write_text(f"judge: ['{spec}']\n")
    (settings,) = parse(["--config", "c.yaml"], "prefs", (JudgeConfig,))
    judge = load_judge(settings)
    verdicts = judge.compare([Pair("p", "a", "bb"), Pair("p", "ccc", "bb")], SHORT)
    assert [verdict.probability for verdict in verdicts] == [1.0, 0.0]
    assert judge.rate([Single("p", "aaaa")], SHORT)[0].score == 0.25


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("absent.py:Shorter", ValueError, r"judge 'absent.py:Shorter': there is no file absent.py \(working folder"),
        ("own_judges.py", ValueError, "names a file; write 'own_judges.py:NAME'"),
        ("own_judges.py:Shortr", ValueError, "has no 'Shortr'; did you mean Shorter?"),
        ("own_judges.py:number", TypeError, "is of type int; expected a subclass of onetrunk.judges.judge.Judge"),
        ("own_judges.py:Counting", TypeError, "cannot be made without arguments.*give its class defaults, or name an"),
        ("own_judges.py:Nameless", ValueError, "needs a name of letters"),
        ("own_judges.py:Unknown", ValueError, "an identity: a dict of JSON values"),
        ("no_such_package.Judge", ValueError, "judge 'no_such_package.Judge': there is no module 'no_such_package'"),
        ("./no_model", RuntimeError, "Write a judge on a server as http://HOST:PORT/v1#model=./no_model"),
    ],
)
def test_a_judge_of_the_user_s_or_a_model_that_cannot_be_used_says_the_mend(tmp_path, spec, error, message):
    (tmp_path / "own_judges.py").write_text(OWN_JUDGE)
    with pytest.raises(error, match=message):
        load_judge(JudgeConfig(judge=[spec]))


def test_folders_hub_names_and_other_specs_are_no_judges_in_python(tmp_path):
    (tmp_path / "a.folder").mkdir()
    for spec in ("rubric", "reward:a.b", URL, "owner/model", "Qwen2.5-7B", "gpt2", "a.folder", "./models/x.y"):
        assert not names_a_judge(spec), spec
    for spec in ("judges.py:Mine", "folder/judges.py:Mine", "package.module.Mine"):
        assert names_a_judge(spec), spec
