"""Which XLA options suit which programs on XLA:CPU: a table of what a program consists of and what was measured.

Tried without gain, or with a loss elsewhere: oneDNN, YNN fusions everywhere (gelu 3 times as slow, attention 1.2),
LLVM's level.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

Options = Mapping[str, str | bool | int | float]

_MOVES = frozenset({"reshape", "transpose", "broadcast_in_dim", "constant", "slice"})
_CONVERSION = _MOVES | {"convert"}
_FUNCTIONS = frozenset({"exponential", "exponential_minus_one", "log", "log_plus_one", "logistic", "tanh", "erf"})
_EXTREMES = frozenset({"maximum", "minimum", "clamp"})  # whose NaN another library may lose
_ARITHMETIC = _CONVERSION | {
    *("abs", "add", "and", "compare", "divide", "maximum", "minimum", "multiply", "negate", "not", "or", "select"),
    *("subtract", "is_finite", "rsqrt", "sqrt"),
}


# For programs of many operators: XLA's default order of operations keeps more of them ready to run at once, and so
# more temporaries alive (a CNN's backward 8.0 → 5.3 MB); the time of a GPT's, a CNN's and an LSTM's step is the same.
LEAST_MEMORY: Options = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


def options_for(operations: Collection[str]) -> Options:
    """The options for a program of these StableHLO (and CHLO) operations, named without their dialect."""
    used = set(operations)
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
