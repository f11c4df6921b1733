"""Traces PyTorch calls into one StableHLO program: the same way for an eager operator, a decomposition or a graph.

The traced code runs on meta tensors, so shapes, dtypes, strides, aliasing and argument errors are PyTorch's own. Beside
each meta storage stands the Array its elements have at this point of the program. A read through a view is a chain
of slices of that Array, a write through a view makes a new one; so views and in-place operators need no lowering.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from torch_tpu.hlo import array as hlo
from torch_tpu.hlo import strided
from torch_tpu.hlo.array import Array, ArrayLike, Number
from torch_tpu.ops.core import derived, registry
from torch_tpu.ops.core.random_bits import Rng
from torch_tpu.ops.core.registry import NoLowering, Spec
from torch_tpu.ops.core.schema import bind, signature, unbind
from torch_tpu.ops.tracing import meta_corrections, uninitialised
from torch_tpu.ops.tracing.cpu_acceptance import check_kinds
from torch_tpu.ops.tracing.cpu_refusals import check_dimension, check_dtype
from torch_tpu.ops.tracing.moving_views import Followed, Way
from torch_tpu.ops.tracing.shared_memory import written_when_shared

StatedCheck = tuple[Array, str, type[Exception], Array | None]


class Base:
    """What a storage holds at this point of the program: an Array, and how its dimensions lie in the storage."""

    __slots__ = ("array", "dtype", "sizes", "strides", "written")

    def __init__(self, array: Array | None, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> None:
        self.array = array
        self.sizes = tuple(sizes)
        self.strides = tuple(strides)
        self.dtype = dtype
        self.written = False

    def value(self) -> Array:
        """The Array; of memory nobody has written yet, zeros."""
        if self.array is None:
            self.array = hlo.zeros(self.sizes, self.dtype)
        return self.array


class Data:
    """A number that is an input of the program: its present value for PyTorch's checks, an Array for lowerings."""

    __slots__ = ("array", "value")

    def __init__(self, value: Number, array: Array) -> None:
        self.value = value
        self.array = array


class Unknown(Data):
    """A number that the program computes: only its Array counts, `value` stands in where PyTorch wants a number."""

    __slots__ = ()

    def __init__(self, array: Array) -> None:
        super().__init__(False if array.dtype is torch.bool else 1.0 if array.dtype.is_floating_point else 1, array)


class Tracer(TorchDispatchMode):
    """Builds the program of whatever runs under it. Only inside `hlo.module.build`."""

    supports_higher_order_operators = True

    def __init__(self, *, rng: Callable[[], Rng], checks: bool) -> None:
        """
        Args:
            rng: gives the program's source of random bits when first asked for.
            checks: whether conditions that lowerings state (index bounds) become outputs of the program.
        """
        super().__init__()
        self.rng = rng
        self.with_checks = checks
        self.constants: dict[int, torch.Tensor] = {}
        self.subgraphs: dict[Any, Any] = {}
        self._bases: dict[int, Base] = {}
        self._alive: list[Any] = []
        self.followed = Followed()
        self._decomposing: list[OpOverload] = []
        # Inside of an operator that is made of others.
        self._within = False
        self.checks: list[StatedCheck] = []

    # --- storages ------------------------------------------------------------------------------------------------

    def add_storage(self, base: Base, nbytes: int) -> torch.UntypedStorage:
        """A meta storage that stands for one with this base."""
        storage = torch.UntypedStorage(nbytes, device="meta")
        self._bases[storage._cdata] = base
        self._alive.append(storage)
        return storage

    def add_host_scalar(self, tensor: torch.Tensor, array: Array) -> None:
        """Gives a 0-d meta tensor the value of a host tensor that is an input of the program."""
        self.fresh(tensor, array)

    def base(self, tensor: torch.Tensor) -> Base:
        storage = tensor.untyped_storage()
        found = self._bases.get(storage._cdata)
        if found is None:
            count = storage.nbytes() // tensor.dtype.itemsize
            found = Base(None, (count,), (1,), tensor.dtype)
            self._bases[storage._cdata] = found
            self._alive.append(storage)
        return found

    def _ways(self, base: Base, tensor: torch.Tensor) -> Sequence[Way]:
        return self.followed.ways(tensor) or [
            strided.view_steps(
                base.sizes,
                base.strides,
                tuple(tensor.shape),
                tensor.stride(),
                int(tensor.storage_offset()),
                base.dtype,
                tensor.dtype,
            )
        ]

    def read(self, tensor: torch.Tensor) -> Array:
        """The elements of a tensor."""
        base = self.base(tensor)
        result = base.value()
        for steps, starts in self._ways(base, tensor):
            result = strided.read(result, steps, starts)
        if tensor.is_conj():
            result = hlo.conj(result)
        return hlo.negate(result) if tensor.is_neg() else result

    def write(self, tensor: torch.Tensor, array: Array, shared: strided.Shared | None = None) -> None:
        """Replaces the elements of a tensor, whatever view of its storage it is.

        Args:
            shared: what becomes of memory that several elements show, where that may be written at all.
        """
        base = self.base(tensor)
        array = self._fit(array, tuple(tensor.shape), tensor.dtype)
        base.written = True
        storage = tensor.untyped_storage()
        whole = tensor.numel() * tensor.element_size() == storage.nbytes()
        # Inputs whose place is data are read by steps for the layout that the storage had at the beginning.
        keeps_layout = self.followed.moves(storage)
        if whole and tensor.numel() and strided.is_dense(tensor.shape, tensor.stride()) and not keeps_layout:
            base.array, base.sizes, base.strides, base.dtype = array, tuple(tensor.shape), tensor.stride(), tensor.dtype
            return
        ways = self._ways(base, tensor)
        operands = [base.value()]
        for steps, starts in ways[:-1]:
            operands.append(strided.read(operands[-1], steps, starts))
        for (steps, starts), operand in zip(reversed(ways), reversed(operands), strict=True):
            array = strided.write(operand, steps, starts, array, shared)
        base.array = array

    def fresh(self, tensor: torch.Tensor, array: Array) -> torch.Tensor:
        """Attaches the value of a new meta tensor; one that isn't dense gets a storage written through its view."""
        array = self._fit(array, tuple(tensor.shape), tensor.dtype)
        storage = tensor.untyped_storage()
        sizes, strides = tuple(tensor.shape), tensor.stride()
        if not strided.is_dense(sizes, strides) or storage.nbytes() != tensor.numel() * tensor.dtype.itemsize:
            if 0 in strides:
                # Expanded: no layout of its own to keep.
                tensor = torch.empty(sizes, dtype=tensor.dtype, device="meta")
                return self.fresh(tensor, array)
            self._bases[storage._cdata] = Base(None, (storage.nbytes() // tensor.dtype.itemsize,), (1,), tensor.dtype)
            self._alive.append(storage)
            self.write(tensor, array)
        else:
            self._bases[storage._cdata] = Base(array, sizes, strides, tensor.dtype)
            self._alive.append(storage)
        return tensor

    @staticmethod
    def _fit(array: ArrayLike, shape: tuple[int, ...], dtype: torch.dtype) -> Array:
        # Under vmap a number is converted like a tensor, and comes out of the lowering as it is.
        array = hlo.as_array(array, dtype)
        if array.shape == shape:
            return array
        if hlo.broadcast_shapes(array.shape, shape) != shape:
            raise RuntimeError(f"output with shape {list(shape)} doesn't match the broadcast shape {list(array.shape)}")
        return hlo.broadcast_to(array, shape)

    # --- calls ---------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: OpOverload | HigherOrderOperator,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self.call(func, args, kwargs or {})

    def call(self, func: OpOverload | HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one operator on meta tensors and appends it to the program; raises NoLowering where nothing fits."""
        if isinstance(func, HigherOrderOperator):
            higher_order = registry.higher_order(func)
            if higher_order is None:
                raise NoLowering(func)
            return higher_order(self, *args, **kwargs)
        if self._within:
            return self._call(func, args, kwargs)
        check_kinds(func, _plain(args), _plain(kwargs))
        self._within = True
        try:
            return self._call(func, args, kwargs)
        finally:
            self._within = False

    def _call(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rule = derived.lowering(func)
        if rule is not None:
            return self._lower(func, rule, bind(func, args, kwargs))
        sig = signature(func)
        if func in _METADATA_ONLY or (sig.is_view and not _is_composite(func)):
            result = func(*args, **kwargs)
            self.followed.follow(func, args, kwargs, result)
            if func in _UNINITIALISED and uninitialised.is_filled():
                self._fill(result)
            return result
        if sig.is_view:
            # Such as reshape, which may copy.
            with self:
                return func.decompose(*args, **kwargs)
        element = derived.foreach_element(func)
        if element is not None:
            return self._foreach(func, element, bind(func, args, kwargs))
        if sig.is_out:
            return self._out(func, bind(func, args, kwargs))
        if func in self._decomposing:
            # Two decompositions that lead to each other (aten.abs and prims.abs) end nowhere.
            raise NoLowering(func)
        self._decomposing.append(func)
        target = args[0] if sig.is_inplace and isinstance(args[0], torch.Tensor) else None
        shape = torch.Size() if target is None else target.shape
        try:
            given = {name: _plain(value) for name, value in kwargs.items() if value is not None}
            result = self._decompose(func, _plain(args), given)
        finally:
            self._decomposing.pop()
        if target is not None and target.shape != shape:
            _refuse_resize(shape, target.shape)
        return result

    def _fill(self, tensor: torch.Tensor) -> None:
        """Gives fresh memory what PyTorch's settings say that it is to hold."""
        base = self.base(tensor)
        base.array = hlo.full(base.sizes, uninitialised.filler(base.dtype), base.dtype)

    def _decompose(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        sig = signature(func)
        decomposition = registry.decomposition(func)
        if decomposition is not None:
            with self:
                result = decomposition(*args, **kwargs)
            if result is not NotImplemented:
                return result
        with self:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        if sig.is_inplace:
            twin = derived.functional(func)
            if twin is not None:
                func(*args, **kwargs)
                result = self.call(twin, args, kwargs)
                _require_cast(result.dtype, args[0].dtype)
                self.write(args[0], self.read(result))
                return args[0]
        prim = getattr(func, "impl_aten", None) or getattr(func, "prim_impl", None)
        if func.namespace == "prims" and prim is not None:
            with self:
                return prim(*args, **kwargs)
        # Such a kernel of a user's operator may be anything, and wants real tensors.
        own = func.namespace in ("aten", "prims", "torch_nn")
        if own and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeExplicitAutograd"):
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        raise NoLowering(func)

    def _lower(self, func: OpOverload, rule: registry.Lowering, values: list[Any]) -> Any:
        sig = signature(func)
        plain = [_plain(v) for v in values]
        check_dtype(rule.name, plain)
        check_dimension(rule.name, sig, plain)
        taken = meta_corrections.for_meta(func, plain)
        args, kwargs = unbind(func, taken)
        target = args[0] if sig.is_inplace and isinstance(args[0], torch.Tensor) else None
        shape = torch.Size() if target is None else target.shape
        try:
            meta = func(*args, **kwargs)
        except NotImplementedError:
            meta = None
        else:
            meta = meta_corrections.as_on_cpu(func, meta, args)
        if target is not None and shape != target.shape:
            _refuse_resize(shape, target.shape)
        fresh = [] if meta is None else self._fresh_results(meta, sig)
        written = derived.written_arguments(func, rule)
        computed = self._computed_dtype(func, args, kwargs) if sig.is_inplace else None
        if computed is not None:
            _require_cast(computed, args[0].dtype)

        operands = [
            self._operand(v) if t is p else hlo.convert(self.read(v), t.dtype)
            for v, p, t in zip(values, plain, taken, strict=True)
        ]
        positional, keyword = unbind(func, operands)
        if "out" in rule.extras:
            specs = [Spec(tuple(t.shape), t.dtype) for t in fresh if t is not None]
            if not specs:
                specs = [Spec(tuple(values[i].shape), values[i].dtype) for i in written if values[i] is not None]
                if computed is not None:
                    specs[0] = Spec(specs[0].shape, computed)
            keyword["out"] = specs[0] if len(specs) == 1 and not sig.returns_list else specs
        if "common" in rule.extras:
            keyword["common"] = _common_dtype(args, kwargs)
        if "rng" in rule.extras:
            keyword["rng"] = self.rng()
        if "check" in rule.extras:
            keyword["check"] = self.check
        gives = rule.function(*positional, **keyword)
        results = [] if gives is None else _flat(gives)

        if meta is None and func._schema.returns:
            made = [torch.empty(r.shape, dtype=r.dtype, device="meta") for r in results]
            made = list(meta_corrections.as_on_cpu(func, made, args))
            for tensor, array in zip(made, results, strict=True):
                self.fresh(tensor, array)
            return made[0] if len(made) == 1 and not sig.returns_list else made
        targets = [t for i in written for t in _flat(values[i])]
        if len(results) != len(fresh) + len(targets):
            raise AssertionError(
                f"the lowering of {func} gives {len(results)} results for {len(fresh)} returned and "
                f"{len(targets)} written tensors"
            )
        replaced: dict[int, torch.Tensor | None] = {}
        for returned, array in zip(fresh, results, strict=False):
            if returned is not None:
                replaced[id(returned)] = None if array is None else self.fresh(returned, array)
        for target, new in zip(targets, results[len(fresh) :], strict=True):
            if new is not None and target is not None:
                self.write(target, new, written_when_shared(rule.name, values))
        return _replace(meta, replaced)

    def _computed_dtype(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
        """The dtype in which an in-place operator computes, before it rounds to the tensor's own.

        Meta kernels check some in-place operators only; their functional twins promote as PyTorch does.
        """
        twin = derived.functional(func)
        if twin is None or registry.find(func) is not None or (func in _NUMBER_AS_IT_IS and not args[0].dim()):
            return None
        try:
            result = twin(*args, **kwargs)
        except NotImplementedError:
            return None
        return result.dtype if isinstance(result, torch.Tensor) else None

    def _fresh_results(self, meta: Any, sig: Any) -> list[torch.Tensor | None]:
        """The new tensors an operator returns, in the places of its schema; None for a gradient nobody asked for."""
        if isinstance(meta, torch.Tensor):
            return [] if sig.returns_alias and sig.returns_alias[0] else [meta]
        results: list[torch.Tensor | None] = []
        for i, item in enumerate(meta if isinstance(meta, (list, tuple)) else []):
            aliased = sig.returns_alias[0 if sig.returns_list else i] if sig.returns_alias else False
            if not aliased and (isinstance(item, torch.Tensor) or (item is None and sig.returns_tensor[i])):
                results.append(item)
        return results

    def _foreach(self, func: OpOverload, element: OpOverload, values: list[Any]) -> Any:
        rule = registry.find(element)
        assert rule is not None
        in_place = signature(func).is_inplace
        arguments = signature(element).arguments
        known = {a.name for a in arguments}
        results = []
        for call in derived.foreach_calls(func, values):
            names = {a.name: v for a, v in zip(signature(func).arguments, call, strict=True)}
            # addcmul and addcdiv: what foreach calls `scalars` is the keyword `value` of the single operator.
            if "scalars" in names and "value" in known:
                names["value"] = names.pop("scalars")
            # Arguments of another name (`other`, `exponent`) are the same by their place.
            unnamed = {k: v for k, (name, v) in enumerate(names.items()) if name not in known}
            own = [
                names.get(a.name, a.default if a.keyword_only else unnamed.get(k, a.default))
                for k, a in enumerate(arguments)
            ]
            result = self._lower(element, rule, own)
            if in_place:
                if call[0].dtype.is_complex and not result.dtype.is_complex:
                    raise RuntimeError(f"in-place {element} is not supported for complex tensors")
                _require_cast(result.dtype, call[0].dtype)
                self.write(call[0], self.read(result), written_when_shared(rule.name, own))
            results.append(result)
        return None if in_place else results

    def _out(self, func: OpOverload, values: list[Any]) -> Any:
        twin = derived.functional(func)
        if twin is None:
            raise NoLowering(func)
        arguments = signature(func).arguments
        given = {a.name: v for a, v in zip(arguments, values, strict=True) if not a.is_out}
        outs = [v for a, v in zip(arguments, values, strict=True) if a.is_out]
        args, kwargs = unbind(twin, [given.get(a.name, a.default) for a in signature(twin).arguments])
        results = _flat(self.call(twin, args, kwargs))
        for target, result in zip(outs, results, strict=True):
            if result is None:
                continue  # a gradient nobody asked for
            _require_cast(result.dtype, target.dtype)
            if target.shape != result.shape:
                target.resize_(result.shape)
            self.write(target, self.read(result))
        return outs[0] if len(outs) == 1 else tuple(outs)

    def _operand(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.read(value)
        if isinstance(value, Data):
            return value.array
        if isinstance(value, (list, tuple)):
            return [self._operand(v) for v in value]
        return value

    def check(
        self, condition: Array, message: str, error: type[Exception] = RuntimeError, value: Array | None = None
    ) -> None:
        """States a run-time condition; `{}` in the message stands for the 0-d `value`."""
        if self.with_checks:
            self.checks.append((condition, message, error, value))


# Operators that only make or describe memory: the meta kernel says it all.
def _refuse_resize(shape: Sequence[int], broadcast: Sequence[int]) -> NoReturn:
    """Raises what the CPU does where an in-place operator would have to resize: meta kernels do, if it is empty."""
    raise RuntimeError(f"output with shape {list(shape)} doesn't match the broadcast shape {list(broadcast)}")


_UNINITIALISED = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_permuted.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    }
)
_METADATA_ONLY = _UNINITIALISED | frozenset(
    {
        torch.ops.aten.sym_size.int,
        torch.ops.aten.sym_stride.int,
        torch.ops.aten.sym_numel.default,
        torch.ops.aten.sym_storage_offset.default,
        torch.ops.aten.resize_.default,
        torch.ops.aten.as_strided_.default,
        torch.ops.aten.transpose_.default,
        torch.ops.aten.t_.default,
        torch.ops.aten.squeeze_.default,
        torch.ops.aten.squeeze_.dim,
        torch.ops.aten.squeeze_.dims,
        torch.ops.aten.unsqueeze_.default,
    }
)


# A tensor without dimensions stays as it is, whatever its dtype.
_NUMBER_AS_IT_IS = frozenset({torch.ops.aten.cumsum_.default, torch.ops.aten.cumprod_.default})


def _require_cast(result: torch.dtype, target: torch.dtype) -> None:
    if not torch.can_cast(result, target):
        raise RuntimeError(f"result type {result} can't be cast to the desired output type {target}")


def _is_composite(func: OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _plain(value: Any) -> Any:
    """`value` with each Data replaced by its present number."""
    if isinstance(value, Data):
        return value.value
    if isinstance(value, tuple):
        return tuple(_plain(v) for v in value)
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value


def _flat(results: Any) -> list[Any]:
    if isinstance(results, (list, tuple)):
        return [leaf for r in results for leaf in _flat(r)]
    return [results]


def _replace(meta: Any, replaced: dict[int, torch.Tensor | None]) -> Any:
    if isinstance(meta, torch.Tensor):
        return replaced.get(id(meta), meta)
    if isinstance(meta, (list, tuple)):
        items = [_replace(m, replaced) for m in meta]
        return items if isinstance(meta, list) else tuple(items)
    return meta


def _common_dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype:
    from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

    operands = [
        v
        for v in _flat([list(args), list(kwargs.values())])
        if isinstance(v, (torch.Tensor, bool, int, float, complex))
    ]
    tensors = [v for v in operands if isinstance(v, torch.Tensor)]
    for other in tensors[1:]:
        # Refuses what PyTorch's rules in Python let through: uint16, uint32 or uint64 with another integer dtype.
        torch.result_type(tensors[0], other)
    return elementwise_dtypes(*operands, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)[1]
