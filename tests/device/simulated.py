"""A pretended GPU on a machine without one. Its tensors say `sim:0`, hold CPU memory, and must not meet CPU tensors.

`install()` registers it as the accelerator of this process, once and for good, so tests run it in a process of their
own (`runs.py`). It knows two things that a first run on a GPU would tell:

- An operation on tensors of both devices raises `MixedDevices`, which names the line, under the rules of CUDA: CPU
  tensors without dimensions may take part, and CPU indices may index.
- `WAITS` counts where the program waits for the device: numbers read from it, shapes that depend on its values, copies
  to unpinned CPU memory, and copies from the CPU that are not `non_blocking`.

Where a library asks for the kind of the device it hears "cuda", and `torch.cuda` answers, so that what is written for
CUDA runs too. What has no stand-in: kernels (Triton, flash attention), torch.compile, CUDA graphs, real asynchrony.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import os
import runpy
import sys
import traceback
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

SIM = "sim:0"
MEMORY = 80 * 2**30
# Call sites (room/file.py:function kind) of waits and how often they waited; operations are counted by name.
WAITS: collections.Counter[str] = collections.Counter()
OPERATIONS: collections.Counter[str] = collections.Counter()

# Operations that read values of the device, or whose shape depends on them.
_READS = set("_local_scalar_dense nonzero is_nonzero masked_select _unique2 unique_dim equal bincount".split())
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
_COPIES = {"copy_", "_copy_from", "_copy_from_and_resize"}
# Factories that resize what they are given, and those that make a CPU tensor first.
_FACTORIES = ("arange", "randperm", "eye", "linspace", "tril_indices", "triu_indices")
_IN_HALF_PRECISION = ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "scaled_dot_product_attention")
_TORCH = os.path.dirname(torch.__file__)
_LIBRARIES = ("site-packages", os.path.dirname(os.__file__))
_real_type = torch.device.type.__get__


class MixedDevices(RuntimeError):
    """An operation got tensors of the device and of the CPU, as CUDA would not allow."""


class SimTensor(torch.Tensor):
    """A tensor on the pretended device; `inner` holds its values on the CPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda = property(lambda self: True)

    @staticmethod
    def __new__(cls, inner: torch.Tensor, requires_grad: bool = False) -> SimTensor:
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "layout": inner.layout}
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=torch.device(SIM), requires_grad=requires_grad, **layout
        )
        tensor.inner = inner
        return tensor

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __repr__(self, **kwargs: Any) -> str:
        return f"SimTensor({self.inner})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> SimTensor:
        return SimTensor(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types_: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        _wait("tolist")
        return self.inner.tolist()

    def new_tensor(self, data: Any, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any) -> Any:
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or SIM, **kwargs)

    def __getitem__(self, index: Any) -> Any:
        # Lists become tensors on the CPU.
        parts = index if isinstance(index, tuple) else (index,)
        return super().__getitem__(tuple(torch.tensor(part) if isinstance(part, list) else part for part in parts))

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def __reduce_ex__(self, protocol: int) -> Any:
        return _loaded, (self.inner,)

    def pin_memory(self, *_: Any) -> SimTensor:
        raise RuntimeError("only tensors of the CPU can be pinned")


def _loaded(inner: torch.Tensor) -> SimTensor:
    return SimTensor(inner)


def _frame() -> types.FrameType:
    """Return the innermost frame outside of libraries, or outside of torch where all are."""
    frame, outside_torch = sys._getframe(1), None
    while frame is not None:
        name = frame.f_code.co_filename
        if name != __file__ and not name.startswith(_TORCH) and not name.startswith("<"):
            if not any(part in name for part in _LIBRARIES):
                return frame
            outside_torch = outside_torch or frame
        frame = frame.f_back
    return outside_torch or sys._getframe(1)


def _wait(kind: str) -> None:
    code = _frame().f_code
    WAITS[f"{'/'.join(code.co_filename.split('/')[-2:])}:{code.co_name} {kind}"] += 1


def _is_sim(device: Any) -> bool:
    return device is not None and str(device).startswith("sim")


def _inner(x: Any) -> Any:
    return x.inner if isinstance(x, SimTensor) else x


def _is_pinned(x: torch.Tensor) -> bool:
    return getattr(x, "_says_pinned", False)


def _copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> None:
    if isinstance(source, SimTensor) and not isinstance(target, SimTensor):
        if not (non_blocking and _is_pinned(target)):
            _wait("to cpu")
    elif isinstance(target, SimTensor) and not isinstance(source, SimTensor) and source.dim() and not non_blocking:
        _wait("from cpu")


def _check_devices(name: str, args: tuple, flat: list[Any]) -> None:
    """Raise where CUDA would, and count the waits of an operation on the device."""
    strangers = [x for x in flat if isinstance(x, torch.Tensor) and not isinstance(x, SimTensor) and x.dim()]
    if name in _INDEXING:
        indices = [x for x in args[1] if x is not None]
        is_home = isinstance(args[0], SimTensor)
        if is_home and any(isinstance(x, torch.Tensor) and not isinstance(x, SimTensor) for x in indices):
            _wait("index from cpu")
        masks = [x for x in indices if x.dtype == torch.bool]
        fills = name != "index" and len(indices) == 1 and args[2].numel() == 1
        if masks and not fills:
            _wait("boolean index")
        strangers = [x for x in args[2:3] if isinstance(x, torch.Tensor) and x.dim() and not isinstance(x, SimTensor)]
        strangers += [] if is_home else indices
        strangers = strangers if is_home or any(isinstance(x, SimTensor) for x in indices) else []
    if strangers:
        frame, shapes = _frame(), [tuple(x.shape) for x in strangers]
        raise MixedDevices(
            f"{name} got tensors of {SIM} and of the cpu {shapes} at {frame.f_code.co_filename}:{frame.f_lineno}"
        )
    if name in _READS:
        _wait(name.strip("_").replace("local_scalar_dense", "item"))


@contextlib.contextmanager
def _shown() -> Iterator[None]:
    """Print an exception: torch 2.13 aborts where one leaves the backward of this device."""
    try:
        yield
    except Exception:
        traceback.print_exc(file=sys.__stderr__)
        raise


@_shown()
def _run(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run an operation on what its tensors hold, and return its results on the device where CUDA would."""
    name = func._schema.name.removeprefix("aten::")
    flat, _ = tree_flatten((args, kwargs))
    has_sim, device = any(isinstance(x, SimTensor) for x in flat), kwargs.get("device")
    OPERATIONS[name] += 1
    if name == "_to_copy":
        source, goes_home = args[0], _is_sim(device) if device is not None else isinstance(args[0], SimTensor)
        kept = {k: v for k, v in kwargs.items() if k not in ("device", "non_blocking", "pin_memory")}
        out = func(_inner(source), **kept)
        out = SimTensor(out) if goes_home else out
        _copy(source, out, kwargs.get("non_blocking", False))
        return out
    if name in _COPIES:
        target, source = (args[0], args[1]) if name == "copy_" else (args[1], args[0])
        _copy(source, target, args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        _inner(target).copy_(_inner(source))
        return target
    if has_sim:
        _check_devices(name, args, flat)
    kept = {k: (torch.device("cpu") if k == "device" and _is_sim(v) else v) for k, v in kwargs.items()}
    kept.pop("pin_memory", None)
    if func._overloadname == "dtype_out":
        return _wide_product(getattr(torch, name), *args, **kept)
    out = func(*tree_map(_inner, args), **tree_map(_inner, kept))
    if name in ("_local_scalar_dense", "equal", "is_nonzero") or not (_is_sim(device) or (has_sim and device is None)):
        return out
    if name in ("detach", "alias"):
        return SimTensor(out)
    out = tree_map(lambda x: SimTensor(x) if isinstance(x, torch.Tensor) else x, out)
    return return_and_correct_aliasing(func, args, kwargs, out)


def _wide_product(product: Any, *args: Any, out: SimTensor, **kwargs: Any) -> SimTensor:
    """Write a product of half precision with a float32 result into `out`; only CUDA has it as one operation."""
    wide = [_inner(x).to(out.dtype) if isinstance(x, torch.Tensor) else x for x in args]
    out.inner.copy_(product(*(x for x in wide if not isinstance(x, torch.dtype)), **kwargs))
    return out


# --- what Python asks of torch --------------------------------------------------------------------------------------


class _Backend(_DummyBackendModule):
    """The module `torch.sim`."""

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)


def _always(value: Any) -> Any:
    return lambda *_, **__: value


_nothing = _always(None)
for _name, _value in {
    **dict.fromkeys(("set_device", "synchronize", "empty_cache", "manual_seed", "manual_seed_all")),
    **{"is_available": True, "is_bf16_supported": True, "_is_in_bad_fork": False},
    **{"device_count": 1, "current_device": 0},
    "get_amp_supported_dtype": [torch.float16, torch.bfloat16, torch.float32],
}.items():
    setattr(_Backend, _name, _always(_value))


class _Stream:
    """A stream and an event in one: everything is done already."""

    def __init__(self, *_: Any, **__: Any):
        self.device = torch.device(SIM)

    elapsed_time, query = _always(1.0), _always(True)
    record = wait_stream = wait_event = wait = record_event = _nothing

    def synchronize(self) -> None:
        _wait("synchronize")


def _answers_of_cuda() -> dict[str, Any]:
    """Return what `torch.cuda` says of a GPU with 80 GiB."""
    properties = types.SimpleNamespace(
        name="Simulated", total_memory=MEMORY, major=9, minor=0, multi_processor_count=132, uuid="0", gcnArchName=""
    )
    used = 2**30
    memory = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    without_effect = ("set_device", "empty_cache", "reset_peak_memory_stats", "ipc_collect", "init", "manual_seed")
    return {
        **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), _always(True)),
        **dict.fromkeys(memory, _always(used)),
        **dict.fromkeys((*without_effect, "manual_seed_all", "set_rng_state", "set_rng_state_all"), _nothing),
        **dict.fromkeys(("current_stream", "default_stream", "Event", "Stream"), _Stream),
        "device_count": _always(1),
        "current_device": _always(0),
        "mem_get_info": _always((MEMORY - used, MEMORY)),
        "get_device_properties": _always(properties),
        "get_device_capability": _always((9, 0)),
        "get_device_name": _always(properties.name),
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "synchronize": lambda *_: _wait("synchronize"),
        "stream": lambda *_: contextlib.nullcontext(),
    }


def _device_of_block() -> torch.device | None:
    """Return the device of a block `with torch.device(...)`."""
    modes = torch.overrides._get_current_function_mode_stack()
    return next((mode.device for mode in reversed(modes) if isinstance(mode, DeviceContext)), None)


def _marked(tensor: torch.Tensor, is_pinned: bool) -> torch.Tensor:
    tensor._says_pinned = is_pinned
    return tensor


def _made_on_cpu(name: str) -> None:
    """Let a factory make its tensor on the CPU and hand it over: without a wait, unless it takes values."""
    real = getattr(torch, name)

    def made(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        device = _device_of_block() if device is None else device
        out = _marked(real(*args, device="cpu" if _is_sim(device) else device, **kwargs), pin_memory)
        return SimTensor(out) if _is_sim(device) else out

    setattr(torch, name, made)


def _patch_values() -> None:
    """Make `torch.tensor` and `torch.as_tensor` copy what they are given, which waits; and pinned memory."""
    tensor, as_tensor, empty, empty_like = torch.tensor, torch.as_tensor, torch.empty, torch.empty_like

    def given(data: Any, *, device: Any = None, requires_grad: bool = False, **kwargs: Any) -> torch.Tensor:
        device = _device_of_block() if device is None else device
        if not _is_sim(device):
            kwargs |= {} if device is None else {"device": device}
            return tensor(data, requires_grad=requires_grad, **kwargs)
        made = tensor(data, device="cpu", **kwargs)
        if made.numel():
            _wait("from cpu")
        return SimTensor(made).requires_grad_(requires_grad)

    def converted(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
        if not _is_sim(device):
            return as_tensor(data, dtype=dtype, device=device)
        return data.to(device, dtype) if isinstance(data, torch.Tensor) else given(data, dtype=dtype, device=device)

    def pinned(make: Any) -> Any:
        def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            return _marked(make(*args, **kwargs), pin_memory)

        return made

    torch.tensor, torch.as_tensor = given, converted
    torch.empty, torch.empty_like = pinned(empty), pinned(empty_like)
    torch.Tensor.is_pinned = lambda self, *_: _is_pinned(self)
    torch.Tensor.pin_memory = lambda self, *_: _marked(self.clone(), True)


def _keep_unpacked() -> None:
    """Hold what hooks on saved tensors return: torch 2.13 aborts where it becomes the only owner of such a tensor."""
    begin, last = torch.autograd.graph.saved_tensors_hooks.__init__, collections.deque(maxlen=8)

    def started(self: Any, pack_hook: Any, unpack_hook: Any) -> None:
        def unpacked(packed: Any) -> Any:
            with _shown():
                last.append(unpack_hook(packed))
            return last[-1]

        begin(self, pack_hook, unpacked)

    torch.autograd.graph.saved_tensors_hooks.__init__ = started


def _say_cuda() -> None:
    """Let `torch.device.type` be "cuda" for the device, and contexts that take a kind of device mean it."""
    members = gc.get_referents(torch.device.__dict__)[0]
    kind = members["type"]
    members["type"] = property(lambda self: "cuda" if kind.__get__(self) == "sim" else kind.__get__(self))
    import ctypes

    ctypes.pythonapi.PyType_Modified(ctypes.py_object(torch.device))
    for owner, name in ((torch.autocast, "__init__"), (torch, "is_autocast_enabled"), (torch, "get_autocast_dtype")):
        setattr(owner, name, _meant(getattr(owner, name)))


def _send_what_is_inside() -> None:
    """Let processes exchange tensors of the device, one to one, over a group that knows only the CPU's."""
    for name in ("isend", "recv"):
        real = getattr(torch.distributed, name)
        setattr(torch.distributed, name, lambda x, *args, real=real, **kwargs: real(_inner(x), *args, **kwargs))


def _meant(real: Any) -> Any:
    """Return a function for which "cuda" is the kind of the device."""
    return lambda *args, **kwargs: real(
        *("sim" if isinstance(x, str) and x == "cuda" else x for x in args),
        **{k: "sim" if isinstance(v, str) and v == "cuda" else v for k, v in kwargs.items()},
    )


class _Trace:
    """A profile of the device alone: one event for each operation."""

    def __enter__(self) -> _Trace:
        self._before = OPERATIONS.total()
        return self

    def __exit__(self, *_: Any) -> None:
        self._count = OPERATIONS.total() - self._before

    def events(self) -> list[Any]:
        return [types.SimpleNamespace(device_type=torch.autograd.DeviceType.CUDA)] * self._count


def _profile_operations() -> None:
    real, on_gpu = torch.profiler.profile, {torch.profiler.ProfilerActivity.CUDA}
    torch.profiler.profile = lambda activities=(), **kwargs: (
        _Trace() if set(activities) == on_gpu else real(activities=activities, **kwargs)
    )


def _lowered(op: Any) -> Any:
    """Return the kernel of an operation that runs in half precision under autocast."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype("sim")
        cast = lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x  # noqa: E731
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
            return op(*tree_map(cast, args), **tree_map(cast, kwargs))

    return kernel


_LIBRARIES_KEPT: list[torch.library.Library] = []


def install() -> None:
    """Make the device the accelerator of this process.

    Call it after torch._dynamo has been imported, which looks at functions that are replaced here.
    """
    _setup_privateuseone_for_python_backend("sim", backend_module=_Backend())
    every, autocast = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(lambda op, *args, **kwargs: _run(op, args, kwargs), "PrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in _IN_HALF_PRECISION:
        autocast.impl(name, _lowered(getattr(torch.ops.aten, name).default), "AutocastPrivateUse1")
    _LIBRARIES_KEPT.extend((every, autocast))
    torch.serialization.add_safe_globals([_loaded])
    _device_constructors()  # Kept from now on: a block `with torch.device(...)` knows the originals.
    _patch_values()
    _keep_unpacked()
    _profile_operations()
    _send_what_is_inside()
    for name in _FACTORIES:
        _made_on_cpu(name)
    if not hasattr(torch._C, "_cuda_getCurrentRawStream"):  # A build for the CPU; bitsandbytes reads it on import.
        torch._C._cuda_getCurrentRawStream = lambda index: 0
    for name, answer in _answers_of_cuda().items():
        setattr(torch.cuda, name, answer)
        if hasattr(torch.cuda.random, name):
            setattr(torch.cuda.random, name, answer)
    _say_cuda()
    for module in list(sys.modules.values()):
        # Imported by name.
        for name in ("is_triton_available", "_use_triton"):
            if name in vars(module):
                setattr(module, name, lambda *_: False)
    os.environ["ACCELERATE_TORCH_DEVICE"], os.environ["ONETRUNK_KERNELS"] = SIM, "off"
    from accelerate.state import PartialState
    from transformers import TrainingArguments

    PartialState.default_device = property(lambda self: torch.device(SIM))
    # It would answer cuda:0.
    TrainingArguments.device = property(lambda self: torch.device(SIM if self._setup_devices.type != "cpu" else "cpu"))


if __name__ == "__main__":
    # python -m tests.device.simulated SCRIPT ARGUMENTS: run a script that names the device sim:0.
    import transformers.masking_utils  # noqa: F401

    from tests.device import simulated

    simulated.install()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")
