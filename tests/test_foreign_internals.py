"""Every private member of another library that src uses, and every function of one that it replaces: `INTERNALS`.

If a test fails after an update of a library, compare the new version with the file of ours that the message names, and
mend that. Then change the entry here, and the upper bound in pyproject.toml.
"""

import ast
import functools
import inspect
import sys
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import NamedTuple

import pytest
import torch
from trl import RewardTrainer, SFTTrainer

from tests.processes import ROOT, environment, finished
from tests.rollouts.vllm_environment import vllm_python

PACKAGE = ROOT / "src/onetrunk"
# Public, although they begin with an underscore.
OF_NAMED_TUPLES = {"_asdict", "_field_defaults", "_fields", "_make", "_replace"}


class Internal(NamedTuple):
    """A member of another library that may change without notice.

    Args:
        name: "module:name", for an attribute of objects "module:Class.name".
        files: those of ours that use it, without the package.
        reason: what for.
        signature: without annotations; None for what cannot be called or has none.
        read_by: of a function that we replace, the function that has to find our replacement.
    """

    name: str
    files: str
    reason: str
    signature: str | None = None
    read_by: str | None = None

    @property
    def library(self) -> str:
        return self.name.partition(":")[0].partition(".")[0]

    @property
    def used_name(self) -> str:
        """The last private part of the name; the last part, if none is private."""
        parts = self.name.partition(":")[2].split(".")
        return next((part for part in reversed(parts) if is_private(part)), parts[-1])


TRAINER, TRL = "checkpoints/resumable_trainer.py", "checkpoints/trl_trainers.py"
SHARDING, MERGED, TENSOR = "parallel/sharding.py", "models/speedups/merged.py", "parallel/tensor.py"
FUSED, GRID, DECODING = "models/speedups/fused_lora.py", "models/speedups/token_grid.py", "rollouts/decoding.py"
CACHE, LORA, GPU_WORKER = "transformers.cache_utils", "peft.tuners.lora:Linear", "vllm.v1.worker.gpu_worker"
INTERNALS = (
    # transformers' Trainer, and TRL's.
    *(
        Internal(f"transformers:Trainer.{name}", TRAINER, reason, signature)
        for name, reason, signature in (
            ("_determine_best_metric", "saves where a callback ends the run", "(self, metrics, trial)"),
            ("_get_grad_norm", "calls on_grad_norm", "(self, model, grad_norm=None)"),
            ("_get_output_dir", "writes into a staging folder", "(self, trial)"),
            ("_get_train_sampler", "reads sharded rows in blocks", "(self, train_dataset=None)"),
            ("_load_best_model", "loads branches and heads", "(self)"),
            ("_load_from_checkpoint", "loads branches and heads", "(self, resume_from_checkpoint, model=None)"),
            ("_evaluate", "skips eval_on_start where a run resumes",
             "(self, trial, ignore_keys_for_eval, skip_scheduler=False)"),
            ("_load_rng_state", "restores the state of the loop", "(self, checkpoint)"),
            ("_maybe_log_save_evaluate", "saves after the log, and stops at a signal",
             "(self, tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate=None)"),
            ("_move_model_to_device", "keeps what will be sharded on the CPU", "(self, model, device)"),
            ("_prepare_for_training", "wraps a sharded base in DDP",
             "(self, max_steps, train_dataloader, resume_from_checkpoint)"),
            ("_push_from_checkpoint", "pushes what is published", "(self, checkpoint_folder)"),
            ("_save", "adds branches and marks of the base", "(self, output_dir=None, state_dict=None)"),
            ("_save_checkpoint", "publishes whole checkpoints only", "(self, model, trial)"),
            ("_save_rng_state", "saves the state of the loop", "(self, output_dir)"),
            ("save_model", "never pushes from inside", "(self, output_dir=None, _internal_call=False)"),
            ("_globalstep_last_logged", "exact resume", None),
            ("_total_loss_scalar", "exact resume", None),
            ("_tr_loss", "exact resume", None),
        )
    ),
    Internal("trl:SFTTrainer._prepare_dataset", TRL, "tokenizes streamed rows",
             "(self, dataset, processing_class, args, packing, formatting_func, dataset_name)"),
    *(
        Internal(f"trl:{trainer}.{name}", TRL, "exact resume of TRL's counters")
        for trainer in ("SFTTrainer", "RewardTrainer")
        for name in ("_metrics", "_total_train_tokens")
    ),
    # transformers' models.
    Internal("transformers.masking_utils:find_packed_sequence_indices", GRID,
             "replaced: who packs the rows knows it, and a look waits for the GPU", "(position_ids)",
             "transformers.masking_utils:_preprocess_mask_arguments"),
    Internal("transformers.masking_utils:_ignore_causal_mask_sdpa", GRID,
             "replaced: who pads the rows knows it, and a look waits for the GPU",
             "(padding_mask, q_length, kv_length, q_offset, kv_offset, local_attention_size=None)",
             "transformers.masking_utils:sdpa_mask"),
    Internal("transformers.core_model_loading:_materialize_copy", SHARDING,
             "replaced: a weight that will be sharded is cast later", "(tensor, device=None, dtype=None)",
             "transformers.core_model_loading:spawn_materialize"),
    Internal("transformers:PreTrainedConfig._attn_implementation", "models/trunk.py", "is named in an error message"),
    *(
        Internal(f"{CACHE}:{name}", DECODING, "rows join and leave a batch while it decodes")
        for name in (
            "DynamicLayer.keys", "DynamicLayer.values", "DynamicLayer.is_initialized",
            "DynamicSlidingWindowLayer.cumulative_length", "LinearAttentionCacheLayerMixin.conv_states",
            "LinearAttentionCacheLayerMixin.recurrent_states",
        )
    ),
    # PEFT.
    Internal(f"{LORA}.forward", f"{FUSED} {TENSOR}",
             "replaced on each layer: one operation, or one for a divided matrix", "(self, x, *args, **kwargs)"),
    Internal(f"{LORA}.lora_A", f"{FUSED} {TENSOR} {MERGED}", "the layer's math is ours"),
    Internal(f"{LORA}.lora_B", f"{FUSED} {TENSOR} {MERGED}", "the layer's math is ours"),
    Internal(f"{LORA}.scaling", f"{FUSED} {TENSOR} {MERGED}", "the layer's math is ours"),
    Internal(f"{LORA}.lora_dropout", f"{FUSED} {TENSOR}", "the layer's math is ours"),
    Internal(f"{LORA}.lora_variant", f"{FUSED} {TENSOR} {MERGED}", "layers with other math are left to PEFT"),
    Internal(f"{LORA}.lora_bias", f"{FUSED} {MERGED}", "layers with other math are left to PEFT"),
    Internal(f"{LORA}.get_delta_weight", MERGED, "the update that is added to a weight", "(self, adapter)"),
    Internal("peft.tuners.tuners_utils:check_target_module_exists", "models/adapters.py",
             "matches a config's expressions before PEFT does", "(config, key)"),
    Internal("peft.utils.other:get_pattern_key", "models/adapters.py",
             "matches a config's expressions before PEFT does", "(pattern_keys, key_to_match)"),
    # accelerate.
    Internal("accelerate.accelerator:model_has_dtensor", SHARDING,
             "replaced: DDP ignores the frozen shards, which accelerate rejects on GPUs", "(model)",
             "accelerate:Accelerator.prepare_model"),
    # torch.
    Internal("torch._C:_disabled_torch_function_impl", SHARDING, "a tensor subclass, as torch's manual writes one"),
    Internal("torch:Tensor._make_wrapper_subclass", SHARDING, "a tensor subclass, as torch's manual writes one"),
    Internal("torch._ops:OpOverload._schema", SHARDING, "which arguments an operation writes to"),
    Internal("torch.nn.parallel:DistributedDataParallel._set_params_and_buffers_to_ignore_for_model", SHARDING,
             "frozen weights are not broadcast", "(module, params_and_buffers_to_ignore)"),
    Internal("torch:ops.mkldnn._reorder_linear_weight", MERGED, "packs a weight once, as torch.compile does"),
    Internal("torch:ops.mkldnn._linear_pointwise", MERGED, "multiplies by a packed weight, as torch.compile does"),
    Internal("torch:_foreach_add_", FUSED, "adds several pairs of tensors in one operation, as torch's optimizers do"),
    Internal("torch:Tensor._version", FUSED, "whether a tensor has changed since a layer read it"),
    Internal("torch:_dynamo.config", "rollouts/colocate.py", "vLLM compiles nothing on a CPU"),
    # vLLM and OpenEnv, which few environments have.
    Internal(f"{GPU_WORKER}:Worker._maybe_get_memory_pool_context", "rollouts/colocate.py",
             "replaced: weights that the trainer reads stay while the engine sleeps", "(self, tag)",
             f"{GPU_WORKER}:Worker.load_model"),
    Internal("vllm.v1.engine.llm_engine:LLMEngine.engine_core", "rollouts/colocate.py", "ends the engine"),
    Internal("vllm.v1.engine.core_client:EngineCoreClient.shutdown", "rollouts/colocate.py", "ends the engine",
             "(self, timeout=None)"),
    Internal("openenv.core.env_client:EnvClient._ws", "servers/openenv.py", "a new connection is a new environment"),
)  # fmt: skip
PATCHES = [internal for internal in INTERNALS if internal.read_by]


parsed = functools.cache(ast.parse)


@functools.lru_cache(4)
def nodes_of(tree: ast.AST) -> list[ast.AST]:
    return list(ast.walk(tree))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in OF_NAMED_TUPLES


def set_on_self(tree: ast.AST) -> set[str]:
    """Return the attributes that are assigned to `self` in a source text."""
    targets = (node for node in nodes_of(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return {node.attr for node in targets if ast.unparse(node.value) in ("self", "cls")}


@functools.cache
def members(cls: type) -> frozenset[str]:
    """Return the names that a class of another library has, and those of the attributes of its objects."""
    names: set[str] = set()
    for ancestor in cls.__mro__:
        if ancestor.__module__.partition(".")[0] not in ("onetrunk", "builtins"):
            names |= vars(ancestor).keys() | vars(ancestor).get("__annotations__", {}).keys()
            try:
                names |= set_on_self(ast.parse(inspect.cleandoc("\n" + inspect.getsource(ancestor))))
            except (OSError, TypeError):  # Written in C.
                continue
    return frozenset(names)


def found(name: str) -> object:
    """Return what an entry names, None for an attribute that objects of its class have; AttributeError."""
    module, _, path = name.partition(":")
    owner, _, last = path.rpartition(".")
    holder = resolve_name(f"{module}:{owner}" if owner else module)
    if isinstance(holder, type) and not hasattr(holder, last) and last in members(holder):
        return None
    return getattr(holder, last)


def described(internal: Internal) -> str:
    return f"{internal.name} ({internal.library} {version(internal.library)}), which {internal.files} uses"


def require_library(internal: Internal) -> None:
    if find_spec(internal.library) is None:
        pytest.skip(f"{internal.library} is not installed")
    if "mkldnn" in internal.name and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch is built without oneDNN")


@pytest.mark.parametrize("internal", INTERNALS, ids=lambda internal: internal.name)
def test_an_internal_exists_with_the_signature_that_we_rely_on(internal):
    require_library(internal)
    try:
        member = found(internal.name)
    except (AttributeError, ImportError) as error:
        pytest.fail(f"{described(internal)}, does not exist: {error}")
    if internal.signature is not None:
        signature = inspect.signature(member)
        plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
        written = str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))
        assert written == internal.signature, f"{described(internal)}, has another signature"


@pytest.mark.parametrize("internal", PATCHES, ids=lambda internal: internal.name)
def test_a_function_that_we_replace_is_looked_up_where_we_replace_it(internal):
    require_library(internal)
    source = inspect.getsource(resolve_name(internal.read_by))
    assert f"{internal.used_name}(" in source, f"{internal.read_by} does not call {described(internal)}, any more"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_internals_of_vllm_exist_in_the_environment_of_the_tests_that_has_it():
    # It has no plugins: their options and markers are left out.
    options = ["-o", "addopts=--import-mode=importlib", "-m", "not slow", "-k", "vllm", "-p", "no:cacheprovider"]
    words = [vllm_python(), "-m", "pytest", "-q", *options, __file__]
    done = finished(words, code=None, cwd=ROOT, env=environment())
    number = sum(internal.library == "vllm" for internal in (*INTERNALS, *PATCHES))
    assert f"\n{number} passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-4000:] + done.stderr


# --- what src uses --------------------------------------------------------------------------------------------------


def imported_names(tree: ast.AST) -> dict[str, str]:
    """Return the full name of each name that a source text imports from another library."""
    names: dict[str, str] = {}
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


@functools.cache
def of_trainers() -> set[str]:
    return {name for trainer in (SFTTrainer, RewardTrainer) for name in members(trainer) if is_private(name)}


def inherited(classes: dict[str, ast.ClassDef], definition: ast.ClassDef, names: dict[str, str]) -> set[str]:
    """Return the private members that a class of ours, one of a file's, has from other libraries."""
    private: set[str] = set()
    for base in definition.bases:
        written = ast.unparse(base).partition("[")[0]
        first, _, rest = written.partition(".")
        if written in classes:
            private |= inherited(classes, classes[written], names)
        elif first in names:
            cls = resolve_name(f"{names[first]}.{rest}" if rest else names[first])
            if isinstance(cls, type):
                private |= {name for name in members(cls) if is_private(name)}
            if written.endswith("Trainer"):  # It may be the first base of two.
                private |= of_trainers()
    return private


def uses_of_class(classes: dict[str, ast.ClassDef], definition: ast.ClassDef, names: dict[str, str]) -> set[str]:
    """Return the private members of other libraries that a class of ours overrides or reads from itself."""
    methods = {node.name for node in nodes_of(definition) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    attributes = (node for node in nodes_of(definition) if isinstance(node, ast.Attribute) and is_private(node.attr))
    reads = {node.attr for node in attributes if ast.unparse(node.value) in ("self", "cls", "super()")}
    return (methods | reads) & inherited(classes, definition, names)


# Functions whose second argument names an attribute.
BY_NAME = ("getattr", "hasattr", "setattr", "delattr")


def reads_of_objects(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield (owner, name) for every private attribute and import; of a chain of private names only the last."""
    inner = {id(n.value) for n in nodes_of(tree) if isinstance(n, ast.Attribute) and is_private(n.attr)}
    for node in nodes_of(tree):
        if isinstance(node, ast.Attribute):
            if is_private(node.attr) and id(node) not in inner:
                yield ast.unparse(node.value), node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", None) in BY_NAME:
            if isinstance(node.args[1], ast.Constant):
                yield ast.unparse(node.args[0]), node.args[1].value
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None) or ""
            paths = [f"{module}.{alias.name}" for alias in node.names]
            yield from ((module, part) for path in paths for part in path.split("."))


def replaced(tree: ast.Module, names: dict[str, str]) -> set[str]:
    """Return the names that are set on modules and classes of other libraries."""
    stored = set()
    for node in nodes_of(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            owner = names.get(ast.unparse(node.value).partition(".")[0], "onetrunk").partition(".")[0]
            if owner != "onetrunk" and owner not in sys.stdlib_module_names:
                stored.add(node.attr)
    return stored


def foreign_uses(source: str) -> set[str]:
    """Return the private members of other libraries that a source text uses, and what it replaces in them."""
    tree = parsed(source)
    names = imported_names(tree)
    definitions = [node for node in nodes_of(tree) if isinstance(node, ast.ClassDef)]
    classes = {definition.name: definition for definition in definitions}
    uses = set().union(*(uses_of_class(classes, definition, names) for definition in definitions))
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    ours = {node.name for node in nodes_of(tree) if isinstance(node, defined)} | set_on_self(tree)
    for owner, name in reads_of_objects(tree):
        of_trainer = owner.endswith("trainer") and name in of_trainers()
        if is_private(name) and owner not in ("self", "cls", "super()") and (of_trainer or name not in ours):
            uses.add(name)
    return uses | replaced(tree, names)


def identifiers(source: str) -> set[str]:
    """Return the names, attributes, arguments and definitions of a source text; not its words and module paths."""
    fields = ("id", "attr", "arg", "name", "asname")
    return {getattr(node, field) for node in nodes_of(parsed(source)) for field in fields if hasattr(node, field)}


def texts(source: str) -> set[str]:
    nodes = nodes_of(parsed(source))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_the_list_is_what_src_uses():
    unlisted, unused = {}, {}
    for path in sorted(PACKAGE.rglob("*.py")):
        file, source = str(path.relative_to(PACKAGE)), path.read_text()
        listed = {internal.used_name for internal in INTERNALS if file in internal.files.split()}
        unlisted[file], unused[file] = foreign_uses(source) - listed, listed - identifiers(source) - texts(source)
    assert {file: names for file, names in unlisted.items() if names} == {}, "find a public way, or add to INTERNALS"
    assert {file: names for file, names in unused.items() if names} == {}, "not used any more; delete from INTERNALS"
    files = {file for internal in INTERNALS for file in internal.files.split()}
    assert files <= unlisted.keys()


def test_a_private_use_is_caught_and_members_of_our_own_pass():
    for source in (
        "from transformers import Trainer\nclass T(Trainer):\n    def _save(self): ...",
        "from transformers import Trainer\nclass T(Trainer):\n    def f(self): return self._tr_loss",
        "from onetrunk.checkpoints.resumable_trainer import ResumableTrainer\n"
        "class T(ResumableTrainer):\n    def _save(self): ...",
        "from torch import nn\nclass M(nn.Module):\n    def f(self): return self._parameters",
        "from argparse import ArgumentParser\nclass P(ArgumentParser):\n    def _get_formatter(self): ...",
        "def f(trainer): trainer._globalstep_last_logged = 0",
        "def f(module): return module._parameters",
        "def f(config): return getattr(config, '_commit_hash', None)",
        "import torch\ntorch._dynamo.config.disable = True",
        "from torch.utils._pytree import tree_map",
        "from torch.utils import _pytree",
        "from transformers import masking_utils\nmasking_utils.sdpa_mask = None",
        "def f():\n    from vllm.v1.worker import Worker\n    Worker.load_model = None",
    ):
        assert foreign_uses(source), source
    for source in (
        "from transformers import Trainer\nclass T(Trainer):\n    def _of_ours(self): return self._of_ours_too",
        "class C:\n    def _save(self): self._metrics = 1",
        "class C:\n    def copy(self, other):\n        other._rows = self._rows = 1",
        "def f(output): return output._replace(values=None)",
        "import sys\nsys.excepthook = None",
        "from onetrunk.types import Pack\nPack.width = None",
    ):
        assert not foreign_uses(source), source
