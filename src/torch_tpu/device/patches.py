"""Every change to PyTorch's own objects, except the functions of `torch.accelerator`, which `accelerator` replaces.

Each changes what happens for `tpu` alone: a CPU or CUDA object takes the path it took before.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch

from torch_tpu import metrics
from torch_tpu.device import random, storage, streams
from torch_tpu.device.generator import Generator
from torch_tpu.device.post_import import after_import
from torch_tpu.device.replacement import metaclass_of
from torch_tpu.eager import mode

_CStream: Any = torch._C.Stream
_CEvent: Any = torch._C.Event


def install() -> None:
    _replace_generator()
    _replace_stream_and_event()
    _complete_untyped_storage()
    _refuse_dlpack()
    _print_host_copies()
    _record_backward_behind_forward()
    after_import("torch._dynamo", _skip_own_code)
    after_import("torch._inductor.compile_fx", _compile_own_graphs)
    after_import("torch.nn.attention.flex_attention", _allow_flex_attention)
    after_import("torch._prims.rng_prims", _save_own_random_state)
    after_import("torch.nn.modules.linear_cross_entropy_options", _accumulate_in_float32)


def _replace_generator() -> None:
    # C++ asks a hook that Python can't implement for new generators; `Generator("tpu")` would raise.
    torch.Generator = Generator  # type: ignore[misc]


def _replace_stream_and_event() -> None:
    # The C++ classes work for `tpu`, but `Stream.synchronize` does not wait, and `Event.synchronize` and
    # `Event.elapsed_time` raise. Without a device they mean the accelerator, so here too.
    torch.Stream = _by_device(_CStream, streams.Stream)  # type: ignore[misc]
    torch.Event = _by_device(_CEvent, streams.Event)  # type: ignore[misc]


def _by_device(original: Any, ours: Any) -> Any:
    """A class with the name and the instances of `original`, whose objects for `tpu` are made by `ours`."""

    metaclass: Any = metaclass_of(original)

    class Replacement(original, metaclass=metaclass):
        def __new__(cls, device: Any = None, *args: Any, **kwargs: Any) -> Any:
            if cls is not Replacement:
                return original.__new__(cls, *((device, *args) if device is not None else args), **kwargs)
            if args or "stream_id" in kwargs:
                by_id = kwargs if device is None else dict(zip(_ID_FIELDS, (device, *args), strict=False)) | kwargs
                return (ours if by_id.get("device_type") == _TPU_TYPE else original)(**by_id)
            if device is None or torch.device(device).type == "tpu":
                return ours(device, **kwargs)
            return original(device, **kwargs)

    Replacement.__name__ = Replacement.__qualname__ = original.__name__
    Replacement.__module__ = "torch"
    Replacement.__doc__ = original.__doc__
    return Replacement


_ID_FIELDS = ("stream_id", "device_index", "device_type")
_TPU_TYPE = streams.DEVICE_TYPE


def _complete_untyped_storage() -> None:
    # PyTorch has no allocator for `tpu`: `UntypedStorage(n, device="tpu")` would write to address 0, `resize_` raises,
    # and writing one to a file would read its fake address. The base class is immutable, its subclass is not.
    untyped: Any = torch.UntypedStorage
    for name, override in storage.overrides(untyped).items():
        setattr(untyped, name, override)


def _print_host_copies() -> None:
    # Formatting runs a dozen small operators on the tensor; on the device each would be compiled for its shape.
    original = torch._tensor_str._tensor_str

    def _tensor_str(tensor: torch.Tensor, indent: int) -> str:
        if tensor.device.type == "tpu":
            with metrics.waiting("print"):
                tensor = tensor.detach().cpu()
        text: str = original(tensor, indent)
        return text

    torch._tensor_str._tensor_str = _tensor_str


def _record_backward_behind_forward() -> None:
    # PyTorch runs the backward operators of a device in a thread of its own. Fused eager keeps what each thread has
    # recorded apart, so all that forward saved would cross from its programs to those of backward. In the thread that
    # calls `backward` both are recorded into the same programs, and XLA computes again what costs less than to keep.
    autograd: Any = torch.autograd
    original = autograd.graph._engine_run_backward

    @functools.wraps(original)
    def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not mode.fused or not torch.autograd.is_multithreading_enabled():
            return original(outputs, *args, **kwargs)
        with torch.autograd.set_multithreading_enabled(not any(map(_is_on_device, outputs))):
            return original(outputs, *args, **kwargs)

    autograd.graph._engine_run_backward = run_backward
    autograd._engine_run_backward = run_backward


def _is_on_device(output: Any) -> bool:
    return isinstance(output, torch.Tensor) and output.device.type == "tpu"


def _refuse_dlpack() -> None:
    # The capsule would carry the fake address; the reader would crash.
    original = torch.Tensor.__dlpack__

    def __dlpack__(self: torch.Tensor, **kwargs: Any) -> Any:
        if self.device.type == "tpu":
            raise BufferError("A tensor on 'tpu' can't be exported through DLPack: use .cpu() first")
        return original(self, **kwargs)

    __dlpack__.__doc__ = original.__doc__
    torch.Tensor.__dlpack__ = __dlpack__  # type: ignore[method-assign]


def _skip_own_code(dynamo: ModuleType) -> None:
    # Dynamo would trace this package: PyTorch calls it from C++ while frames are evaluated, and some of it calls
    # back into PyTorch, without end.
    from torch._dynamo import trace_rules

    trace_rules.add("torch_tpu")


def _compile_own_graphs(compile_fx: Any) -> None:
    # What `torch.compile` calls without a backend's name, or with "inductor", whose code generators know no `tpu`.
    original = compile_fx.compile_fx

    def compile_own(graph: Any, examples: Any, *args: Any, **kwargs: Any) -> Any:
        from torch_tpu.compile import backend

        if isinstance(graph, torch.fx.GraphModule) and backend.is_on_device(graph, examples):
            return backend.compile_graph(graph, examples)
        return original(graph, examples, *args, **kwargs)

    compile_fx.compile_fx = compile_own


def _allow_flex_attention(flex_attention: Any) -> None:
    # It refuses devices that its list lacks. Dynamo traces this function, and would not trace one from this package, so
    # the list in its code gets one more entry.
    code = flex_attention._validate_device.__code__
    constants = tuple(c | {"tpu"} if isinstance(c, frozenset) and "cuda" in c else c for c in code.co_consts)
    flex_attention._validate_device.__code__ = code.replace(co_consts=constants)


def _accumulate_in_float32(options: ModuleType) -> None:
    # `linear_cross_entropy` in half precision accumulates in float32 on devices it knows, in half precision on others.
    for dtype in (torch.float16, torch.bfloat16):
        options._AUTO_DEFAULTS["tpu", dtype] = options._AUTO_DEFAULTS["cpu", dtype]
    original = options.LinearCrossEntropyOptions._resolve_auto_acc_dtype

    def resolve(dtype: torch.dtype, device: torch.device | None) -> Any:
        if device is not None and device.type == "tpu" and dtype in (torch.float16, torch.bfloat16):
            return torch.float32
        return original(dtype, device)

    # Dynamo traces it where it looks like PyTorch's own.
    resolve.__code__ = resolve.__code__.replace(co_filename=original.__code__.co_filename)
    options.LinearCrossEntropyOptions._resolve_auto_acc_dtype = staticmethod(resolve)


def _save_own_random_state(rng_prims: Any) -> None:
    # What draws the same random numbers again in a checkpointed region knows a fixed list of devices. Programs have
    # lowerings for it; this is for graphs that run operator by operator.
    def save(operator: Any, *args: Any, **kwargs: Any) -> Any:
        return random.get_rng_state().to("tpu"), operator(*args, **kwargs)

    def restore(state: torch.Tensor, operator: Any, *args: Any, **kwargs: Any) -> Any:
        before = random.get_rng_state()
        random.set_rng_state(state.cpu())
        try:
            return operator(*args, **kwargs)
        finally:
            random.set_rng_state(before)

    _for_own_device(rng_prims, rng_prims.run_and_save_rng_state, save)
    _for_own_device(rng_prims, rng_prims.run_with_rng_state, restore)


def _for_own_device(rng_prims: Any, operator: Any, own: Any) -> None:
    original = operator.py_kernels[torch._C.DispatchKey.BackendSelect]

    def choose(*args: Any, **kwargs: Any) -> Any:
        # The state comes first, where there is one; it may be on the CPU.
        of_operator = args[1:] if isinstance(args[0], torch.Tensor) else args
        is_own = rng_prims.get_device(of_operator, kwargs) == "tpu"
        return (own if is_own else original)(*args, **kwargs)

    operator.py_kernels[torch._C.DispatchKey.BackendSelect] = choose
    operator._dispatch_cache.clear()
