"""Writes to memory that several elements of a tensor share: which operators the CPU lets do it, and with what result.

It looks for dimensions with stride 0 (an expanded tensor) and lets few operators write to those. Windows that overlap
(`unfold`) it does not see. Where the result depends on the order in which it goes through elements, it does so itself:
the write has no program (`SharedElements`), so the call runs on the CPU.
"""

from __future__ import annotations

from typing import Any

from torch_tpu.hlo.strided import Shared

_EXPANDED: dict[str, Shared] = {
    "fill.Scalar": "same",
    "threshold": "same",
    "zero": "same",
    "_index_put_impl": "last changed",
    "_unsafe_index_put": "last changed",
    "index_fill.int_Scalar": "last changed",
    "index_fill.int_Tensor": "last changed",
    "index_put": "last changed",
    "masked_fill.Scalar": "last changed",
    "masked_fill.Tensor": "last changed",
    "tril": "last changed",
    "triu": "last changed",
}
_DRAWN = (
    "bernoulli.p",
    "cauchy",
    "exponential",
    "geometric",
    "log_normal",
    "normal_functional",
    "random",
    "random.from",
    "random.to",
    "uniform",
)
# The same whatever the order is in which elements are written.
_WINDOWS: dict[str, Shared] = {
    **{name: how for name, how in _EXPANDED.items() if "index_put" not in name},
    "clamp": "same",
    "clamp_max": "same",
    "clamp_min": "same",
    "fill.Tensor": "same",
    "relu": "same",
    **dict.fromkeys(_DRAWN, "last"),
}


def written_when_shared(name: str, values: list[Any]) -> Shared | None:
    """What a lowering's write does to an element of memory that several elements of its target show.

    Args:
        values: the operator's arguments, of which the first is the target.
    """
    if name not in _WINDOWS and name not in _EXPANDED and name != "conj_physical":
        return None
    target = values[0]
    if name == "conj_physical" and not target.dtype.is_complex:
        return "same"
    expanded = any(stride == 0 and size > 1 for stride, size in zip(target.stride(), target.shape, strict=True))
    how = (_EXPANDED if expanded else _WINDOWS).get(name)
    return "sum" if "index_put" in name and values[3] else how
