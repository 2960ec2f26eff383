"""Every YAML under recipes/ and every command in a document is one that the parsers take."""

import pytest
from accelerate.commands.launch import launch_command_parser

from onetrunk.stages.launch import config_file, split_words
from onetrunk.stages.options.reading import DRY_RUN
from onetrunk.stages.pipeline import load_pipeline
from onetrunk.verbs import VERBS
from tests.stages.recipes import DOCUMENTS, PARSERS, RECIPES, ROOT, SCRIPTS, commands_of

VERB_OF_SCRIPT = {{"eval": "evaluate"}.get(name, name): name for name, verb in VERBS.items() if verb.launches}
pytestmark = pytest.mark.usefixtures("at_the_root")
# Files that are no recipe of one verb.
OTHERS = ("constitution", "pipeline")
STAGES = [path for path in RECIPES if path.stem.split("_")[0] not in OTHERS]


def relative(path):
    return str(path.relative_to(ROOT))


def test_every_script_is_of_a_verb_that_launches():
    assert {path.stem for path in SCRIPTS} <= set(VERB_OF_SCRIPT)


@pytest.mark.parametrize("path", [path for path in RECIPES if path.stem == "pipeline"], ids=relative)
def test_every_pipeline_names_stages_that_parse(path):
    assert len(load_pipeline(relative(path)).stages) > 1


@pytest.mark.parametrize("path", STAGES, ids=relative)
def test_every_recipe_parses(path):
    verb = path.stem.split("_")[0]
    args = PARSERS[verb](["--config", relative(path)])
    assert any(getattr(part, "output_dir", "").startswith("runs/") for part in args)


def check_command(words):
    """Raise where a command of a document would not be taken."""
    if words[0] == "onetrunk":
        if words[1] in VERBS and "--help" not in words:
            launch, rest = split_words(words[1], words[2:])
            config_file(launch.get("accelerate_config", "ddp"))
            VERBS[words[1]].parser([word for word in rest if word not in DRY_RUN])
        else:
            assert words[1] in (*VERBS, "--help", "--version", "VERB"), words
    elif words[0] == "accelerate":
        assert words[1] == "launch", words
        launch = launch_command_parser().parse_args(words[2:])
        assert (ROOT / launch.config_file).is_file(), launch.config_file
        script = (ROOT / launch.training_script).resolve()
        assert script.is_file(), script
        rest = [word for word in launch.training_script_args if word != "..."]
        if rest:
            VERBS[VERB_OF_SCRIPT[script.stem]].parser(rest)
    elif words[0] == "python" and not words[1].startswith("-"):
        assert (ROOT / words[1]).is_file(), words[1]
    elif words[0] == "make":
        targets = [word for word in words[1:] if "=" not in word]
        makefile = (ROOT / "Makefile").read_text()
        assert all(f"\n{target}: " in makefile for target in targets), targets


WITH_COMMANDS = [path for path in (*DOCUMENTS, *SCRIPTS) if commands_of(path.read_text())]
assert len(WITH_COMMANDS) > 30


@pytest.mark.parametrize("path", WITH_COMMANDS, ids=relative)
def test_every_command_in_a_document_is_taken(path):
    for words in commands_of(path.read_text()):
        check_command(words)
