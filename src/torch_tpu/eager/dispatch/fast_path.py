"""The fast path: calls like an earlier one whose program writes nothing and returns one contiguous tensor.

Most calls of a model are: every tensor is all that its storage holds, the rest are scalars, flags and names. `Operator`
recognises such a call by a key that is shorter than a CallSignature's, and launches its plan in two thirds of the time.
What is not found here takes the general path, which adds it.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_tpu.eager.program.call_signature import CallSignature
from torch_tpu.eager.program.plan import Plan
from torch_tpu.eager.program.plan_table import Unsupported, fast_path_plans

# Types whose values go into a key as they are: in one place of a call, none equals a value of another type.
PLAIN = frozenset({int, str, type(None), torch.dtype})
# In a key, before a tensor: it shares the storage of the tensor before it. Where the key does not tell what shares a
# storage, the plan is one for separate storages, which is right all the same, because nothing is written.
SHARED = object()
# In a key, behind the type of a number that not every dtype of integers has; the others need no look at them.
ANY = object()
LAST_INT8 = torch.iinfo(torch.int8).max


def keep(key: list[Any], plan: Plan | Unsupported, call: CallSignature) -> None:
    """Runs later calls with this key by this plan, if it is simple and the key says all it depends on."""
    if isinstance(plan, Unsupported) or not plan.is_simple or plan.uses_rng:
        return
    operator = key[0]
    if plan.reads_precision and not operator.reads_precision:
        operator.reads_precision = True  # from now on its keys have the precision
    elif len(call.storages) - key.count(SHARED) == len({id(s) for s in call.storages}):
        fast_path_plans.keep(tuple(key), plan)
