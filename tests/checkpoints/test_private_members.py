"""What we use of the private members of transformers' Trainer and TRL's trainers: pinned here, used in one file only.

If a test fails after an update of transformers or trl, compare the new version with the one file, FILE, and mend that.
Then change the pins here and the upper bounds in pyproject.toml.
"""

import ast
import inspect
import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from transformers import Trainer
from trl import RewardTrainer, SFTTrainer

ROOT = Path(__file__).parents[2]
FILE = "src/onetrunk/checkpoints/resumable_trainer.py"
MEND = f"; the one file to mend is {FILE}, then the pins in tests/checkpoints/test_private_members.py"

# Overridden, or called with a private argument.
METHODS = {
    "_get_grad_norm": "(self, model, grad_norm=None)",
    "_get_output_dir": "(self, trial)",
    "_get_train_sampler": "(self, train_dataset=None)",
    "_load_best_model": "(self)",
    "_load_from_checkpoint": "(self, resume_from_checkpoint, model=None)",
    "_load_rng_state": "(self, checkpoint)",
    "_maybe_log_save_evaluate": (
        "(self, tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate=None)"
    ),
    "_move_model_to_device": "(self, model, device)",
    "_prepare_for_training": "(self, max_steps, train_dataloader, resume_from_checkpoint)",
    "_push_from_checkpoint": "(self, checkpoint_folder)",
    "_save": "(self, output_dir=None, state_dict=None)",
    "_save_checkpoint": "(self, model, trial)",
    "_save_rng_state": "(self, output_dir)",
    "save_model": "(self, output_dir=None, _internal_call=False)",
}
# Of TRL's SFTTrainer, called with these arguments.
SFT_METHODS = {"_prepare_dataset": "(self, dataset, processing_class, args, packing, formatting_func, dataset_name)"}
# Read or set; each class assigns it itself or inherits it.
ATTRIBUTES = {
    "_globalstep_last_logged": (Trainer,),
    "_total_loss_scalar": (Trainer,),
    "_tr_loss": (Trainer,),
    "_metrics": (SFTTrainer, RewardTrainer),
    "_total_train_tokens": (SFTTrainer, RewardTrainer),
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def set_on_self(tree: ast.AST) -> set[str]:
    """Return the private attributes that are assigned to `self` in a source text."""
    targets = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return {node.attr for node in targets if ast.unparse(node.value) == "self" and is_private(node.attr)}


def source_tree(cls: type) -> ast.AST:
    return ast.parse(inspect.getsource(cls))


# Everything private that transformers or TRL has in a trainer: methods, and attributes set on `self`.
PRIVATE = {
    name
    for trainer in (SFTTrainer, RewardTrainer)
    for cls in trainer.__mro__[:-1]
    if cls.__module__.startswith(("transformers.", "trl."))
    for name in ({n for n in vars(cls) if is_private(n)} | set_on_self(source_tree(cls)))
}


def private_uses(source: str) -> set[str]:
    """Return the members in PRIVATE that a source text overrides in a trainer class, or reads of a trainer."""
    tree, names = ast.parse(source), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Trainer") for base in node.bases):
            names |= {n.name for n in ast.walk(node) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}
            owners = r"self|super\(\)"
        else:
            owners = r"(.*[._])?trainer"
        attributes = (n for n in ast.walk(node) if isinstance(n, ast.Attribute))
        names |= {n.attr for n in attributes if re.fullmatch(owners, ast.unparse(n.value))}
    return names & PRIVATE


@pytest.mark.parametrize("name", [*METHODS, *SFT_METHODS])
def test_an_overridden_method_has_the_pinned_signature(name):
    method = getattr(SFTTrainer if name in SFT_METHODS else Trainer, name, None)
    assert method is not None, f"Trainer.{name} does not exist in transformers {version('transformers')}{MEND}"
    signature = inspect.signature(method)
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    written = str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    message = f"Trainer.{name} has another signature in transformers {version('transformers')}{MEND}"
    assert written == {**METHODS, **SFT_METHODS}[name], message


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_that_is_read_exists(name):
    for cls in ATTRIBUTES[name]:
        assert name in set_on_self(source_tree(cls)), f"{cls.__name__} does not set {name} any more{MEND}"


def test_the_pins_are_all_that_the_one_file_uses():
    pinned = {name for name in (*METHODS, *SFT_METHODS, *ATTRIBUTES) if is_private(name)}
    assert private_uses((ROOT / FILE).read_text()) == pinned


def test_no_other_file_uses_a_private_member_of_a_trainer():
    for path in sorted(ROOT.glob("src/onetrunk/**/*.py")):
        uses = private_uses(path.read_text()) if path != ROOT / FILE else None
        assert not uses, f"{path} uses {', '.join(sorted(uses))} of Trainer; only {FILE} may: add a public hook there"


def test_a_private_use_is_caught_and_members_of_our_own_pass():
    for source in (
        "class T(ResumableTrainer):\n    def _save(self): ...",
        "class T(Trainer):\n    def f(self): return self._tr_loss",
        "def f(trainer): trainer._globalstep_last_logged = 0",
    ):
        assert private_uses(source)
    assert not private_uses("class T(Trainer):\n    def _of_ours(self): return self._step")
    assert not private_uses("class C:\n    def _save(self): self._metrics = 1")


@pytest.mark.parametrize("package", ["transformers", "trl"])
def test_the_installed_version_is_within_the_bounds(package):
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (bounds,) = [Requirement(d).specifier for d in dependencies if Requirement(d).name == package]
    assert {bound.operator for bound in bounds} == {">=", "<"}, f"{package} needs a lower and an upper bound"
    assert version(package) in bounds, f"{package} {version(package)} is not in {bounds}{MEND}"
