"""Steps that compute a new tensor: arithmetic, comparisons, reductions, scans, orders, products of matrices."""

from __future__ import annotations

import torch

from tools.random_programs.draft import (
    Draft,
    NoChoice,
    distinct,
    finite,
    has_dims,
    has_elements,
    is_float,
    is_inexact,
    is_integer,
    is_number,
    is_real,
)
from tools.random_programs.kinds import kind
from tools.random_programs.leaves import scalar


def _compatible(draft: Draft, x: str) -> str:
    """A tensor that broadcasts with another to something small."""

    def fits(t: torch.Tensor) -> bool:
        try:
            return torch.broadcast_shapes(t.shape, draft[x].shape).numel() <= 64
        except RuntimeError:
            return False

    return draft.pick(fits)


@kind(7)
def arithmetic(draft: Draft) -> str:
    x = draft.pick()
    y = scalar(draft) if draft.chance(0.4) else _compatible(draft, x)
    if draft.chance(0.2):
        x, y = y, x
    if draft.chance(0.03):
        y = draft.pick()
    form = draft.choice(
        ["{x} + {y}", "{x} - {y}", "{x} * {y}", "{x} * {y} + {x}", "torch.add({x}, {y}, alpha=2)", "1 - {x} * {y}"]
    )
    if form.startswith("torch") and not x.startswith("t"):
        x, y = y, x
    return f"{draft.new()} = {form.format(x=x, y=y)}"


@kind(2)
def divide(draft: Draft) -> str:
    x = draft.pick()
    y = draft.choice(["2", "-0.5", "3", "True"]) if draft.chance(0.5) else _compatible(draft, x)
    value = draft.evaluate(f"torch.as_tensor({y})")
    if is_inexact(value) and not bool((value.detach().abs() > 0.2).all()):
        raise NoChoice
    return f"{draft.new()} = {x} / {y}"


@kind(2)
def round_division(draft: Draft) -> str:
    """Quotients that jump: only where no element is near a jump."""
    x = draft.pick(is_real)
    y = draft.choice(["2", "-3", "0.75", "0"]) if draft.chance(0.7) else _compatible(draft, x)
    divisor = draft.evaluate(f"torch.as_tensor({y})")
    if divisor.is_complex() or (is_inexact(divisor) and not bool((divisor.detach().abs() > 0.2).all())):
        raise NoChoice
    t = draft[x]
    if is_inexact(t) or is_inexact(divisor):
        quotient = (t.detach() / divisor.detach()).double()
        part = quotient.remainder(1.0)
        if not bool(((part > 0.01) & (part < 0.99) & (quotient.abs() < 1e3)).all()):
            raise NoChoice
    forms = ["{x} // {y}", "{x} % {y}", "torch.fmod({x}, {y})", "torch.div({x}, {y}, rounding_mode='trunc')"]
    return f"{draft.new()} = {draft.choice(forms).format(x=x, y=y)}"


# Name: the interval in which it is defined and no steeper than a few.
SMOOTH: dict[str, tuple[float, float]] = {
    "sin": (-100, 100),
    "cos": (-100, 100),
    "exp": (-50, 5),
    "tanh": (-1e3, 1e3),
    "sigmoid": (-1e3, 1e3),
    "log": (0.2, 1e3),
    "sqrt": (0.1, 1e3),
    "rsqrt": (0.2, 1e3),
    "log1p": (-0.7, 1e3),
    "atan": (-1e3, 1e3),
    "erf": (-1e3, 1e3),
    "square": (-30, 30),
    "expm1": (-50, 5),
    "reciprocal": (0.3, 1e3),
    "asinh": (-1e3, 1e3),
}


@kind(5)
def unary(draft: Draft) -> str:
    name = draft.choice(list(SMOOTH))
    low, high = SMOOTH[name]
    x = draft.pick(is_real, finite, lambda t: bool(((t.detach() > low) & (t.detach() < high)).all()))
    return f"{draft.new()} = {draft.choice([f'{x}.{name}()', f'torch.{name}({x})'])}"


@kind(2)
def unary_any(draft: Draft) -> str:
    """Operators of every dtype."""
    x = draft.pick(lambda t: t.is_complex() or draft.away(t, 0))
    forms = ["-{x}", "{x}.abs()", "+{x}", "{x}.sgn()", "torch.conj_physical({x})", "{x}.isnan()", "torch.isfinite({x})"]
    forms += ["torch.relu({x})", "torch.nn.functional.silu({x})", "torch.nn.functional.gelu({x})", "~{x}"]
    forms += ["torch.nan_to_num({x}, 0.0, 1.0, -1.0)", "{x}.sign()", "torch.nn.functional.leaky_relu({x}, 0.1)"]
    return f"{draft.new()} = {draft.choice(forms).format(x=x)}"


@kind()
def round_(draft: Draft) -> str:
    form = draft.choice(["floor", "ceil", "trunc", "round", "frac"])
    x = draft.pick(is_real, lambda t: draft.away_from_steps(t, 0.5 if form == "round" else 0.0))
    return f"{draft.new()} = {x}.{form}()"


@kind(2)
def power(draft: Draft) -> str:
    x = draft.pick(is_real)
    exponent = draft.choice(["2", "3", "0", "1", "0.5", "2.0", "-1"])
    if is_inexact(draft[x]) and not bool((draft[x].detach() > 0.3).all()) and exponent in ("0.5", "-1"):
        raise NoChoice
    form = draft.choice([f"{x} ** {exponent}", f"{x} ** {exponent}", f"2 ** {x}.clamp(-3, 3)"])
    if "clamp" in form and not draft.away(draft[x], -3, 3):
        raise NoChoice
    return f"{draft.new()} = {form}"


@kind(4, exact=True)
def compare(draft: Draft) -> str:
    x = draft.pick(is_real)
    if draft.chance(0.5):
        y = scalar(draft)
        if "j" in y:
            raise NoChoice
    else:
        y = _compatible(draft, x)
    if not (draft.exact(draft[x]) and (not y.startswith("t") or draft.exact(draft[y]))):
        gap = draft.evaluate(f"({x} - {y}).detach().abs()")
        if gap.is_complex() or not bool((gap > 0.01).all()):
            raise NoChoice
    return f"{draft.new()} = {x} {draft.choice(['<', '<=', '>', '>=', '==', '!='])} {y}"


@kind(3, exact=True)
def where(draft: Draft) -> str:
    condition = draft.pick(lambda t: t.dtype is torch.bool)
    x = _compatible(draft, condition)
    y = _compatible(draft, x) if draft.chance(0.6) else scalar(draft)
    form = draft.choice(["torch.where({c}, {x}, {y})", "{x}.masked_fill({c}, {s})", "torch.where({c}, {s}, {x})"])
    return f"{draft.new()} = {form.format(c=condition, x=x, y=y, s=scalar(draft))}"


@kind(2)
def clamp(draft: Draft) -> str:
    x = draft.pick(lambda t: draft.away(t, -1, 0, 2))
    y = draft.pick(lambda t: t.shape == draft[x].shape and distinct(torch.cat([t.flatten(), draft[x].flatten()])))
    forms = ["{x}.clamp(-1, 2)", "{x}.clamp(min=0)", "{x}.clamp_max(2.0)", "torch.maximum({x}, {y})"]
    forms += ["torch.minimum({x}, {y})", "torch.fmax({x}, {y})"]
    return f"{draft.new()} = {draft.choice(forms).format(x=x, y=y)}"


@kind(2, exact=True)
def logical(draft: Draft) -> str:
    x = draft.pick(is_integer)
    y = draft.pick(is_integer, lambda t: t.shape == draft[x].shape)
    forms = ["{x} & {y}", "{x} | {y}", "{x} ^ {y}", "~{x}", "torch.logical_and({x}, {y})", "torch.logical_not({x})"]
    forms += ["{x} << 1", "{x} >> 1", "{x} & 3", "torch.gcd({x}, {y})"]
    return f"{draft.new()} = {draft.choice(forms).format(x=x, y=y)}"


def _over(draft: Draft, x: str) -> str:
    """The arguments that say over which dimensions to reduce."""
    n = draft[x].dim()
    if not n or draft.chance(0.3):
        return ""
    keep = draft.choice(["", ", keepdim=True"])
    if n >= 2 and draft.chance(0.3):
        return f"{draft.rng.sample(range(n), 2)}{keep}"
    return f"{draft.dim(x)}{keep}"


@kind(6)
def reduce(draft: Draft) -> str:
    x = draft.pick()
    over = _over(draft, x)
    form = draft.choice(["sum", "mean", "sum", "nansum", "amax", "amin", "all", "any", "count_nonzero", "sum64"])
    if form in ("amax", "amin") and is_inexact(draft[x]) and not distinct(draft[x]):
        raise NoChoice
    if form in ("all", "any", "count_nonzero") and not draft.away(draft[x], 0):
        raise NoChoice
    if form == "sum64":
        return f"{draft.new()} = {x}.sum({over}{', ' if over else ''}dtype=torch.float64)"
    if form == "count_nonzero":
        over = over.split(", keepdim")[0]
    return f"{draft.new()} = {x}.{form}({over})"


@kind(2)
def moments(draft: Draft) -> str:
    x = draft.pick(is_float, has_elements, finite)
    over = _over(draft, x)
    form = draft.choice(["var", "std", "norm", "prod", "logsumexp"])
    if form in ("std", "norm") and not (draft[x].numel() > 1 and distinct(draft[x]) and draft.away(draft[x], 0)):
        raise NoChoice
    if form == "norm":
        over = f"2, {over}" if over else ""
    if form in ("prod", "logsumexp"):
        over = str(draft.dim(x))
    return f"{draft.new()} = {x}.{form}({over})"


@kind(3)
def scan(draft: Draft) -> str:
    x = draft.pick(has_dims(1))
    d = draft.dim(x)
    form = draft.choice([f"{x}.cumsum({d})", f"{x}.cumprod({d})", f"{x}.diff(dim={d})", f"{x}.logcumsumexp({d})"])
    if "log" in form and not (is_float(draft[x]) and finite(draft[x])):
        raise NoChoice
    return f"{draft.new()} = {form}"


@kind(2)
def softmax(draft: Draft) -> str:
    x = draft.pick(has_dims(1), is_float, finite)
    return f"{draft.new()} = {x}.{draft.choice(['softmax', 'log_softmax'])}({draft.dim(x)})"


@kind(2)
def normalize(draft: Draft) -> str:
    x = draft.pick(has_dims(1), is_float, distinct, lambda t: t.shape[-1] > 1)
    size = draft[x].shape[-1]
    return f"{draft.new()} = torch.nn.functional.layer_norm({x}, [{size}])"


@kind(4, exact=True)
def order(draft: Draft) -> str:
    """Sorts and extremes, of elements without ties."""
    x = draft.pick(has_elements, distinct, is_real, is_number)
    t = draft[x]
    d = draft.dim(x) if t.dim() else 0
    size = t.shape[d] if t.dim() else 1
    pairs = [f"{x}.sort({d})", f"{x}.sort({d}, descending=True)", f"{x}.max({d})", f"{x}.min({d}, keepdim=True)"]
    pairs += [f"{x}.topk({(size + 1) // 2}, {d})", f"{x}.kthvalue(1, {d})", f"{x}.median({d})", f"{x}.cummax({d})"]
    single = [f"{x}.argmax()", f"{x}.argmin({d})", f"{x}.argsort({d})", f"{x}.max()", f"{x}.argmax({d}, keepdim=True)"]
    if draft.chance(0.6):
        return f"{draft.new(2)} = {draft.choice(pairs)}"
    return f"{draft.new()} = {draft.choice(single)}"


@kind(exact=True)
def stable_sort(draft: Draft) -> str:
    """Ties in the order they came."""
    x = draft.pick(has_dims(1), is_integer)
    down = draft.choice(["True", "False"])
    return f"{draft.new(2)} = torch.sort({x}, dim={draft.dim(x)}, stable=True, descending={down})"


@kind(2, exact=True)
def unique(draft: Draft) -> str:
    x = draft.pick(is_integer)
    forms = [(1, f"{x}.unique()"), (2, f"torch.unique({x}, return_counts=True)"), (1, f"{x}.bincount(minlength=3)")]
    forms.append((2, f"torch.unique_consecutive({x}, return_inverse=True)"))
    count, form = draft.choice(forms)
    return f"{draft.new(count)} = {form}"


@kind(6)
def product(draft: Draft) -> str:
    """Products of matrices that are views, and the layers built of them."""
    x = draft.pick(has_dims(1))
    t = draft[x]
    y = draft.pick(lambda o: o.dim() >= 1 and o.shape[-1] == t.shape[-1] and o.dtype is t.dtype)
    o = draft[y]
    forms = []
    if o.dim() >= 2:
        forms += [f"{x} @ {y}.mT", f"torch.matmul({x}, {y}.transpose(-1, -2))"]
    else:
        forms += [f"{x} @ {y}", f"torch.matmul({x}, {y})"]
    if o.dim() == 2:
        forms += [f"torch.nn.functional.linear({x}, {y})", f"torch.nn.functional.linear({x}, {y}, {y}[:, 0])"]
    if t.dim() == 2 and o.dim() == 2:
        forms += [f"torch.mm({x}, {y}.t())", f"torch.addmm({x}[:, :1], {x}, {y}.t(), beta=0.5, alpha=2)"]
        forms += [f"torch.einsum('ij,kj->ik', {x}, {y})", f"torch.einsum('ij,kj->ki', {x}, {y})"]
    if t.dim() == 3 and o.dim() == 3 and t.shape[0] == o.shape[0]:
        forms += [f"torch.bmm({x}, {y}.mT)", f"torch.baddbmm({x}[..., :1], {x}, {y}.mT)"]
    if t.dim() == 1 and o.dim() == 1:
        forms += [f"torch.dot({x}, {y})", f"torch.outer({x}, {y})", f"torch.vdot({x}, {y})"]
    if t.dim() == 2 and o.dim() == 1:
        forms.append(f"torch.mv({x}, {y})")
    return f"{draft.new()} = {draft.choice(forms)}"


@kind(exact=True)
def ask(draft: Draft) -> str:
    """Numbers read on the host that decide what follows."""
    x = draft.pick(has_elements, draft.exact, lambda t: not t.is_complex())
    return f"{draft.new()} = " + draft.choice(
        [
            f"torch.tensor({x}.tolist(), device=device)",
            f"{x}.flatten()[0].item() + torch.ones(2, device=device)",
            f"torch.full((2,), {x}.reshape(-1)[-1].item(), device=device)",
            f"torch.as_tensor({x}.sum().item() > 0, device=device)",
            f"{x} * len({x}.flatten())",
        ]
    )
