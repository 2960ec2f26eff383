"""The options of the command line: the data file, the page, the help texts, `config`, `completion`, and old names."""

import inspect
import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess

import pytest
import yaml

from onetrunk import PPOConfig, cli
from onetrunk.ppo.foreign_keys import RENAMED
from onetrunk.stages.distill import parse_distill
from onetrunk.stages.eval.stage import parse_eval
from onetrunk.stages.judge.stage import parse_judge
from onetrunk.stages.options import collect, completion, helping, page, schema
from onetrunk.stages.options.groups import FIRST, GROUPS
from onetrunk.stages.options.reading import parsed_values, read
from onetrunk.stages.options.verbs import VERBS
from onetrunk.stages.ppo import parse_ppo
from onetrunk.stages.prefs.stage import parse_prefs
from onetrunk.stages.reward import parse_reward
from onetrunk.stages.serve import parse_serve
from onetrunk.stages.sft import parse_sft

PARSERS = {
    "sft": parse_sft,
    "judge": parse_judge,
    "prefs": parse_prefs,
    "reward": parse_reward,
    "distill": parse_distill,
    "ppo": parse_ppo,
    "eval": parse_eval,
    "serve": parse_serve,
}
NEEDED = ["--model_name_or_path", "m", "--dataset_name", "d", "--output_dir", "o"]
NEEDED_OF = {"judge": ["--dataset_name", "d", "--output_dir", "o", "--judge", "rubric"]}
MORE = {"ppo": ["--reward_funcs", "r.f"], "distill": ["--teacher", "t"]}


def test_the_data_file_is_made_of_the_settings_classes_as_they_are():
    remedy = "run python -m onetrunk.stages.options.collect"
    assert collect.content() == schema.FILE.read_text(encoding="utf-8"), remedy
    options = {verb: schema.load_options(verb) for verb in schema.verbs()}
    assert page.page(options) == collect.PAGE.read_text(encoding="utf-8"), remedy


@pytest.mark.parametrize("verb", PARSERS)
def test_every_option_has_a_group_and_a_help_text(verb):
    options = schema.load_options(verb)
    assert {option.group for option in options} <= set(GROUPS)
    assert [option.name for option in options if not option.help] == []
    shown = {option.name for option in options if option.rejected is None}
    assert len(FIRST[verb].split()) <= 20 and set(FIRST[verb].split()) <= shown


@pytest.mark.parametrize("verb", [verb for verb in PARSERS if verb != "serve"])
def test_the_early_parser_reads_words_as_the_complete_one_does(verb):
    words = [*NEEDED_OF.get(verb, NEEDED), *MORE.get(verb, []), "--seed", "7", "--dataset-split", "test"]
    words += ["--dtype=float32"] if verb != "judge" else ["--judge_dtype=float32"]
    if verb not in ("prefs", "eval", "judge"):
        words += ["--learning_rate", "1e-3", "--use_cpu", "--no_shuffle_dataset"][: 3 if verb != "ppo" else 4]
        words += ["--max_steps", "4", "--lr_scheduler_kwargs", '{"a": 1}', "--logging_steps=0.5"]
    if verb in ("prefs", "eval"):
        words += ["--stop_tokens", "a", "b", "--max_prompt_length", "none"]
        words += ["--reward_funcs", "r.f"] if verb == "eval" else ["--judge", "rubric", "--constitution", "c.yaml"]
    options = schema.load_options(verb)
    early = parsed_values(read(words, options, knows_ppo=verb == "ppo"), options)
    late = {name: value for part in PARSERS[verb](words) for name, value in vars(part).items()}
    typed = [word.removeprefix("--").split("=")[0].replace("-", "_") for word in words if word.startswith("--")]
    typed = [name.removeprefix("no_") if name.startswith("no_sh") else name for name in typed]
    for name in typed:
        expected = late[name] if name not in ("reward_funcs", "teacher", "judge") else list(late[name])
        assert early[name] == expected, name


@pytest.mark.parametrize("verb", PARSERS)
def test_the_printed_config_loads_as_it_is_and_with_every_line_in_use(tmp_path, capsys, verb):
    assert cli.main(["config", verb]) == 0
    text = capsys.readouterr().out
    written = [line for line in text.splitlines() if line[:1] == "#" and line[1:2] not in ("", " ")]
    shown = [option for option in schema.load_options(verb) if option.rejected is None]
    assert len(written) == len(shown) - len(helping.NEEDED[verb])
    used = "\n".join(line[1:] if line in written else line for line in text.splitlines())
    assert set(yaml.safe_load(used)) == {option.name for option in shown}
    parsed = []
    for name, content in (("plain", text), ("used", used)):
        path = tmp_path / f"{name}.yaml"
        path.write_text(content)
        parsed.append(PARSERS[verb](["--config", str(path)]))
    for one, other in zip(*parsed, strict=True):
        # Made anew by each instance.
        left_out = {"accelerator_config", "_n_gpu", "distributed_state", "deepspeed_plugin"}
        first, second = ({k: v for k, v in vars(part).items() if k not in left_out} for part in (one, other))
        assert first == second


def test_help_leads_with_what_matters_and_hides_what_is_rejected():
    options = schema.load_options("ppo")
    short, whole = (helping.help_text("ppo", VERBS["ppo"], options, topic) for topic in ("", "all"))
    assert len(short.splitlines()) < 130 and len(whole.splitlines()) > 400
    for text in (short, whole):
        assert "--config FILE" in text and "--resume auto" in text
        for hidden in (
            "dataloader_num_workers",
            "use_liger_kernel",
            "gradient_checkpointing",
            "fsdp_config"[:4] + " ",
        ):
            assert f"--{hidden}" not in text
    assert "[0.05]" in short and "--rollout_batch_size" in short and "--adam_beta1" not in short
    assert "--adam_beta1" in whole
    for group in (
        "rollout",
        "reward",
        "advantage",
        "loss",
        "trunk",
        "checkpoints",
        "logging",
        "model",
        "data",
        "judges",
    ):
        assert f"\n{group}: " in short


def test_help_explains_a_group_or_an_option_and_names_the_nearest(capsys):
    assert cli.main(["ppo", "--help", "advantage"]) == 0
    text = capsys.readouterr().out
    assert "--gamma" in text and "--learning_rate" not in text
    assert cli.main(["ppo", "--help", "--beta"]) == 0 or "--beta" in capsys.readouterr().out
    assert cli.main(["ppo", "--help", "epsilon_high"]) == 0 and "Upper clip range" in capsys.readouterr().out
    assert cli.main(["ppo", "--help", "advantages"]) == 2
    assert "did you mean 'advantage'?" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["sft", "reward", "distill", "ppo"])
@pytest.mark.parametrize("value", ["true", "false"])
def test_gradient_checkpointing_means_the_same_in_every_stage(tmp_path, verb, value):
    config = tmp_path / "run.yaml"
    config.write_text(f"gradient_checkpointing: {value}\ngradient_checkpointing_kwargs: {{use_reentrant: false}}\n")
    words = [*NEEDED, *MORE.get(verb, [])]
    by_file = PARSERS[verb]([*words, "--config", str(config)])[1]
    by_word = PARSERS[verb]([*words, "--gradient-checkpointing", value])[1]
    for args in (by_file, by_word):
        assert args.activation_checkpointing is (value == "true")
    assert by_file.activation_checkpointing_kwargs == {"use_reentrant": False}


def test_an_old_and_a_new_name_of_one_setting_are_not_both_taken(tmp_path, capsys):
    config = tmp_path / "run.yaml"
    config.write_text("gradient_checkpointing: true\nactivation_checkpointing: false\n")
    assert cli.main(["ppo", *NEEDED, *MORE["ppo"], "--config", str(config)]) == 2
    assert "are the same setting; keep activation_checkpointing" in capsys.readouterr().err
    assert set(RENAMED) == {"gradient_checkpointing", "gradient_checkpointing_kwargs"}


def test_ppo_config_takes_the_old_name_and_has_a_signature_and_a_line_per_field():
    with pytest.warns(FutureWarning, match="gradient_checkpointing"):
        assert PPOConfig(output_dir="unused", use_cpu=True, gradient_checkpointing=True).activation_checkpointing
    parameters = inspect.signature(PPOConfig).parameters
    assert (
        parameters["beta"].default == 0.05 and parameters["num_ppo_epochs"].default == 4 and "args" not in parameters
    )
    assert "        beta: Coefficient of the KL to the reference" in PPOConfig.__doc__
    assert "Raises:\n        ValueError" in PPOConfig.__doc__


def test_other_libraries_leave_the_answer_to_the_complete_parser(monkeypatch, capsys):
    monkeypatch.setattr("onetrunk.stages.options.early.is_current", lambda: False)
    assert cli.main(["ppo", "--learning_rat", "1"]) == 2
    assert "did you mean 'learning_rate'?" in capsys.readouterr().err


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_completion_knows_verbs_and_options(capsys, shell):
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "rollout_batch_size" in script and "doctor" in script and "gradient_checkpointing" not in script


def test_bash_completes_verbs_options_and_their_words(tmp_path):
    path = tmp_path / "completion.bash"
    path.write_text(completion.script("bash"))

    def completed(*words):
        quoted = " ".join(json.dumps(word) for word in words)
        lines = f"source {path}; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _onetrunk"
        run = subprocess.run(
            ["bash", "-c", f'{lines}; printf "%s\\n" "${{COMPREPLY[@]}}"'], capture_output=True, text=True
        )
        return run.stdout.split()

    assert completed("onetrunk", "pp") == ["ppo"]
    assert completed("onetrunk", "ppo", "--value_h") == ["--value_head", "--value_head_init"]
    assert completed("onetrunk", "sft", "--dtype", "f") == ["float16", "float32"]
    assert "--until" in completed("onetrunk", "run", "--")


def shell_path(name):
    return shutil.which(name) or pytest.skip(f"{name} is not installed here (apt-get install {name})")


def test_fish_completes_verbs_options_and_their_words(tmp_path):
    fish = shell_path("fish")
    path = tmp_path / "onetrunk.fish"
    path.write_text(completion.script("fish"))

    def completed(line):
        environment = {**os.environ, "HOME": str(tmp_path)}
        words = [fish, "--no-config", "-c", f"source {path}; complete -C {shlex.quote(line)}"]
        run = subprocess.run(words, env=environment, capture_output=True, text=True)
        assert run.returncode == 0 and run.stderr == ""
        return [entry.split("\t")[0] for entry in run.stdout.splitlines()]

    assert completed("onetrunk pp") == ["ppo"]
    assert completed("onetrunk ppo --value_h") == ["--value_head", "--value_head_init"]
    assert completed("onetrunk sft --dtype f") == ["float16", "float32"]
    assert completed("onetrunk ppo --whiten_rewards ") == ["false", "true"]
    assert "--until" in completed("onetrunk run --")


# As in a ~/.zshrc.
ZSHRC = "PS1=; unset zle_bracketed_paste; autoload -U compinit && compinit -u -D; source $ZDOTDIR/completion\n"


@pytest.mark.slow
def test_zsh_completes_verbs_options_and_their_words_at_the_tab_key(tmp_path):
    """In a terminal, because zsh completes nowhere else; the line is then shown by echo instead of being run."""
    zsh = shell_path("zsh")
    (tmp_path / "completion").write_text(completion.script("zsh"))
    (tmp_path / ".zshrc").write_text(ZSHRC)
    environment = {**os.environ, "ZDOTDIR": str(tmp_path), "HOME": str(tmp_path), "TERM": "dumb"}
    process, terminal = pty.fork()
    if not process:
        os.execve(zsh, [zsh, "-i"], environment)
    shown = ""
    try:
        for typed, expected in (
            ("onetrunk pp", "onetrunk ppo"),
            ("onetrunk ppo --value_head_i", "onetrunk ppo --value_head_init"),
            ("onetrunk sft --dtype b", "onetrunk sft --dtype bfloat16"),
            ("onetrunk run --unt", "onetrunk run --until"),
        ):
            # Ctrl-A and Ctrl-E: the beginning and the end of the line.
            os.write(terminal, f"{typed}\t\x01echo '<\x05>'\n".encode())
            before = len(shown)
            # What is typed is echoed with the quotation marks around it.
            while not re.search(r"(?m)^<[^'\r\n]*>", shown[before:]):
                shown += os.read(terminal, 4096).decode(errors="replace")
            line = re.search(r"(?m)^<([^'\r\n]*)>", shown[before:])[1]
            assert line.rstrip() == expected, shown
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(terminal)
