"""Changes to PyTorch's own objects that eager code meets.

`compile_patches` has those for `torch.compile`, `accelerator` the functions of `torch.accelerator`, `libraries` those
to other libraries.

Each changes what happens for `tpu` alone: a CPU or CUDA object takes the path it took before. This file can be imported
where an object is missing: what is built on one is imported by the patch.
"""

from __future__ import annotations

import functools
from multiprocessing.reduction import ForkingPickler
from types import ModuleType
from typing import Any

import torch

from torch_tpu import hooks, metrics
from torch_tpu.device import privateuse1  # noqa: F401  (its patch is the first)
from torch_tpu.device.class_replacement import metaclass_of
from torch_tpu.eager import mode
from torch_tpu.patching.changes import Changes
from torch_tpu.patching.needs import a_class, function, holding, operator
from torch_tpu.patching.patch_registry import optional, required


@required(
    "generators",
    'torch.Generator("tpu") and random numbers have a state',
    a_class("torch:Generator", "manual_seed", "get_state", "set_state"),
    a_class("torch._C:Generator", "_cdata"),
)
def replace_generator(changes: Changes) -> None:
    # C++ asks a hook that Python can't implement for new generators; `Generator("tpu")` would raise.
    from torch_tpu.device.generator import Generator

    changes.set(torch, "Generator", Generator)


@required(
    "streams",
    "torch.Stream and torch.Event of the device wait and measure",
    a_class("torch:Stream"),
    a_class("torch:Event"),
    a_class("torch._C:Stream", "synchronize", "query", "wait_event"),
    a_class("torch._C:Event", "synchronize", "query", "elapsed_time"),
)
def replace_stream_and_event(changes: Changes) -> None:
    # The C++ classes work for `tpu`, but `Stream.synchronize` does not wait, and `Event.synchronize` and
    # `Event.elapsed_time` raise. Without a device they mean the accelerator, so here too.
    from torch_tpu.device import streams

    changes.set(torch, "Stream", _by_device(torch._C.Stream, streams.Stream))
    changes.set(torch, "Event", _by_device(torch._C.Event, streams.Event))


def _by_device(original: Any, ours: Any) -> Any:
    """A class with the name and the instances of `original`, whose objects for `tpu` are made by `ours`."""
    from torch_tpu.device import streams

    metaclass: Any = metaclass_of(original)

    class Replacement(original, metaclass=metaclass):
        def __new__(cls, device: Any = None, *args: Any, **kwargs: Any) -> Any:
            if cls is not Replacement:
                return original.__new__(cls, *((device, *args) if device is not None else args), **kwargs)
            if args or "stream_id" in kwargs:
                by_id = kwargs if device is None else dict(zip(_ID_FIELDS, (device, *args), strict=False)) | kwargs
                return (ours if by_id.get("device_type") == streams.DEVICE_TYPE else original)(**by_id)
            if device is None or torch.device(device).type == "tpu":
                return ours(device, **kwargs)
            return original(device, **kwargs)

    Replacement.__name__ = Replacement.__qualname__ = original.__name__
    Replacement.__module__ = "torch"
    Replacement.__doc__ = original.__doc__
    return Replacement


_ID_FIELDS = ("stream_id", "device_index", "device_type")


@required(
    "storages",
    "storages of the device refuse what would make C++ code write to host memory they do not have",
    a_class("torch:UntypedStorage", "__getitem__", "to"),
    a_class("torch._C:StorageBase", "new", "nbytes", "resize_", "_byteswap", "_write_file", "_set_from_file"),
)
def complete_untyped_storage(changes: Changes) -> None:
    # PyTorch has no allocator for `tpu`: `UntypedStorage(n, device="tpu")` would write to address 0, `resize_` raises,
    # and writing one to a file would read its fake address. The base class is immutable, its subclass is not.
    from torch_tpu.device import untyped_storage

    untyped: Any = torch.UntypedStorage
    for name, override in untyped_storage.overrides(untyped).items():
        changes.set(untyped, name, override)


@required(
    "DLPack",
    "DLPack export raises an error instead of returning an invalid address",
    function("torch:Tensor.__dlpack__", "stream"),
    function("torch:Tensor.__dlpack_device__"),
    function("torch._C:_to_dlpack"),
    function("torch._C:_to_dlpack_versioned"),
)
def refuse_dlpack(changes: Changes) -> None:
    # The capsule would carry the fake address; the reader would crash, or see zeros.
    for name in ("__dlpack__", "__dlpack_device__"):
        changes.set(torch.Tensor, name, _of_host_only(getattr(torch.Tensor, name)))
    for name in ("_to_dlpack", "_to_dlpack_versioned"):
        changes.set(torch._C, name, _of_host_only(getattr(torch._C, name)))
    for module in (torch, torch.utils.dlpack):
        if hasattr(module, "to_dlpack"):
            changes.set(module, "to_dlpack", torch._C._to_dlpack)


def _of_host_only(original: Any) -> Any:
    @functools.wraps(original)
    def export(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, torch.Tensor) and _is_on_device(tensor):
            raise BufferError("A tensor on 'tpu' can't be exported through DLPack: use .cpu() first")
        return original(tensor, *args, **kwargs)

    return export


@optional(
    "other processes",
    "sending a tensor of the device to another process raises an error that says what to send instead",
    function("torch.multiprocessing.reductions:reduce_tensor", "tensor"),
    holding("multiprocessing.reduction:ForkingPickler._extra_reducers", torch.Tensor, kind=dict),
)
def refuse_queues(changes: Changes) -> None:
    # A child process has no part in this one's device memory. PyTorch's own error speaks of file descriptors.
    reducers: dict[Any, Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    for kind, reducer in list(reducers.items()):
        if reducer.__module__ == "torch.multiprocessing.reductions" and reducer.__name__ != "reduce_event":
            changes.put(reducers, kind, _reducing_host_only(reducer))


def _reducing_host_only(reducer: Any) -> Any:
    @functools.wraps(reducer)
    def reduce(obj: Any) -> Any:
        if getattr(obj, "_untyped_storage", obj).device.type == "tpu":
            raise RuntimeError(
                f"A {type(obj).__name__} on 'tpu' can't be sent to another process: its memory belongs to this one's "
                "device. Send .cpu(), and move it with .to('tpu') where it arrives."
            )
        return reducer(obj)

    return reduce


@required(
    "copies of lazy conjugates",
    "copying a conjugated or negated tensor to or from the device works (without it, the copy calls itself forever)",
    operator("aten._copy_from.default", "self", "dst"),
)
def copy_past_lazy_keys(changes: Changes) -> None:
    # These keys' own kernel for an unknown operation makes plain copies of its arguments, by `_copy_from`, without end.
    library = torch.library.Library("aten", "IMPL")
    changes.on_undo(lambda: library._destroy())
    for key in ("Conjugate", "Negative", "ZeroTensor"):
        library.impl("_copy_from", torch.library.fallthrough_kernel, key)


@optional(
    "pinned memory",
    "host tensors can be pinned for the device, as DataLoader(pin_memory=True) does",
    operator("aten._pin_memory.default", "self", "device"),
    operator("aten.is_pinned.default", "self", "device"),
)
def pin_for_device(changes: Changes) -> None:
    # Both are asked of the CPU's tensors; what names another device goes on to PyTorch.
    from torch_tpu.device import pinned

    library = torch.library.Library("aten", "IMPL")
    changes.on_undo(lambda: library._destroy())
    library.impl("_pin_memory", pinned.pin_memory, "CPU")
    library.impl("is_pinned", pinned.is_pinned, "CPU")


@optional(
    "print",
    "tensors are printed from a copy on the host, without compiling",
    function("torch._tensor_str:_tensor_str", "self", "indent"),
)
def print_host_copies(changes: Changes) -> None:
    # Formatting runs a dozen small operators on the tensor; on the device each would be compiled for its shape.
    original = torch._tensor_str._tensor_str

    def _tensor_str(tensor: torch.Tensor, indent: int) -> str:
        if tensor.device.type == "tpu":
            with metrics.waiting("print"):
                tensor = tensor.detach().cpu()
        text: str = original(tensor, indent)
        return text

    changes.set(torch._tensor_str, "_tensor_str", _tensor_str)


@optional(
    "backward in this thread",
    "fused eager records backward into the programs of forward",
    function("torch.autograd.graph:_engine_run_backward", "t_outputs"),
    function("torch.autograd:_engine_run_backward", "t_outputs"),
    function("torch.autograd:is_multithreading_enabled"),
)
def record_backward_behind_forward(changes: Changes) -> None:
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

    changes.set(autograd.graph, "_engine_run_backward", run_backward)
    changes.set(autograd, "_engine_run_backward", run_backward)


def _is_on_device(output: Any) -> bool:
    return isinstance(output, torch.Tensor) and output.device.type == "tpu"


@optional(
    "linear cross entropy",
    "linear_cross_entropy in half precision accumulates in float32",
    function(
        "torch.nn.modules.linear_cross_entropy_options:LinearCrossEntropyOptions._resolve_auto_acc_dtype",
        *("dtype", "device"),
    ),
    after="torch.nn.modules.linear_cross_entropy_options",
)
def accumulate_in_float32(changes: Changes) -> None:
    # It accumulates in float32 on devices it knows, in half precision on others.
    options: ModuleType = changes.module
    if hasattr(options, "_AUTO_DEFAULTS"):
        for dtype in (torch.float16, torch.bfloat16):
            changes.put(options._AUTO_DEFAULTS, ("tpu", dtype), options._AUTO_DEFAULTS["cpu", dtype])
    else:  # from torch 2.15 on
        policy_of = options._auto_acc_policy

        def policy(device_type: str | None, dtype: torch.dtype) -> str:
            found: str = policy_of("cpu" if device_type == "tpu" else device_type, dtype)
            return found

        policy.__code__ = policy.__code__.replace(co_filename=policy_of.__code__.co_filename)
        changes.set(options, "_auto_acc_policy", policy)
    original = options.LinearCrossEntropyOptions._resolve_auto_acc_dtype

    def resolve(dtype: torch.dtype, device: torch.device | None) -> Any:
        if device is not None and device.type == "tpu" and dtype in (torch.float16, torch.bfloat16):
            return torch.float32
        return original(dtype, device)

    # Dynamo traces it where it looks like PyTorch's own.
    resolve.__code__ = resolve.__code__.replace(co_filename=original.__code__.co_filename)
    changes.set(options.LinearCrossEntropyOptions, "_resolve_auto_acc_dtype", staticmethod(resolve))


@optional(
    "determinism while tracing",
    "use_deterministic_algorithms(True) accepts operators that the device computes in a fixed order",
    function("torch._prims_common:alert_not_deterministic", "caller"),
    after="torch._prims_common",
)
def trace_as_deterministic(changes: Changes) -> None:
    # Shape rules written in Python take tensors without a device for CUDA's, and refuse there what CUDA's kernels do in
    # no fixed order. Programs of the device give the same numbers each time.
    original = changes.module.alert_not_deterministic

    @functools.wraps(original)
    def alert(caller: str) -> None:
        if not hooks.traces():
            original(caller)

    changes.set(changes.module, "alert_not_deterministic", alert)
