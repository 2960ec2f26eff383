"""The rules of the house: floors, sizes, docstrings, no private imports, `print` only where a person reads it.

`problems` judges one source text, so that the tests below can also show that it catches what it should.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import onetrunk.rewards
import onetrunk.rollouts
from tests.processes import python

SOURCE = Path(__file__).parents[1] / "src"
FILES = sorted((SOURCE / "onetrunk").rglob("*.py"))

# A room is a folder or a file, also a file inside the folder of another room.
WINGS = {
    "core": "types utils costs servers rewards.specs data ops models parallel rollouts rewards checkpoints"
    " reward_models ppo",
    "rlaif": "judges feedback rewards.judge",
    "plan": "plan",
    "command": "verbs report stages cli __main__",
}
WING_OF = {room: wing for wing, rooms in WINGS.items() for room in rooms.split()}
# Wings or rooms of the core that a wing imports besides itself.
WINGS_BELOW = {
    "core": set(),
    "rlaif": {"core"},
    "plan": {"costs", "utils", "rewards.specs"},
    "command": {"core", "rlaif", "plan"},
}
# From the lowest floor on; a file imports from its own room or from floors below.
ROOMS_OF_FLOORS = (
    "utils types", "costs servers rewards.specs", "ops data plan", "models", "parallel", "rollouts", "rewards",
    "checkpoints", "reward_models", "ppo", "judges", "rewards.judge feedback verbs", "report", "stages", "cli",
    "__main__",
)  # fmt: skip
FLOORS = {room: floor for floor, rooms in enumerate(ROOMS_OF_FLOORS) for room in rooms.split()}
LATE = {package.__name__: package._HOMES for package in (onetrunk.rewards, onetrunk.rollouts)}
HUGGING_FACE = set("transformers peft trl accelerate datasets huggingface_hub tokenizers safetensors".split())
# Their authors call these unstable.
UNSTABLE = ("trl.trainer.utils", "trl.experimental", "trl.kernels", "trl.generation")
MAY_PRINT = {"cli", "stages"}
MAX_FUNCTION_LINES = 60


def module_name(path: Path) -> str:
    """Return the dotted name of a file under src; a package's `__init__.py` is the package."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(name: str) -> str:
    """Return the room of a dotted name of ours, "" for the package itself."""
    _, *parts = name.split(".")
    file = ".".join(parts[:2])
    return file if file in FLOORS else "".join(parts[:1])


def home_of(name: str) -> str:
    """Return the full name of what a package of ours imports when it is first used; any other name unchanged."""
    package, _, last = name.rpartition(".")
    homes = LATE.get(package, {})
    return f"{package}.{homes[last]}.{last}" if last in homes else name


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yield line and full dotted name of all that is imported: at the top, inside functions, or by a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join([*parents, base] if base else parents)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from ((node.lineno, a.value) for a in node.args if isinstance(a, ast.Constant) and a.value)


def floor_problem(room: str, name: str) -> str | None:
    """Return what is wrong with a file of `room` importing `name` of ours, by wings and floors."""
    other = room_of(home_of(name))
    if other == room:
        return None
    if other not in FLOORS:
        return f"imports {name}: {other or 'the package itself'} is on no floor; import from the file that defines it"
    wing, other_wing = WING_OF[room], WING_OF[other]
    if wing != other_wing and not {other_wing, other} & WINGS_BELOW[wing]:
        return f"imports {name}: {wing} may import {', '.join(sorted(WINGS_BELOW[wing])) or 'no other wing'}"
    if FLOORS[other] >= FLOORS[room]:
        return f"imports {name}: {room} is on floor {FLOORS[room]}, {other} on floor {FLOORS[other]}"
    return None


def outside_problem(room: str, name: str) -> str | None:
    """Return what is wrong with a file of `room` importing `name` of another distribution."""
    parts = name.split(".")
    if room == "ops" and parts[0] in HUGGING_FACE:
        return f"imports {name}: ops is pure torch"
    if f"{name}.".startswith(tuple(f"{package}." for package in UNSTABLE)):
        return f"imports {name}, which is not stable"
    if parts[0] != "__future__" and any(re.match(r"_(?!_)", part) for part in parts):
        return f"imports {name}, which is private"
    return None


def import_problems(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    room = room_of(module)
    if room not in FLOORS:
        yield f"{room} is on no floor; give it one in {Path(__file__).name}"
        return
    for line, name in imports(tree, module, is_package):
        ours = name.split(".")[0] == "onetrunk"
        problem = floor_problem(room, name) if ours else outside_problem(room, name)
        if problem:
            yield f"line {line} {problem}"


def shape_problems(tree: ast.Module, source: str, room: str) -> Iterator[str]:
    if not (ast.get_docstring(tree) or "").strip():
        yield "has no module docstring"
    names = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    for name in {name for name in names if names.count(name) > 1}:
        yield f"defines {name} twice"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"line {node.lineno} {node.name} has {length} lines; at most {MAX_FUNCTION_LINES}"
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in UNSTABLE:
            yield f"line {node.lineno} reads {ast.unparse(node)}, which is not stable"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and room not in MAY_PRINT:
            yield f"line {node.lineno} prints; log instead"


def problems(source: str, module: str, is_package: bool = False) -> list[str]:
    """Return what is wrong with the source text of `module`, such as "onetrunk.ops.losses"."""
    tree = ast.parse(source)
    room = room_of(module)
    found = list(shape_problems(tree, source, room))
    # The package's __init__ may name everything: it imports a name when it is first used.
    return found + (list(import_problems(tree, module, is_package)) if room else [])


def test_every_file_keeps_the_house_rules():
    assert WING_OF.keys() == FLOORS.keys()
    found = {module_name(p): problems(p.read_text(), module_name(p), p.name == "__init__.py") for p in FILES}
    assert {module: faults for module, faults in found.items() if faults} == {}


def test_importing_the_package_loads_neither_torch_nor_a_room_but_that_of_helpers():
    code = "import sys, onetrunk; print(*[m for m in sys.modules if m == 'torch' or m.startswith('onetrunk.')])"
    assert python("-c", code).stdout.split() == ["onetrunk.utils", "onetrunk.utils.startup"]


def test_every_public_name_is_listed_and_an_unknown_one_says_what_there_is():
    assert set(onetrunk.__all__) <= set(dir(onetrunk))
    assert set(onetrunk.__all__) == {*onetrunk._HOMES, "__version__"}
    with pytest.raises(AttributeError, match="PPOTrainer"):
        _ = onetrunk.Trainer


GOOD = '"""One room."""\n'


@pytest.mark.parametrize(
    ("module", "line"),
    [
        # From another wing, a floor above or the same floor.
        ("onetrunk.ops.losses", "from ..models import base"),
        ("onetrunk.types", "from onetrunk.utils.files import read_json"),
        ("onetrunk.ppo.trainer", "from onetrunk.stages.ppo import main"),
        ("onetrunk.stages.ppo", "from onetrunk.cli import main"),
        ("onetrunk.stages.ppo", "from onetrunk import PPOTrainer"),
        ("onetrunk.ppo.setup", "from onetrunk.judges.judge import Judge"),
        ("onetrunk.ppo.setup", "from onetrunk.rewards import JudgeReward"),
        ("onetrunk.rewards.combine", "from onetrunk.rewards.judge import JudgeReward"),
        ("onetrunk.reward_models.distill", "from onetrunk.plan.job import Job"),
        ("onetrunk.feedback.asking", "from onetrunk.plan.job import Job"),
        ("onetrunk.plan.search", "from onetrunk.types import Pack"),
        # The other rules.
        ("onetrunk.ops.losses", "import transformers"),
        ("onetrunk.ppo.trainer", "from trl.trainer.utils import pad"),
        ("onetrunk.ppo.trainer", "import trl\ntrl.trainer.utils.pad"),
        ("onetrunk.ppo.trainer", "from transformers.trainer import _private"),
        ("onetrunk.ops.losses", "from torch.utils._pytree import tree_map"),
        ("onetrunk.ppo.trainer", "def f():\n    print(1)"),
        ("onetrunk.attic.box", ""),
        ("onetrunk.ops.losses", "def f(x): ...\ndef g(): ...\ndef f(): ..."),
        ("onetrunk.ops.losses", "def f():\n" + "    x = 1\n" * 60),
        ("onetrunk.ops.losses", "class C:\n    async def f(self):\n" + "        x = 1\n" * 60),
    ],
)
def test_each_rule_catches_its_violation(module, line):
    assert len(problems(GOOD + line, module)) == 1


@pytest.mark.parametrize(("module", "source"), [("onetrunk.ops.losses", "x = 1\n"), ("onetrunk", "")])
def test_a_file_without_a_docstring_is_caught(module, source):
    assert len(problems(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("onetrunk.ops.losses", "from onetrunk.types import Pack"),
        ("onetrunk.ops.losses", "from __future__ import annotations"),
        ("onetrunk.ppo.trainer", "from onetrunk.models import base"),
        ("onetrunk.ppo.trainer", "from transformers import Trainer\nimport trl\ntrl.SFTTrainer"),
        ("onetrunk.rewards.judge", "from onetrunk.judges.judge import Judge"),
        ("onetrunk.plan.search", "from onetrunk.costs import ModelShape"),
        ("onetrunk.stages.plan", "from onetrunk.plan.search import Plan"),
        ("onetrunk.cli", "from onetrunk.stages import ppo\nprint(1)"),
        ("onetrunk.ops.losses", "def f():\n" + "    x = 1\n" * 59),
    ],
)
def test_what_is_allowed_passes(module, line):
    assert problems(GOOD + line, module) == []


def test_relative_imports_in_a_package_are_resolved_from_the_package():
    assert problems(GOOD + "from .losses import f", "onetrunk.ops", is_package=True) == []
    assert len(problems(GOOD + "from ..models import f", "onetrunk.ops", is_package=True)) == 1


def imported_modules() -> dict[str, set[str]]:
    """Return the modules of ours that each module imports, for types alone too."""
    names = {module_name(path): path for path in FILES}
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        found = {full for _, full in imports(ast.parse(path.read_text()), name, path.name == "__init__.py")}
        graph[name] = {full if full in names else full.rpartition(".")[0] for full in found} & names.keys() - {name}
    return graph


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return modules that import each other in a circle, or nothing."""
    # Whatever imports nothing that is left cannot be part of a circle.
    left = {name: set(others) for name, others in graph.items()}
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    return sorted(left)


def test_no_modules_import_each_other_in_a_circle():
    graph = imported_modules()
    assert len(graph) > 100 and graph["onetrunk.ppo.trainer"] > {"onetrunk.ppo.config"}
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": set()}) == ["a", "b", "c"]
    assert circle(graph) == []
