"""How the device answers each ATen overload: asked of the functions that choose kernels, tried where they can't know.

A kernel made from a lowering answers by itself. A composite or a decomposition is answered if every operator it calls
is, so a small call of it is rehearsed: traced and dispatched as ever, but its programs are not compiled.
"""

from __future__ import annotations

import contextlib
import enum
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

from tools.operators.examples import Example, examples
from torch_tpu.eager.kernel_table import HANDWRITTEN
from torch_tpu.eager.kernels.host_only import CpuKernel, Refused
from torch_tpu.eager.program import plan, plan_table, plan_tracing, stored_plans
from torch_tpu.eager.registration import register
from torch_tpu.ops.core import derived, registry
from torch_tpu.ops.core.schema import signature
from torch_tpu.recent import Recent
from torch_tpu.runtime.client import Buffer
from torch_tpu.runtime.process_client import client

_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key


class Kind(enum.Enum):
    """The ways to answer an overload, each with what it means."""

    LOWERING = "lowering", "written here in StableHLO"
    DERIVED = "derived", "an in-place, `out=` or `_foreach_` form that follows from an answered operator by its schema"
    KERNEL = (
        "kernel",
        "written here by hand: memory, copies, results whose size depends on data, numbers that must be checked",
    )
    VIEW = "view", "PyTorch's own kernel, which changes sizes and strides only"
    DECOMPOSITION = "decomposition", "written here with other operators; becomes one program"
    TORCH_DECOMPOSITION = "PyTorch's decomposition", "the same, written in PyTorch"
    COMPOSITE = "composite", "PyTorch's own kernel, which calls other operators; the device answers all of them"
    FALLBACK = "fallback", "runs on the CPU, with a warning, or reaches an operator that does"
    NOT_POSSIBLE = "not possible", "raises an error"

    @property
    def title(self) -> str:
        return self.value[0]

    @property
    def meaning(self) -> str:
        return self.value[1]

    @property
    def is_answered(self) -> bool:
        """Whether the device answers by itself."""
        return self not in (Kind.FALLBACK, Kind.NOT_POSSIBLE)


class Answer(NamedTuple):
    """How an overload is answered; `reason` says why not, where it isn't."""

    kind: Kind
    reason: str = ""


# Why an overload that fits a pattern can't be answered; the first that fits counts.
_IMPOSSIBLE = (
    (r"_test_|_foobar", "only for PyTorch's own tests"),
    (r"_fw_primal_copy|_make_dual_copy|^get_gradients", "an internal operator of autograd"),
    (
        r"cudnn|miopen|mkldnn|nnpack|vulkan|xla|mps|cufft|_cslt|triton|_philox_|_flash_attention|_efficient_attention"
        r"|mem_eff|fbgemm|_wrapped_linear|depthwise|_mixed_dtypes|_convert_weight_to_int4pack$|_weight_int4pack_mm(_with\w+)?$"
        r"|scaled_grouped_mm",
        "a kernel of another backend",
    ),
    (r"(linear|matmul|max_pool2d)_backward|_resize_output|^native_norm", "an internal operator of other backends"),
    (r"nested|jagged|to_padded_tensor", "nested tensors"),
    (
        r"sparse|coalesce|^_?(crow_|ccol_|col_|row_)?indices|^_?values|_nnz|_dim[IV]|hspmm|sspaddmm|^smm|_spsolve"
        r"|^_?to_dense|^_spdiags|_coo_to_csr|_csr_to_coo",
        "sparse layouts",
    ),
    (r"quantize(?!_learnable|_per_\w+_(affine|cachemask))|^q_|qscheme|int_repr", "quantized tensors"),
    (r"^chalf", "XLA has no complex numbers of half precision"),
    (r"pin_memory", "only host memory can be pinned"),
)


# Why an overload is left to the CPU.
_ON_CPU = ((r"int4pack|_dyn_quant", "weights packed in the CPU kernel's own format"),)


def overloads() -> list[str]:
    """Every overload of `aten` the dispatcher knows."""
    return sorted(n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::"))


def overload(name: str) -> OpOverload:
    """An overload by its name, with or without the namespace `aten`."""
    packet, _, rest = name.removeprefix("aten::").partition(".")
    found: OpOverload = getattr(getattr(torch.ops.aten, packet), rest or "default")
    return found


def answers(told: Callable[[], None] = lambda: None) -> dict[str, Answer]:
    """How each overload is answered.

    Args:
        told: called after each.
    """
    register.install()
    found = {}
    with _rehearsal():
        for name in overloads():
            found[name.removeprefix("aten::")] = _answer(name)
            told()
    return found


@cache
def _answer(name: str) -> Answer:
    short = name.removeprefix("aten::")
    func = overload(name)
    kernel = register.kernel_for(name)
    if isinstance(kernel, CpuKernel):
        return Answer(Kind.FALLBACK, kernel.reason)
    kind = _kind(name, func, kernel)
    impossible = _reason(_IMPOSSIBLE, short)
    if kind in (Kind.LOWERING, Kind.KERNEL) or (kind is Kind.VIEW and not impossible):
        return Answer(kind)
    if kind is Kind.DERIVED and not signature(func).is_out:
        return Answer(kind)
    if kind is None:
        return Answer(Kind.NOT_POSSIBLE, impossible or "the CPU has no kernel for it either")
    twin = derived.functional(func) if signature(func).is_out else None
    if twin is not None and (kind is Kind.DERIVED or _is_generated(name)):
        answer = _answer(twin.name())
        return Answer(kind) if answer.kind.is_answered else answer
    if (left := _reason(_ON_CPU, short)) or (refusal := _refusal(func)) is None:
        return Answer(Kind.FALLBACK, left) if left else Answer(kind)
    if impossible:
        with mock.patch.dict(os.environ, {"TORCH_TPU_FALLBACK": "allow"}):
            possible = _refusal(func) is None
        return Answer(Kind.FALLBACK if possible else Kind.NOT_POSSIBLE, impossible)
    return Answer(Kind.FALLBACK, refusal)


def _reason(table: Sequence[tuple[str, str]], name: str) -> str:
    """The reason of the first pattern that fits a name; empty where none does."""
    return next((reason for pattern, reason in table if re.search(pattern, name)), "")


def _is_generated(name: str) -> bool:
    """Whether PyTorch's build made an `out=` kernel that calls the functional operator and copies."""
    return _has_kernel(name, "CompositeExplicitAutograd") and not _has_kernel(name, "CPU")


def _kind(name: str, func: OpOverload, kernel: Callable[..., Any] | None) -> Kind | None:
    """What kind of kernel serves an overload, whatever becomes of the operators it calls; None: nothing does."""
    if isinstance(kernel, Refused):
        return None
    sig = signature(func)
    if kernel is None:
        if _has_kernel(name, "PrivateUse1"):
            return Kind.KERNEL
        if sig.is_view and _has_kernel(name, "CompositeExplicitAutograd"):
            return Kind.VIEW
        composite = _has_kernel(name, "CompositeImplicitAutograd") or _has_kernel(name, "CompositeExplicitAutograd")
        return Kind.COMPOSITE if composite else None
    if name.removeprefix("aten::") in HANDWRITTEN:
        return Kind.VIEW if sig.is_view else Kind.KERNEL
    if sig.is_out:
        return Kind.DERIVED
    if registry.find(func) is not None:
        return Kind.LOWERING
    if derived.lowering(func) is not None or derived.foreach_element(func) is not None:
        return Kind.DERIVED
    if sig.is_view:
        return Kind.VIEW
    return Kind.DECOMPOSITION if registry.decomposes_here(func) else Kind.TORCH_DECOMPOSITION


# --- rehearsal ---------------------------------------------------------------------------------------------------


class _Zeros:
    """Stands in for a program: its results are zeros."""

    def __init__(self, results: Any) -> None:
        self._results = results

    def enqueue(self, arguments: Sequence[Buffer]) -> list[Buffer]:
        return [client().put(np.zeros(shape, dtype)) for shape, dtype in self._results]

    __call__ = enqueue

    def results(self, enqueued: list[Buffer]) -> list[Buffer]:
        return enqueued


class _Uncompiled:
    """Stands in for the client that compiles."""

    names_operators = False

    def __init__(self) -> None:
        self.platform_name = client().platform_name
        self.runs_on_cpu = client().runs_on_cpu
        self.calls_lapack = client().calls_lapack
        self.is_host_memory = client().is_host_memory

    def compile(self, module: Any, results: Any, **options: Any) -> Any:
        module.operation.verify()
        return _Zeros(results)


@contextlib.contextmanager
def _rehearsal() -> Iterator[None]:
    """Programs are made but not compiled, in a table of their own; the fallback raises."""

    trace = plan_tracing.make_plan

    def make_plan(call: plan.Call) -> plan.Plan:
        call.checks = False
        return trace(call)

    uncompiled = _Uncompiled()
    plan_table.fast_path_plans.clear()
    with (
        mock.patch.object(plan, "client", return_value=uncompiled),
        mock.patch.object(plan_tracing, "make_plan", make_plan),
        mock.patch.object(stored_plans, "keeps_operators", False),
        mock.patch.object(plan_table, "plans", Recent(4096)),
        mock.patch.dict(os.environ, {"TORCH_TPU_FALLBACK": "error"}),
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
        warnings.catch_warnings(action="ignore"),
    ):
        try:
            yield
        finally:
            plan_table.fast_path_plans.clear()  # of plans whose results are zeros


def _refusal(func: OpOverload) -> str | None:
    """Why a small call of an overload is not answered; None if it is."""
    refused = "no arguments are known for it"
    for example in examples_of(func):
        try:
            call(func, example, "cpu")
        except Exception as error:
            if "Could not run" not in str(error):
                refused = f"no arguments are known for it: {str(error).splitlines()[0]}"
                continue
        try:
            call(func, example, "tpu")
        except Exception as error:
            return _in_short(str(error))
        return None
    return refused


def _in_short(message: str) -> str:
    """The reason in a message of the fallback; of another message its first line."""
    found = re.match(r"aten::(\S+) can't run on the tpu device \(at [^)]*\): (.*?)\. TORCH_TPU_FALLBACK=", message)
    if found is None:
        return message.splitlines()[0]
    reason = found[2].removeprefix("aten.").replace(".default ", " ")
    return reason if reason.startswith(found[1]) else f"{found[1]}: {reason}"


def examples_of(func: OpOverload) -> Iterator[Example]:
    """Examples of an overload; of an `out=` form those of its functional twin, with empty tensors to write to."""
    twin = derived.functional(func) if signature(func).is_out else None
    if twin is None:
        yield from examples(func)
        return
    outs = [a for a in signature(func).arguments if a.is_out]
    for example in examples(twin):
        try:
            results = call(twin, example, "cpu")
        except Exception:
            continue
        results = [results] if len(outs) == 1 else list(results)
        given = {a.name: tree_map(lambda t: t.new_empty(0), r) for a, r in zip(outs, results, strict=False)}
        yield Example(example.args, {**example.kwargs, **given})


# Arguments that PyTorch wants on the host for any device.
_ON_HOST = {
    "_foreach_addcdiv": ("scalars",),
    "_foreach_addcdiv_": ("scalars",),
    "_foreach_addcmul": ("scalars",),
    "_foreach_addcmul_": ("scalars",),
    "_nested_view_from_buffer": ("nested_size", "nested_strides", "offsets"),
    "_pack_padded_sequence": ("lengths",),
    "_pack_padded_sequence_backward": ("batch_sizes",),
    "_pad_packed_sequence": ("batch_sizes",),
    "randint_like": ("high",),
    "tensor_split": ("tensor_indices_or_sections",),
}


def call(func: OpOverload, example: Example, device: str) -> Any:
    """Calls an overload on copies of an example's tensors."""
    arguments = signature(func).arguments
    names = [a.name for a in arguments]
    stay = _ON_HOST.get(func._schema.name.partition("::")[2], ())

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().clone().to(device).requires_grad_(value.requires_grad)
        if isinstance(value, torch.UntypedStorage):
            return value.to(device=torch.device(device))
        return torch.device(device) if isinstance(value, torch.device) else value

    args = [v if n in stay else tree_map(move, v) for n, v in zip(names, example.args, strict=False)]
    kwargs = {n: v if n in stay else tree_map(move, v) for n, v in example.kwargs.items()}
    if "device" in names[len(args) :]:
        kwargs["device"] = torch.device(device)
    return func(*args, **kwargs)
