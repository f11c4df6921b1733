"""`torch_tpu.export`: a module or function as one StableHLO module, for use outside PyTorch.

The call is traced on fake tensors of the device, so nothing runs and parameters may lie on any device, "meta" too.
Parameters, buffers, captured tensors and the tensors of the call become arguments, by name; written ones come back as
further results.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses import fake_tensor
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import (
    KeyPath,
    MappingKey,
    SequenceKey,
    TreeSpec,
    tree_flatten_with_path,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)

from torch_tpu.compile.exported import Exported, ExportedArgument, Result
from torch_tpu.eager.program.plan import new_target
from torch_tpu.hlo import artifact, module
from torch_tpu.hlo.array import Array
from torch_tpu.hlo.strided import contiguous_strides
from torch_tpu.ops.core.random_bits import Rng
from torch_tpu.ops.tracing.subgraph import GraphTracer, constants
from torch_tpu.ops.tracing.tracer import Base, Tracer

_RANDOM_STATE: module.Spec = ((2,), torch.uint64)
# What PyTorch raises when fake tensors are asked for a value, or a size, that only data knows.
_DATA_DEPENDENT = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    symbolic_shapes.GuardOnDataDependentSymNode,
)


class ExportError(RuntimeError):
    """What was to be exported can't be one StableHLO module."""


def export(module_or_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Exported:
    """The StableHLO module of one call, for this process's platform.

    Shapes, dtypes and every argument that is no tensor become part of it. Tensors may be on any device: nothing of
    them but shape and dtype is used. Index bounds are not checked in the module.

    Raises:
        ExportError: where a size or a branch depends on data, or an operator has no lowering.
        Exception: what the call itself raises.
    """
    call = _Call(module_or_fn, args, kwargs)
    try:
        with call.fake:
            graph = make_fx(call.run, _allow_non_fake_inputs=True)(*call.state.values(), *call.inputs.values())
    except _DATA_DEPENDENT as error:
        raise ExportError(
            f"{call.name} can't be exported: a size or a branch depends on data ({error}). "
            "Express it with operators on whole tensors, such as torch.where or a mask."
        ) from error
    return _build(call, graph)


@dataclass(frozen=True)
class _Returned:
    """What the call returned: names of its tensors, names of the buffers it replaced, everything else, the nest."""

    tensors: list[str]
    replaced: list[str]
    others: dict[str, Any]
    structure: TreeSpec


class _Call:
    """A call with fake tensors in place of its own.

    Attributes:
        named: the module's parameters and buffers, by their first name: one with several names is one argument.
        state, inputs: stand-ins for them and for the tensors among the arguments.
    """

    returned: _Returned

    def __init__(self, of: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.of = of
        self.name: str = getattr(of, "__qualname__", type(of).__qualname__)
        self.module = of if isinstance(of, torch.nn.Module) else None
        # while_loop asks for a ShapeEnv; this one refuses sizes and numbers that only data knows, as none would.
        sizes = symbolic_shapes.ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        self.fake = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True, shape_env=sizes)
        self.named: dict[str, torch.Tensor] = {}
        if self.module is not None:
            self.named = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        self.captured = _Captured(self._stand_in)
        self.leaves, self.spec = tree_flatten_with_path((args, kwargs))
        names = _positional_names(of)
        self.state = {name: self._stand_in(t) for name, t in self.named.items()}
        self.inputs = {
            _name(path[1:], names if path[0] == SequenceKey(0) else ()): self._stand_in(leaf)
            for path, leaf in self.leaves
            if isinstance(leaf, torch.Tensor)
        }

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            kind = f"{type(tensor).__name__} of layout {tensor.layout}"
            raise ExportError(f"{self.name} can't be exported: a {kind} can't be an argument of a StableHLO module")
        with _disable_current_modes(), self.fake:
            made = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="tpu")
            return made.requires_grad_(tensor.requires_grad)

    def run(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        values = iter(tensors)
        given = {name: next(values) for name in self.state}
        current = dict(given)
        leaves = [next(values) if isinstance(leaf, torch.Tensor) else leaf for _, leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.spec)
        with self.captured:
            if self.module is not None:
                returned = torch.func.functional_call(self.module, current, args, kwargs)
            else:
                returned = self.of(*args, **kwargs)
        found, structure = tree_flatten_with_path(returned)
        named = {_name(path, ("output",), root="output"): value for path, value in found}
        results = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
        # Those that are written in place are found when the graph is traced.
        replaced = [name for name, value in current.items() if value is not given[name]]
        others = {name: value for name, value in named.items() if name not in results}
        self.returned = _Returned(list(results), replaced, others, structure)
        return [*results.values(), *(current[name] for name in replaced)]


class _Captured(TorchFunctionMode):
    """Tensors that the function captured and uses with stand-ins: they get stand-ins too, wherever they lie."""

    def __init__(self, stand_in: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._stand_in = stand_in
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():
            # Dynamo captures the branches of torch.cond and kin, and this with them; it may see nothing else of this
            # package. Their operands, among them what they capture, come by again when the operator is called.
            return func(*args, **(kwargs or {}))
        given = (args, kwargs or {})
        if any(isinstance(leaf, fake_tensor.FakeTensor) for leaf in tree_leaves(given)):
            given = tree_map_only(torch.Tensor, self._replaced, given)
        return func(*given[0], **given[1])

    def _replaced(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, fake_tensor.FakeTensor):
            return tensor
        if id(tensor) not in self._made:
            self._made[id(tensor)] = (tensor, self._stand_in(tensor))
        return self._made[id(tensor)][1]

    def value(self, constant: torch.Tensor) -> torch.Tensor:
        """The captured tensor that a constant of the graph stands for: another one, or itself."""
        return next((tensor for tensor, made in self._made.values() if made is constant), constant)


def _positional_names(of: Any) -> tuple[str, ...]:
    """What the signature calls the positional arguments; nothing where there is none."""
    try:
        parameters = inspect.signature(of.forward if isinstance(of, torch.nn.Module) else of).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def _name(path: KeyPath, names: Sequence[str] = (), root: str = "args") -> str:
    """Such as `batch['ids']` or `args[3]`."""
    if not path:
        return root
    first, *rest = path
    if isinstance(first, MappingKey) and isinstance(first.key, str) and root == "args":
        head = first.key
    elif isinstance(first, SequenceKey) and first.idx < len(names) and root == "args":
        head = names[first.idx]
    else:
        head = f"{root}{first}"
    return head + "".join(map(str, rest))


def _build(call: _Call, graph: fx.GraphModule) -> Exported:
    captured = constants(graph)
    values = {**call.named, **{f"constant_{i}": call.captured.value(t) for i, t in enumerate(captured)}}
    arguments = [_argument(n, "parameter" if n in _parameters(call) else "buffer", t) for n, t in call.state.items()]
    arguments += [_argument(f"constant_{i}", "constant", t) for i, t in enumerate(captured)]
    arguments += [_argument(name, "input", t) for name, t in call.inputs.items()]
    before = len(call.state)
    rngs: list[Rng] = []
    results: list[Result] = []

    def body(*arrays: Array) -> Sequence[Array]:
        def rng() -> Rng:
            if not rngs:
                rngs.append(Rng(arrays[-1]))
            return rngs[0]

        tracer = Tracer(rng=rng, checks=False)
        bases, tensors = [], []
        for a, array in zip(arguments, arrays, strict=False):
            strides = contiguous_strides(a.shape)
            bases.append(Base(array, a.shape, strides, a.dtype))
            storage = tracer.add_storage(bases[-1], array.size * a.dtype.itemsize)
            tensors.append(torch.empty(0, dtype=a.dtype, device="meta").set_(storage, 0, a.shape, strides))
        after = before + len(captured)
        tracer.constants = {id(t): given for t, given in zip(captured, tensors[before:after], strict=True)}
        returned = iter(GraphTracer(tracer, graph).run(*tensors[:before], *tensors[after:]))
        written = dict.fromkeys((a.name for a, base in zip(arguments, bases, strict=True) if base.written), None)
        named = dict(zip((a.name for a in arguments), tensors, strict=True))
        found = [(name, next(returned), None) for name in call.returned.tensors]
        new = {name: named[name] for name in written} | dict(zip(call.returned.replaced, returned, strict=True))
        found += [(f"new {name}", tensor, name) for name, tensor in new.items()]
        results[:] = [Result(name, tuple(t.shape), t.dtype, of) for name, t, of in found]
        return [tracer.read(t) for _, t, _ in found]

    target = new_target()
    specs = [*((a.shape, a.dtype) for a in arguments), _RANDOM_STATE]
    try:
        built, _ = module.build("".join(c if c.isalnum() else "_" for c in call.name), target, specs, body)
    except NotImplementedError as error:
        reason = str(error).splitlines()[0]
        raise ExportError(
            f"{call.name} can't be exported: {reason}. The device runs such operators on the CPU or between programs: "
            "export what comes before and after it separately."
        ) from error
    if not artifact.drop_last_parameter(built):
        arguments.append(ExportedArgument("random_state", "random state", *_RANDOM_STATE))
    artifact.name(built, [a.name for a in arguments], [r.name for r in results])
    return Exported(
        call.name,
        target.platform,
        tuple(arguments),
        tuple(results),
        call.returned.others,
        call.returned.structure,
        frozenset(target.custom_calls),
        rngs[0].drawn if rngs else 0,
        built,
        values,
    )


def _parameters(call: _Call) -> set[str]:
    return set() if call.module is None else {name for name, _ in call.module.named_parameters()}


def _argument(name: str, kind: str, tensor: torch.Tensor) -> ExportedArgument:
    return ExportedArgument(name, kind, tuple(tensor.shape), tensor.dtype)
