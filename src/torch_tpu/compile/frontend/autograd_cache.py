"""AOTAutograd's cache: a graph that an earlier process differentiated and partitioned comes back with its programs.

PyTorch keeps the entries (in Inductor's cache folder) and names them by Dynamo's graph, the inputs and its settings;
`enabled_for` adds what this package brings. An entry holds the forward and the backward graph as bytes, which are read
when a program has to be traced: its plan is on disk under the bytes' name (`eager.program.stored_plans`), and so is its
executable.

Entries are pickles, which can run code, and PyTorch looks at no owner and no mode. So the cache is used only where its
folder, all that is in it and what lies above are as `runtime.private_folder` wants them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._functorch import config
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
from torch._guards import TracingContext
from torch._inductor.codecache import resolve_pre_grad_pass_timing
from torch._inductor.output_code import OutputCode
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import GraphModule

from torch_tpu import metrics
from torch_tpu.compile.buckets.bucketed_program import BucketedProgram
from torch_tpu.compile.layers.layered_program import Layers
from torch_tpu.compile.program.graph_program import GraphProgram, Stored
from torch_tpu.compile.program.stored_graph import NAMESPACES, UnstorableGraph
from torch_tpu.metrics import programs
from torch_tpu.metrics.user_warnings import warn
from torch_tpu.runtime import fingerprint, private_folder
from torch_tpu.runtime.process_client import client

BACKWARD = ", backward"


class CompiledGraph(OutputCode):
    """A graph's program as AOTAutograd calls and stores it.

    Args:
        part: which of the captured graph's: behind its title in reports.
    """

    def __init__(self, program: GraphProgram | BucketedProgram | Layers, part: str) -> None:
        super().__init__()
        # AOTAutograd gives its arguments as one list; on the object, because wrappers copy only what is there.
        self._boxed_call = True
        self._program: GraphProgram | BucketedProgram | Layers | None = program
        self._has_layers = isinstance(program, Layers)
        self._part = part
        self._stored: Stored | None = None

    def __call__(self, inputs: Sequence[Any]) -> Any:
        assert self._program is not None
        if isinstance(self._program, Layers):
            assert isinstance(inputs, list)
            return self._program(inputs)
        return self._program(*inputs)

    def prepare_for_serialization(self) -> None:
        """Called on a copy."""
        with _errors_told():
            assert isinstance(self._program, (GraphProgram, Layers))
            try:
                self._stored = self._program.stored()
            except UnstorableGraph as error:
                raise BypassAOTAutogradCache(str(error)) from error
            self._program = None

    def post_compile(self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: Any) -> None:
        """Called when an entry was found; `graph_kwargs` has the title of the graph that was looked up."""
        with _errors_told():
            if self._program is None:
                assert self._stored is not None
                title = f"{graph_kwargs['compile_region_name']}{self._part}"
                programs.captured(title, why_again())
                if self._has_layers:
                    self._program = Layers(self._stored, title)
                else:
                    self._program = GraphProgram(self._stored, title, self._part == BACKWARD)


@contextlib.contextmanager
def _errors_told() -> Iterator[None]:
    """Around what PyTorch calls for its cache: it drops errors there, and would silently compile again each time."""
    try:
        yield
    except BypassAOTAutogradCache:
        raise
    except Exception as error:
        warn(
            f"internal error of torch_tpu: a graph can't go through AOTAutograd's cache and is compiled anew in each "
            f"process ({type(error).__name__}: {error})."
        )
        raise


def why_again() -> str:
    """Why Dynamo captures a function again; empty the first time."""
    from torch._dynamo.utils import get_metrics_context

    # What Dynamo keeps for its own reports while it compiles; there is nothing public.
    return getattr(get_metrics_context(), "_metrics", {}).get("recompile_reason") or ""


def keep_saved_values() -> None:
    """Says that backward overwrites nothing that forward saved, while forward is compiled.

    PyTorch refuses `retain_graph=True` otherwise. What a program may overwrite is found out when it runs.
    """
    context = TracingContext.try_get()
    donated = getattr(getattr(context, "fw_metadata", None), "bw_donated_idxs", None)
    if donated:
        donated.clear()


@contextlib.contextmanager
def enabled_for(graph: GraphModule, storable: bool) -> Iterator[None]:
    """AOTAutograd's cache serves this backend, if the graph is all that its compiled form depends on.

    Args:
        storable: its programs can be stored; those that pad sizes need PyTorch's symbols for them.

    It does not where programs are kept nowhere, or bear lines of the user's script, or where an operator is the user's,
    whose derivative may have been written anew. Nor where an input is a changing float: an entry may hold for one value
    alone, and PyTorch compares only integers with those that it was made for. Nor where others may have written
    entries.
    """
    usable = (
        storable
        and config.enable_autograd_cache
        and client().disk_cache is not None
        and not client().names_operators
        and resolve_pre_grad_pass_timing() == "late"
        and not _has_changing_float(graph)
        and not any(_is_foreign(n.target) for g in graph.modules() if isinstance(g, GraphModule) for n in g.graph.nodes)
        and _is_private()
    )
    # An attribute of the graph is part of its name in the cache.
    graph.torch_tpu = (  # type: ignore[assignment]
        client().fingerprint,
        fingerprint.own_sources(),
        _attention_settings(),
    )
    with config.patch(
        enable_autograd_cache=usable,
        # Entries hold the compiled graphs, not keys of Inductor's cache.
        bundled_autograd_cache=usable,
        # So that backward is part of the entry. Its program is made when it first runs.
        force_non_lazy_backward_lowering=True,
    ):
        yield


# Folders that the user was warned of.
_warned: set[Path] = set()
_MOST_WARNED = 64


def _is_private() -> bool:
    """Whether nobody but the user can have written entries. Makes their folder, which PyTorch would by the umask."""
    whole = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()).absolute()
    try:
        private_folder.make(whole / "aotautograd")
        private_folder.check_tree(whole / "aotautograd")
    except private_folder.NotPrivate as error:
        metrics.count("autograd_cache_refused")
        if whole not in _warned and len(_warned) < _MOST_WARNED:
            _warned.add(whole)
            warn(
                f"torch_tpu does not use AOTAutograd's cache in {whole} and captures every graph again: {error}. Files "
                "that somebody else wrote there would run as code. If you trust what is there, "
                f"`{error.remedy}` makes it usable. TORCHINDUCTOR_CACHE_DIR chooses another folder."
            )
        return False
    except OSError:
        return False  # nothing can be kept there
    return True


def _is_foreign(target: Any) -> bool:
    if isinstance(target, OpOverloadPacket):
        return target._qualified_op_name.partition("::")[0] not in NAMESPACES
    return isinstance(target, OpOverload) and target.namespace not in NAMESPACES


def _has_changing_float(graph: GraphModule) -> bool:
    """Whether a float that changes from call to call is an input, as a tensor of which Dynamo knows the number."""
    values = (n.meta.get("example_value") for n in graph.graph.find_nodes(op="placeholder"))
    return any(isinstance(getattr(value, "item_memo", None), torch.SymFloat) for value in values)


def _attention_settings() -> tuple[bool, ...]:
    """By which scaled_dot_product_attention chooses its operator."""
    return (
        torch._C._get_math_sdp_enabled(),
        torch._C._get_overrideable_sdp_enabled(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
    )
