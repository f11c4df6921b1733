"""Which XLA options suit which programs on XLA:CPU: a table of what a program consists of and what was measured.

Tried without gain, or with a loss elsewhere: oneDNN, YNN fusions everywhere (gelu 3 times as slow, attention 1.2),
LLVM's level where arrays are large.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

Options = Mapping[str, str | bool | int | float]

_MOVES = frozenset({"reshape", "transpose", "broadcast_in_dim", "constant", "slice"})
_CONVERSION = _MOVES | {"convert"}
_FUNCTIONS = frozenset({"exponential", "exponential_minus_one", "log", "log_plus_one", "logistic", "tanh", "erf"})
_EXTREMES = frozenset({"maximum", "minimum", "clamp"})  # whose NaN another library may lose
_ARITHMETIC = _CONVERSION | {
    *("abs", "add", "and", "compare", "divide", "maximum", "minimum", "multiply", "negate", "not", "or", "select"),
    *("subtract", "is_finite", "rsqrt", "sqrt"),
}


# What YNN, another library, computes as exactly.
_EXACT = frozenset({"add", "subtract", "multiply", "divide", "negate"})
# What `hlo.array.sqrt` is made of.
_ROOT = frozenset({"sqrt", "add"})

# Programs without larger arrays run in microseconds, whatever code is made of them: compiling them matters more.
_SMALL, _TINY = 2**12, 2**8
# What the old emitters would give other results for than larger programs have: 0 for negative powers of the integer -1;
# another last digit of |z|, so that the gradient of a list's largest |z|, which looks for it again, would find none.
_OTHER_CODE = frozenset({"power", "modulus"})
# The last simplification sees quotients behind their barriers (`hlo.array.divide`) unless they are part of a fusion, as
# the new emitters make everything.
_CHEAP: Options = {
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_disable_hlo_passes": "simplification after layout assignment",
}
_CHEAPEST: Options = {**_CHEAP, "xla_backend_optimization_level": 0}

# Lengths of the innermost loop that XLA makes poor code of, and from which YNN's is good.
_SHORT, _SHORT_FOR_YNN = 128, 16


# For programs of many operators: XLA's default order of operations keeps more of them ready to run at once, and so
# more temporaries alive (a CNN's backward 8.0 → 5.3 MB); the time of a GPT's, a CNN's and an LSTM's step is the same.
LEAST_MEMORY: Options = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


# XLA:CPU leaves a product of bfloat16 to YNN, which can't read a transposed left operand, and folds transposes into
# products once more after that decision. Unfolded, products are no slower.
_UNFOLDED: Options = {"xla_disable_hlo_passes": "transpose-folding"}


def options_for(operations: Mapping[tuple[str, tuple[int, ...]], int]) -> Options:
    """The options for a program of these StableHLO (and CHLO) operations, as `hlo.module.operations` counts them."""
    # Nothing remains of a barrier.
    options = _for_speed({key: count for key, count in operations.items() if key[0] != "optimization_barrier"})
    has_bfloat16_dot = any(name == "bfloat16_dot" for name, _ in operations)
    return _together(options, _UNFOLDED) if has_bfloat16_dot else options


def _together(first: Options, second: Options) -> Options:
    """Both; passes that either switches off are off."""
    disabled = [o["xla_disable_hlo_passes"] for o in (first, second) if "xla_disable_hlo_passes" in o]
    return {**first, **second, "xla_disable_hlo_passes": ",".join(map(str, disabled))}


def _for_speed(operations: Mapping[tuple[str, tuple[int, ...]], int]) -> Options:
    used = {name for name, _ in operations if name != "parameter"}
    largest = max((math.prod(shape) for _, shape in operations), default=0)
    if largest <= _SMALL and not used & _OTHER_CODE:
        # Compiling 41 small programs takes 2.1 s of processor time by default, 1.1 s with the cheap options, 0.6 s with
        # the cheapest, whose code is slower by at most 1 µs for 16×16 elements (and by 12 µs for 64×64).
        return _CHEAPEST if largest <= _TINY and "while" not in used else _CHEAP
    if _suits_ynn({key: count for key, count in operations.items() if math.prod(key[1]) == largest}):
        return {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_ELTWISE"}
    if "convert" in used and used <= _CONVERSION:
        # float32 to bfloat16, 2 million numbers: 0.56 → 0.20 ms.
        return {"xla_cpu_use_fusion_emitters": False}
    if used & _FUNCTIONS and used <= _ARITHMETIC | _FUNCTIONS:
        # 1 million numbers: gelu 0.57 → 0.45 ms, its gradient 1.15 → 0.90, silu 0.62 → 0.39, its gradient 0.83 → 0.62.
        return {"xla_cpu_prefer_vector_width": 512}
    if {"convolution", "reverse"} <= used and not used & (_FUNCTIONS | _EXTREMES):
        # A flipped kernel is the sign of a convolution's gradient. A CNN's backward 60 → 42 ms; its forward would take
        # 25 ms instead of 22.
        return {
            "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_DOT,LIBRARY_FUSION_TYPE_ELTWISE,"
            "LIBRARY_FUSION_TYPE_REDUCE"
        }
    return {}


def _suits_ynn(largest: Mapping[tuple[str, tuple[int, ...]], int]) -> bool:
    """Whether YNN is faster: for one operation that XLA has nothing to fuse with, and where innermost loops are short.

    float32 16×64×32×32, one thread: x + y 0.34 → 0.17 ms, -x 0.29 → 0.11, batch_norm's x·scale + shift 0.27 → 0.12.
    1024×1024: x + y 0.34 → 0.19, but x + alpha·y 0.16 → 0.19.

    Args:
        largest: a program's operations on its largest arrays.
    """
    computed = {key: count for key, count in largest.items() if key[0] not in _MOVES and key[0] != "parameter"}
    count = sum(computed.values())
    moved = {name for name, _ in largest} & (_MOVES - {"reshape"})
    if {name for name, _ in computed} == _ROOT and count == 2 and moved == {"constant"}:
        return True
    if not count or not {name for name, _ in computed} <= _EXACT:
        return False
    if not moved:
        return count == 1
    lengths = [shape[-1] for name, shape in largest if name == "parameter" and shape]
    return (
        count <= 2
        and moved == {"broadcast_in_dim"}
        and all(length < _SHORT for length in lengths)
        and all(shape[-1] >= _SHORT_FOR_YNN for _, shape in computed if shape)
    )
