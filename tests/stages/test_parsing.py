"""What a user can get wrong on the command line or in YAML: one sentence, exit code 2, no stack trace."""

import pytest

from onetrunk import __version__, cli
from onetrunk.ppo.monitoring.alarm_rules import RULES
from onetrunk.stages.eval import parse_eval
from onetrunk.stages.pipeline import parse_run
from onetrunk.stages.ppo import parse_ppo
from onetrunk.stages.sft import parse_sft
from onetrunk.verbs import VERBS
from tests.stages.recipes import ROOT

GOOD = {"model_name_or_path": "m", "dataset_name": "d", "output_dir": "o", "reward_funcs": "r.f"}


def write_yaml(folder, **values):
    path = folder / "run.yaml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in {**GOOD, **values}.items() if value is not None))
    return str(path)


def usage(capsys, *argv):
    """Run the command line; return what it says after a usage error."""
    code = cli.main(argv)
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and "Traceback" not in err
    assert err.startswith("error: ") and len(err.splitlines()) == 2 and "--help" in err
    return err


def test_the_file_gives_values_and_the_command_line_overrides_them(tmp_path):
    config = write_yaml(tmp_path, beta=0.3, learning_rate="1e-3", num_rollouts=7)
    data, args, model_args, *_ = parse_ppo(["--config", config, "--num_rollouts", "9", "--lora-r", "4"])
    assert (args.beta, args.learning_rate, args.num_rollouts, model_args.lora_r) == (0.3, 1e-3, 9, 4)
    assert data.reward_funcs == ["r.f"] and model_args.lora_dropout == 0
    assert parse_ppo([f"--config={config}"])[1].num_rollouts == 7


def test_a_tilde_at_the_start_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = write_yaml(tmp_path, output_dir="~/runs/x", stop_tokens="['~', '~x/']")
    args = parse_ppo(["--config", config])[1]
    assert args.output_dir == "/home/me/runs/x" and args.stop_tokens == ["~", "~x/"]
    assert parse_ppo(["--config", config, "--output_dir=~/y"])[1].output_dir == "/home/me/y"


def test_lora_stands_on_all_linear_layers_without_dropout_by_default(tmp_path):
    model_args = parse_ppo(["--config", write_yaml(tmp_path)])[2]
    lora = model_args.peft_config()
    assert (lora.r, lora.lora_dropout, lora.target_modules) == (16, 0.0, "all-linear")
    assert model_args.changed_lora_fields() == []
    changed = parse_ppo(["--config", write_yaml(tmp_path, lora_r=4, lora_target_modules="[q_proj, v_proj]")])[2]
    assert changed.changed_lora_fields() == ["lora_r", "lora_target_modules"]
    assert changed.peft_config().target_modules == {"q_proj", "v_proj"}
    one = parse_ppo(["--config", write_yaml(tmp_path), "--lora_target_modules", "q_proj"])[2]
    assert one.peft_config().target_modules == {"q_proj"}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty; expected lines"),
        ("- a\n- b\n", "holds a list; expected lines"),
        ("lam:\n", "line 1: lam is empty; give a value or remove the line"),
        ("dataset_name: [a, b]\n", "line 1: dataset_name is ['a', 'b'] (list); expected str"),
        ("env: {A: 1}\n", "line 1: env: set environment variables before the command"),
        ("beta: 1\n<<: {lam: 0.9}\n", "line 2: the key '<<' is not text for YAML (merge)"),
        ("beta: 9999-99-99\n", "holds a value that cannot be read"),
        ("reward_funcs: [1]\n", "line 1: reward_funcs holds 1 (int); expected str, in quotes where YAML"),
        ("reward_weights: [1, 1e-3, true]\n", "line 1: reward_weights holds True (bool); expected float"),
    ],
)
def test_a_config_that_cannot_be_read_says_where(tmp_path, capsys, text, sentence):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert sentence in usage(capsys, "ppo", "--config", str(path))


def test_a_config_that_is_a_folder_or_not_named_says_so(tmp_path, capsys):
    assert "is a folder" in usage(capsys, "ppo", "--config", str(tmp_path))
    assert "--config: expected one argument" in usage(capsys, "ppo", "--config")


def test_keywords_come_as_json_on_the_command_line_and_as_a_mapping_in_the_file(tmp_path):
    def read(*words, **values):
        return parse_sft(["--config", write_yaml(tmp_path, reward_funcs=None, **values), *words])[1].model_init_kwargs

    assert read() is None
    assert read("--model_init_kwargs", '{"a": 1, "b": {"c": false}}') == {"a": 1, "b": {"c": False}}
    assert read("--model-init-kwargs={}") == {}
    assert read(model_init_kwargs="{a: 2}") == {"a": 2}
    assert read("--model_init_kwargs", '{"a": 3}', model_init_kwargs="{a: 2}") == {"a": 3}


@pytest.mark.parametrize("verb", VERBS.values(), ids=list(VERBS))
def test_help_lists_the_options(capsys, verb):
    assert cli.main([verb.name, "--help"]) == 0
    words = {"run": "--until", "config": "distill", "report": "--output_dir"}
    words |= {"recipes": "list|copy", "plan": "--hardware_file"}
    expected = [f"--{name} " for name in verb.needed] if verb.has_settings else [words.get(verb.name, "usage: ")]
    out = capsys.readouterr().out
    assert all(text in out for text in expected)


def test_version_and_help(capsys):
    assert cli.main(["--version"]) == 0 and capsys.readouterr().out == f"onetrunk {__version__}\n"
    assert cli.main(["--help"]) == 0
    assert cli.main([]) == 2


def test_stages_that_go_on_by_themselves_take_resume_auto_and_nothing_else(tmp_path, capsys):
    options = ["--model_name_or_path", "m", "--dataset_name", "d", "--output_dir", "o", "--reward_funcs", "r.f"]
    assert parse_eval([*options, "--resume", "auto"])[0].output_dir == "o"
    err = usage(capsys, "eval", *options, "--resume", "checkpoint-3")
    assert "--resume: invalid choice: 'checkpoint-3'" in err
    assert parse_run([str(ROOT / "recipes/tiny/pipeline.yaml"), "--resume", "auto"])[0].first is None


@pytest.mark.parametrize(("written", "names"), [("all", len(RULES)), ("null", 0), ("[kl, entropy]", 2)])
def test_the_alarms_that_stop_a_run_may_be_all_none_or_some(tmp_path, written, names):
    config = write_yaml(tmp_path, stop_on_alarm=written)
    assert len(parse_ppo(["--config", config])[1].stop_on_alarm or []) == names
