"""Calls like an earlier one whose program is *simple*: it writes nothing and returns one contiguous tensor.

Most calls of a model are: every tensor is all that its storage holds, the rest are numbers, flags and names. `Operator`
recognises such a call by a short key and runs it here, without a CallSignature, in two thirds of the time. What is not
found here takes the general way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_tpu import metrics
from torch_tpu.eager import execute, graph, mode
from torch_tpu.eager.execute import Unsupported
from torch_tpu.eager.graph import LARGE, LONGEST
from torch_tpu.eager.plan import Plan
from torch_tpu.eager.recent import Recent
from torch_tpu.eager.signature import CallSignature
from torch_tpu.runtime.client import Buffer
from torch_tpu.tensor.errors import translate
from torch_tpu.tensor.storage import Value, new_contiguous

# Types whose values go into a key as they are: in one place of a call, none equals a value of another type.
PLAIN = frozenset({int, str, type(None), torch.dtype})
# In a key, before a tensor: it shares the storage of the tensor before it. Where the key does not tell what shares a
# storage, the plan is one for separate storages, which is right all the same, because nothing is written.
SHARED = object()
# In a key, behind the type of a number that not every dtype of integers has; the others need no look at them.
ANY = object()
LAST_INT8 = torch.iinfo(torch.int8).max

_counters = metrics.counts.counters
_current = graph.current
plans: Recent = execute.simple_plans


def keep(key: list[Any], plan: Plan | Unsupported, sig: CallSignature) -> None:
    """Runs later calls with this key by this plan, if it is simple and the key says all it depends on."""
    if isinstance(plan, Unsupported) or not plan.is_simple or plan.uses_rng:
        return
    operator = key[0]
    if plan.reads_precision and not operator.reads_precision:
        operator.reads_precision = True  # from now on its keys have the precision
    elif len(sig.storages) - key.count(SHARED) == len({id(s) for s in sig.storages}):
        plans.keep(tuple(key), plan)


def record(plan: Plan, values: Sequence[Any], data: Sequence[Any]) -> torch.Tensor:
    """Records a call in this thread's graph.

    Raises:
        NotReadyError: where the graph can't read one of the values as it is.
    """
    pending = _current()
    result = pending.record(plan, values, [(data[i],) for i, _ in plan.data] if plan.numbers else None)
    _counters["compile_cache_hit"] += 1
    if pending.nbytes >= LARGE or len(pending.operators) >= LONGEST:
        pending.grown()
    returned = plan.returned
    return new_contiguous(returned.sizes, returned.dtype, result)  # type: ignore[arg-type]


def run(plan: Plan, values: Sequence[Any], data: Sequence[Any]) -> torch.Tensor:
    """Runs a call at once.

    Raises:
        NotReadyError: where nobody has written one of the values.
    """
    arguments: list[Buffer] = []
    for i in plan.bases:
        array = values[i].array
        if array is None:
            raise graph.NotReadyError
        arguments.append(array)
    for i, dtype in plan.data:
        arguments.append(execute.number_buffer(data[i], dtype))
    try:
        results = (plan.executable or plan.compiled())(arguments)
        if mode.blocking:
            results[0].block_until_ready()
    except Exception as error:
        raise translate(error) from error
    _counters["compile_cache_hit"] += 1
    _counters["execute"] += 1
    returned = plan.returned
    return new_contiguous(returned.sizes, returned.dtype, Value(results[0], returned.geometry))
