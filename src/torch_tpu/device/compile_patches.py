"""Changes to objects of `torch.compile` (Dynamo, Inductor) that would refuse graphs of the device.

Each is made after the import of what it changes. A graph of another device takes the path it took before.
"""

from __future__ import annotations

from types import CodeType
from typing import Any

import torch

from torch_tpu.device import random_state
from torch_tpu.patching.changes import Changes
from torch_tpu.patching.needs import Need, function
from torch_tpu.patching.patch_registry import optional


@optional(
    "Dynamo",
    "torch.compile works with tensors of the device",
    function("torch._dynamo.trace_rules:add", "import_name"),
    # After the module itself: `torch._dynamo` may be half imported when another one of its modules is wanted.
    after="torch._dynamo",
)
def skip_own_code(changes: Changes) -> None:
    # Dynamo would trace this package: PyTorch calls it from C++ while frames are evaluated, and some of it calls
    # back into PyTorch, without end. Without this patch the backend refuses graphs of the device.
    from torch._dynamo import trace_rules

    trace_rules.add("torch_tpu")


@optional(
    "Inductor",
    "torch.compile without a backend, or with backend='inductor', uses the backend 'tpu' for tensors of the device",
    function("torch._inductor.compile_fx:compile_fx", "model_", "example_inputs_"),
    after="torch._inductor.compile_fx",
)
def compile_own_graphs(changes: Changes) -> None:
    # Inductor's code generators know no `tpu`.
    original = changes.module.compile_fx

    def compile_own(graph: Any, examples: Any, *args: Any, **kwargs: Any) -> Any:
        from torch_tpu.compile.frontend.on_device import is_on_device

        if isinstance(graph, torch.fx.GraphModule) and is_on_device(graph, examples):
            from torch_tpu.compile import compile_graph

            return compile_graph(graph, examples)
        return original(graph, examples, *args, **kwargs)

    changes.set(changes.module, "compile_fx", compile_own)


def _lists_devices(function: Any) -> str:
    code = getattr(function, "__code__", None)
    found = isinstance(code, CodeType) and any(isinstance(c, frozenset) and "cuda" in c for c in code.co_consts)
    return "" if found else "has no list of devices in its code"


@optional(
    "FlexAttention",
    "flex_attention accepts tensors of the device",
    Need("torch.nn.attention.flex_attention:_validate_device", _lists_devices),
    after="torch.nn.attention.flex_attention",
)
def allow_flex_attention(changes: Changes) -> None:
    # It refuses devices that its list lacks. Dynamo traces this function, and would not trace one from this package, so
    # the list in its code gets one more entry.
    validate = changes.module._validate_device
    code = validate.__code__
    constants = tuple(c | {"tpu"} if isinstance(c, frozenset) and "cuda" in c else c for c in code.co_consts)
    changes.set(validate, "__code__", code.replace(co_consts=constants))


_KEY = torch._C.DispatchKey.BackendSelect


def _chooses_by_device(operator: Any) -> str:
    return "" if callable(operator.py_kernels.get(_KEY)) else "has no function that chooses by the device"


@optional(
    "checkpointed dropout",
    "checkpointed regions draw the same random numbers again in graphs that run operator by operator",
    Need("torch._prims.rng_prims:run_and_save_rng_state", _chooses_by_device),
    Need("torch._prims.rng_prims:run_with_rng_state", _chooses_by_device),
    function("torch._prims.rng_prims:run_and_save_rng_state._dispatch_cache.clear"),
    function("torch._prims.rng_prims:get_device", "args", "kwargs"),
    after="torch._prims.rng_prims",
)
def save_own_random_state(changes: Changes) -> None:
    # What draws the same random numbers again in a checkpointed region knows a fixed list of devices. Programs have
    # lowerings for it; this is for graphs that run operator by operator.
    def save(operator: Any, *args: Any, **kwargs: Any) -> Any:
        return random_state.get_rng_state().to("tpu"), operator(*args, **kwargs)

    def restore(state: torch.Tensor, operator: Any, *args: Any, **kwargs: Any) -> Any:
        before = random_state.get_rng_state()
        random_state.set_rng_state(state.cpu())
        try:
            return operator(*args, **kwargs)
        finally:
            random_state.set_rng_state(before)

    rng_prims = changes.module
    _for_own_device(changes, rng_prims.run_and_save_rng_state, save)
    _for_own_device(changes, rng_prims.run_with_rng_state, restore)


def _for_own_device(changes: Changes, operator: Any, own: Any) -> None:
    rng_prims = changes.module
    original = operator.py_kernels[_KEY]

    def choose(*args: Any, **kwargs: Any) -> Any:
        # The state comes first, where there is one; it may be on the CPU.
        of_operator = args[1:] if isinstance(args[0], torch.Tensor) else args
        is_own = rng_prims.get_device(of_operator, kwargs) == "tpu"
        return (own if is_own else original)(*args, **kwargs)

    changes.put(operator.py_kernels, _KEY, choose)
    changes.on_undo(operator._dispatch_cache.clear)
    operator._dispatch_cache.clear()
