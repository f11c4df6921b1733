"""`ProcessGroup` of the backend `tpu_dist`: the methods that `torch.distributed`, DDP, FSDP and DTensor call.

Each writes what a collective returns into the tensors it was given; tensors of the CPU go to a gloo group of their own.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from torch_tpu.distributed import groups, host_engine, joining, program_engine
from torch_tpu.distributed.agreement import Agreement
from torch_tpu.distributed.channel import Channel
from torch_tpu.distributed.values import write
from torch_tpu.distributed.work import Work
from torch_tpu.tensor.storage import value_of

Tensors = Sequence[torch.Tensor]
Function = TypeVar("Function", bound=Callable[..., Any])
_CPU = torch.device("cpu")
# Its stubs give each method all the forms that C++ has; PyTorch calls one.
_ProcessGroup: Any = dist.ProcessGroup


def _first(arguments: Any) -> torch.Tensor | None:
    """The first tensor among arguments: lists may be empty on some ranks."""
    if isinstance(arguments, torch.Tensor):
        return arguments
    if isinstance(arguments, (list, tuple)):
        return next((found for found in map(_first, arguments) if found is not None), None)
    return None


def _of_device(method: Function) -> Function:
    """A method for tensors of the device; those of the CPU take the same method of gloo's group."""

    @functools.wraps(method)
    def call(self: TpuProcessGroup, *args: Any, **kwargs: Any) -> Any:
        tensor = _first(args) if args else _first(list(kwargs.values()))
        if tensor is not None and tensor.device.type == "cpu":
            return getattr(self.cpu, method.__name__)(*args, **kwargs)
        with torch.no_grad():
            return method(self, *args, **kwargs)

    return call  # type: ignore[return-value]


def _write(targets: Tensors, results: Tensors) -> None:
    for target, result in zip(targets, results, strict=True):
        write(target, value_of(result.untyped_storage()))


class _Backend:
    """What `_get_backend` gives for the device: what PyTorch asks a C++ backend for."""

    supports_splitting = True
    supports_coalescing = False
    supports_time_estimate = False
    options = None

    def __init__(self, group: TpuProcessGroup) -> None:
        self._group = group

    def name(self) -> str:
        return "tpu_dist"

    def rank(self) -> int:
        return self._group.rank()

    def size(self) -> int:
        return self._group.size()

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """It is connected."""

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Ranks outside of a new group have nothing to do."""

    def _set_sequence_number_for_group(self) -> None:
        """Numbers begin at 1 everywhere."""

    def _set_default_timeout(self, timeout: datetime.timedelta) -> None:
        self._group.set_timeout(timeout)


class TpuProcessGroup(_ProcessGroup):
    """A group of processes with one device each.

    Attributes:
        ranks: of its members in the world, by their rank in the group.
        cpu: the group for tensors of the CPU.
        gloo: what moves tensors of the device, where their memory is the host's.
        collectives, peers: where those begin, and where sends and receives begin.
        engine: the module whose functions begin them.
    """

    def __init__(self, store: Any, rank: int, ranks: Sequence[int], timeout: datetime.timedelta) -> None:
        size = len(ranks)
        super().__init__(rank, size)
        self.ranks = list(ranks)
        self.timeout = timeout
        self._own_store = store
        self._splits = 0
        self._backend = _Backend(self)
        for_cpu, self.gloo = (
            c10d.ProcessGroupGloo(dist.PrefixStore(f"{name}/", store), rank, size, timeout) for name in ("cpu", "tpu")
        )
        # ProcessGroupGloo itself has the old names of methods only.
        self.cpu = dist.ProcessGroup(store, rank, size)
        # A group's name is kept by its C++ backends. Objects are sent as tensors of the first kind of device.
        for group in (self.cpu, self):
            group._register_backend(_CPU, dist.ProcessGroup.BackendType.GLOO, for_cpu)
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._register_backend(torch.device("tpu"), dist.ProcessGroup.BackendType.CUSTOM, self.gloo)
        self.bound_device_id = torch.device("tpu", 0)
        agreement = Agreement(dist.PrefixStore("agreement/", store), rank, self.ranks, timeout, self.gloo)
        self.collectives = Channel(agreement)
        self.peers = Channel(agreement)
        self.engine: Any = program_engine if joining.engine() == "xla" else host_engine
        groups.opened(self)

    def getBackendName(self) -> str:
        return "tpu_dist"

    def get_group_store(self) -> Any:
        return self._own_store

    def getSize(self) -> int:
        return len(self.ranks)

    def getRank(self) -> int:
        return self.rank()

    def _get_backend(self, device: torch.device) -> Any:
        return self._backend if torch.device(device).type == "tpu" else super()._get_backend(device)

    # --- reductions --------------------------------------------------------------------------------------------------

    @_of_device
    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        results, job = self.engine.all_reduce(self, tensors, op)
        _write(tensors, results)
        return Work([job], list(tensors))

    @_of_device
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        results, job = self.engine.all_reduce(self, tensors, op)
        _write(tensors, results)
        return Work([job], list(tensors))

    @_of_device
    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        results, job = self.engine.reduce(self, tensors[0], opts.reduceOp, opts.rootRank)
        _write(tensors[: len(results)], results)
        return Work([job], list(tensors))

    @_of_device
    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Work:
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        results, job = self.engine.reduce_scatter(self, [given], [output.shape], op)
        _write([output], results)
        return Work([job], [output])

    @_of_device
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        results, job = self.engine.reduce_scatter(self, inputs, [o.shape for o in outputs], op)
        _write(outputs, results)
        return Work([job], list(outputs))

    @_of_device
    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work:
        results, job = self.engine.reduce_scatter_list(self, inputs[0], opts.reduceOp)
        _write(outputs, results)
        return Work([job], list(outputs))

    # --- what moves --------------------------------------------------------------------------------------------------

    @_of_device
    def broadcast(self, tensors: Tensors, opts: Any) -> Work:
        results, job = self.engine.broadcast(self, tensors, opts.rootRank)
        if self.rank() != opts.rootRank:
            _write(tensors, results)
        return Work([job], list(tensors))

    @_of_device
    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Work:
        results, job = self.engine.all_gather(self, [given], [output.shape])
        _write([output], results)
        return Work([job], [output])

    @_of_device
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        results, job = self.engine.all_gather(self, inputs, [o.shape for o in outputs])
        _write(outputs, results)
        return Work([job], list(outputs))

    @_of_device
    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        jobs = []
        for tensors, given in zip(outputs, inputs, strict=True):
            results, job = self.engine.all_gather_list(self, given, [t.shape for t in tensors])
            _write(tensors, results)
            jobs.append(job)
        return Work(jobs, [list(tensors) for tensors in outputs])

    @_of_device
    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        """The other way round than `allgather`: a list for each rank."""
        jobs = []
        for tensors, given in zip(zip(*outputs, strict=True), inputs, strict=True):
            results, job = self.engine.all_gather_list(self, given, [t.shape for t in tensors])
            _write(tensors, results)
            jobs.append(job)
        return Work(jobs, [list(tensors) for tensors in outputs])

    @_of_device
    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Work:
        results, job = self.engine.gather(self, inputs[0], opts.rootRank)
        if results:
            _write(outputs[0], results)
        return Work([job], [list(tensors) for tensors in outputs])

    @_of_device
    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work:
        results, job = self.engine.scatter(self, inputs[0] if inputs else [], outputs[0], opts.rootRank)
        _write(outputs, results)
        return Work([job], list(outputs))

    @_of_device
    def all_to_all_single(
        self, output: torch.Tensor, given: torch.Tensor, received: Sequence[int], sent: Sequence[int], opts: Any = None
    ) -> Work:
        results, job = self.engine.all_to_all(self, given, output.shape, received, sent)
        _write([output], results)
        return Work([job], [output])

    @_of_device
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        results, job = self.engine.all_to_all_list(self, inputs, [o.shape for o in outputs])
        _write(outputs, results)
        return Work([job], list(outputs))

    # The names before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # --- between two ranks -------------------------------------------------------------------------------------------

    @_of_device
    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> Work:
        return Work([self.engine.send(self, tensors[0], peer, tag)], list(tensors))

    @_of_device
    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> Work:
        results, job = self.engine.receive(self, tensors[0], peer, tag)
        _write(tensors, results)
        return Work([job], list(tensors))

    @_of_device
    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        results, job = self.engine.receive(self, tensors[0], None, tag)
        _write(tensors, results)
        return Work([job], list(tensors))

    # --- the group ---------------------------------------------------------------------------------------------------

    def barrier(self, opts: Any = None) -> Work:
        torch.tpu.synchronize()  # type: ignore[attr-defined]
        timeout = getattr(opts, "timeout", None)
        work = Work([self.engine.barrier(self)], [], blocks=True)
        if timeout and timeout.total_seconds() > 0:
            work.wait(timeout)
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        """What follows begins one by one; gloo has no form for many."""
        self._began = self.collectives.count

    def _end_coalescing(self, device: torch.device) -> Work:
        """The work of what was called since `_start_coalescing`."""
        return Work(self.collectives.since(self._began), [])

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: datetime.timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> TpuProcessGroup | None:
        """A group of some of this one's ranks; None on the others. All ranks of this one call it."""
        members = sorted(ranks)
        self._splits += 1
        if self.rank() not in members:
            return None
        # The ranks may have been given different names: those count the groups that a rank is in.
        place = f"split/{self._splits}/{'_'.join(map(str, members))}"
        name = group_name or f"{self.group_name}/{place}"
        made = TpuProcessGroup(
            dist.PrefixStore(f"{place}/", self._own_store),
            members.index(self.rank()),
            [self.ranks[r] for r in members],
            timeout or self.timeout,
        )
        made._set_group_name(name)
        made._set_group_desc(group_desc or "undefined")
        return made

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self.timeout = self.collectives.agreement.timeout = timeout
        for gloo in (self.gloo, super()._get_backend(_CPU)):
            gloo._set_default_timeout(timeout)

    def _get_sequence_number_for_group(self) -> int:
        return self.collectives.count

    def shutdown(self) -> None:
        """Ends what has begun."""
        self.collectives.close()
        self.peers.close()

    def abort(self) -> None:
        """Gives up what has begun."""
        self.collectives.abort()
        self.peers.abort()


def create(options: Any, backend_options: Any = None) -> TpuProcessGroup:
    """What `torch.distributed` calls for the backend `tpu_dist`."""
    members = list(options.global_ranks_in_group)
    made = TpuProcessGroup(
        options.store, options.group_rank, members or list(range(options.group_size)), options.timeout
    )
    if not members:
        joining.prepare(options.store, made.rank(), made.size(), made.collectives.agreement)
    return made
