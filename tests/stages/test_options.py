"""The options of the command line: their table, the help texts, `config`, and old names."""

import inspect
import types
import typing
from dataclasses import MISSING, fields

import pytest
import yaml
from transformers import TrainingArguments

from onetrunk import PPOConfig, cli
from onetrunk.stages.options import help as helping
from onetrunk.stages.options.table import load_options, shown_options
from onetrunk.utils.versions import RENAMED
from onetrunk.verbs import VERBS
from tests.stages.recipes import PARSERS

NEEDED = ["--model_name_or_path", "m", "--dataset_name", "d", "--output_dir", "o"]
MORE = {"ppo": ["--reward_funcs", "r.f"], "distill": ["--teacher", "t"]}


def fields_of(verb):
    """The fields of a verb's settings classes as they are when imported, by name."""
    classes = PARSERS[verb].keywords["dataclass_types"]
    hints = {name: hint for kind in classes for name, hint in typing.get_type_hints(kind).items()}
    return {field.name: (field, hints[field.name]) for kind in classes for field in fields(kind) if field.init}


def plain_types(hint):
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return set().union(*(plain_types(part) for part in typing.get_args(hint)))
    plain = typing.get_origin(hint) or hint
    name = {type(None): "NoneType", typing.Any: "Any"}.get(plain) or getattr(plain, "__name__", "")
    return {name} if name in ("NoneType", "Any", "bool", "int", "float", "list", "dict") else {"str"}


@pytest.mark.parametrize("verb", PARSERS)
def test_the_table_read_from_the_source_equals_the_imported_classes(verb):
    options, imported = load_options(verb), fields_of(verb)
    assert set(options) == set(imported)
    for name, (field, hint) in imported.items():
        default = field.default_factory() if field.default is MISSING else field.default
        default = getattr(default, "value", default)
        option = options[name]
        assert option.default == default or (default, option.default) == ("", []), name
        assert option.kinds == plain_types(hint), name
        assert option.help == " ".join(field.metadata.get("help", "").replace("%%", "%").split()), name
        assert option.help or option.rejected, name
        assert not option.choices or [*option.choices] == [*field.metadata.get("choices", option.choices)], name


@pytest.mark.parametrize("verb", PARSERS)
def test_the_options_that_are_explained_first_exist(verb):
    assert set(VERBS[verb].explained.split()) <= {option.name for option in shown_options(verb)}


@pytest.mark.parametrize("verb", PARSERS)
def test_the_printed_config_loads_as_it_is_and_with_every_line_in_use(tmp_path, capsys, verb):
    assert cli.main(["config", verb]) == 0
    text = capsys.readouterr().out
    written = [line for line in text.splitlines() if line[:1] == "#" and line[1:2] not in ("", " ")]
    shown = shown_options(verb)
    assert len(written) == len(shown) - len(VERBS[verb].needed)
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
    short, whole = (helping.help_text("ppo", topic) for topic in ("", "all"))
    assert len(short.splitlines()) < 130 and len(whole.splitlines()) > 400
    for text in (short, whole):
        assert "--config FILE" in text and "--resume auto" in text
        for hidden in ("dataloader_num_workers", "use_liger_kernel", "gradient_checkpointing"):
            assert hidden not in text
    assert "[0.05]" in short and "--rollout_batch_size" in short and "--adam_beta1" not in short
    assert " adam_beta1 " in short and "--adam_beta1" in whole


def test_help_explains_an_option_or_all_with_a_word_in_their_names(capsys):
    assert cli.main(["ppo", "--help", "kl"]) == 0
    text = capsys.readouterr().out
    assert "--kl_target" in text and "--kl_estimator" in text and "--learning_rate" not in text
    assert cli.main(["ppo", "--help", "epsilon"]) == 0 and "--epsilon_high" not in capsys.readouterr().out
    assert cli.main(["ppo", "--help", "learning_raet"]) == 2
    assert "did you mean 'learning_rate'?" in capsys.readouterr().err


@pytest.mark.parametrize(("verb", "value"), [("sft", "true"), ("ppo", "false")])
def test_both_names_of_checkpointing_mean_the_same_in_every_stage(tmp_path, verb, value):
    (old, new), (old_kwargs, new_kwargs) = RENAMED.items()
    config = tmp_path / "run.yaml"
    config.write_text(f"{old}: {value}\n{old_kwargs}: {{use_reentrant: false}}\n")
    words = [*NEEDED, *MORE.get(verb, [])]
    by_file = PARSERS[verb]([*words, "--config", str(config)])[1]
    by_word = PARSERS[verb]([*words, f"--{old.replace('_', '-')}", value])[1]
    for args in (by_file, by_word):
        assert getattr(args, new) is (value == "true")
    assert getattr(by_file, new_kwargs) == {"use_reentrant": False}


def test_two_names_of_one_setting_are_not_both_taken(tmp_path, capsys):
    config = tmp_path / "run.yaml"
    (old, new), (old_kwargs, new_kwargs) = RENAMED.items()
    config.write_text(f"{old}: true\n{new}: false\n")
    assert cli.main(["ppo", *NEEDED, *MORE["ppo"], "--config", str(config)]) == 2
    assert f"are the same setting; keep {new}" in capsys.readouterr().err
    names = {f"{word}_checkpointing" for word in ("activation", "gradient")}
    assert {old, new} == names and {old_kwargs, new_kwargs} == {f"{name}_kwargs" for name in names}
    # Those of the installed transformers.
    assert {new, new_kwargs} <= TrainingArguments.__dataclass_fields__.keys()


def test_ppo_config_takes_the_old_name_and_has_a_signature_and_a_line_per_field():
    with pytest.warns(FutureWarning, match="gradient_checkpointing"):
        assert PPOConfig(output_dir="unused", use_cpu=True, gradient_checkpointing=True).activation_checkpointing
    parameters = inspect.signature(PPOConfig).parameters
    assert parameters["beta"].default == 0.05 and "args" not in parameters
    assert "        beta: Coefficient of the KL to the reference" in PPOConfig.__doc__
    assert "Raises:\n        ValueError" in PPOConfig.__doc__
