"""The measures of the house: the step on one screen, no mode in it, few frames and few files around it."""

import inspect
import re
import traceback
from pathlib import Path

import pytest

from onetrunk import cli
from onetrunk.ops import losses
from onetrunk.ppo.experience import ExperienceStream
from onetrunk.ppo.trainer import PPOTrainer
from tests.processes import python
from tests.stages.small_runs import make_material
from tests.test_floors import WING_OF, room_of
from tests.test_foreign_internals import PATCHES, identifiers

PACKAGE = Path(__file__).parents[1] / "src/onetrunk"
# Which layout, sampler or schedule runs is hidden by parallel/ and by a RolloutSource.
LAYOUT_WORDS = {"is_divided", "is_sharded", "staged", "group_size"}
MODE_WORDS = {*LAYOUT_WORDS, "isinstance", "hasattr", "getattr", "schedule", "rollout_backend", "use_vllm", "ahead"}
# cli.main, ppo.main, run_stage, ppo.run, ResumableTrainer.train, training_step, compute_loss, ppo_loss, policy_loss.
MOST_FRAMES = 9
MOST_IMPORTED_FILES = 84


def code_of(function: object) -> str:
    """Return the source of a method, without the indentation of its class."""
    return inspect.cleandoc("\n" + inspect.getsource(function))


def test_a_rollout_is_made_on_one_screen_and_shows_no_mode():
    source = code_of(ExperienceStream.make_rollout)
    assert len(source.splitlines()) <= 25
    assert not identifiers(source) & MODE_WORDS


def test_the_optimizer_step_and_its_loss_are_short_and_say_their_coefficients():
    assert len(code_of(PPOTrainer.training_step).splitlines()) <= 30
    source = code_of(PPOTrainer.compute_loss)
    assert len(source.splitlines()) <= 45 and "getattr" not in identifiers(source)
    for name in ("epsilon", "epsilon_high", "dual_clip", "entropy_coef", "kl_estimator"):
        assert f"{name}=args.{name}" in source


def test_ppo_knows_no_layout():
    found = {path.name: identifiers(path.read_text()) & LAYOUT_WORDS for path in (PACKAGE / "ppo").rglob("*.py")}
    assert {name: words for name, words in found.items() if words} == {}


def test_few_frames_of_ours_lie_between_the_command_and_the_ratio(tmp_path, monkeypatch):
    stacks = []

    def recording(*args, **kwargs):
        stacks.append([frame.filename for frame in traceback.extract_stack()[:-1]])
        return policy_loss(*args, **kwargs)

    policy_loss = losses.policy_loss
    monkeypatch.setattr(losses, "policy_loss", recording)
    make_material(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = "--model_name_or_path base --dataset_name prompts.jsonl --output_dir out --reward_funcs reward.py:short"
    words += " --rollout_batch_size 2 --num_rollouts 1 --num_ppo_epochs 1 --max_completion_length 4 --lora_r 2"
    words += " --use_cpu true --report_to none --disable_tqdm true --check_memory false"
    assert cli.main(["ppo", *words.split()]) == 0
    assert max(sum(str(PACKAGE) in filename for filename in stack) for stack in stacks) + 1 <= MOST_FRAMES


@pytest.mark.slow
def test_a_trainer_imports_few_files_all_of_the_core_and_replaces_nothing_in_another_library():
    names = [internal.name for internal in PATCHES if internal.library != "vllm"]
    code = f"""
import sys
from pkgutil import resolve_name
import onetrunk
assert "transformers" not in sys.modules
from onetrunk import PPOTrainer
print(*(name for name in sys.modules if name.startswith("onetrunk")))
print(*(resolve_name(name).__module__ for name in {names}))
"""
    modules, holders = map(str.split, python("-c", code).stdout.splitlines())
    assert len(modules) <= MOST_IMPORTED_FILES
    assert {WING_OF[room_of(module)] for module in modules if module != "onetrunk"} == {"core"}
    assert "onetrunk.models.speedups.token_grid" in modules and len(holders) == len(names)
    assert not [holder for holder in holders if holder.startswith("onetrunk")]


def test_the_readme_of_ppo_answers_questions_by_symbols_that_exist():
    text = (PACKAGE / "ppo/README.md").read_text()
    answers = [line for line in text.splitlines() if line.startswith("| Where ")]
    assert len(answers) == 7
    for answer in answers:
        for path, symbol in re.findall(r"`(\w+/\w+\.py)`, `([\w.]+)`", answer):
            names = identifiers((PACKAGE / path).read_text())
            assert set(symbol.split(".")) <= names, f"{symbol} is not in {path}"
        assert re.search(r"`\w+/\w+\.py`, `[\w.]+`", answer)
