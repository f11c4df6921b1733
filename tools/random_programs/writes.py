"""Steps that write a tensor in place, often through a view made on the spot, and results written by `out=`."""

from __future__ import annotations

import torch

from tools.random_programs.draft import (
    Draft,
    NoChoice,
    addresses,
    broadcasts,
    has_dims,
    is_inexact,
    separate,
    share_memory,
    writable,
)
from tools.random_programs.index import index
from tools.random_programs.kinds import kind
from tools.random_programs.leaves import number, scalar
from tools.random_programs.views import may_convert
from torch_tpu.hlo.strided import is_dense


def target(draft: Draft) -> str:
    """An expression for a tensor to write: a live one, or a view of it."""
    x = draft.pick(writable)
    t = draft[x]
    if not t.dim() or draft.chance(0.5):
        return x
    forms = [f"{x}[{index(draft, t, advanced=False)}]", f"{x}.transpose(0, -1)", f"{x}.flatten()", f"{x}.view(-1)"]
    if t.dim() >= 2:
        forms += [f"{x}.diagonal()", f"{x}.t()" if t.dim() == 2 else f"{x}.mT"]
    view = draft.choice(forms)
    if not share_memory(draft.evaluate(view), t):
        raise NoChoice
    return view


def operand(draft: Draft, into: torch.Tensor) -> str:
    """A tensor that broadcasts into another, and does not change while that is written."""
    name = draft.pick(lambda t: broadcasts(into, t) and t.dim() <= into.dim())
    if share_memory(draft[name], into):
        same = addresses(draft[name]) == addresses(into) and draft[name].dtype is into.dtype
        # Of dense tensors that overlap PyTorch refuses one as the target of the other.
        refused = all(is_dense(t.shape, t.stride()) for t in (draft[name], into)) and draft.chance(0.3)
        return name if same or refused else f"{name}.clone()"
    return name


@kind(6)
def arithmetic_(draft: Draft) -> str:
    x = target(draft)
    y = scalar(draft) if draft.chance(0.4) else operand(draft, draft.evaluate(x))
    form = draft.choice(
        ["{x}.add_({y})", "{x}.mul_({y})", "{x}.sub_({y})", "{x}.add_({y}, alpha=2)", "{x}.mul_({y}).add_(1)"]
    )
    return form.format(x=x, y=y)


@kind(2)
def augmented(draft: Draft) -> str:
    """`x += y` on a name, which rebinds it to the written tensor."""
    x = draft.pick(writable)
    y = scalar(draft) if draft.chance(0.5) else operand(draft, draft[x])
    return f"{x} {draft.choice(['+=', '*=', '-='])} {y}"


@kind(3, exact=True)
def copy_(draft: Draft) -> str:
    x = target(draft)
    into = draft.evaluate(x)
    y = operand(draft, into)
    if not may_convert(draft, draft.evaluate(y), into.dtype):
        raise NoChoice
    return f"{x}.copy_({y})"


@kind(3, exact=True)
def fill_(draft: Draft) -> str:
    x = target(draft)
    value = number(draft, draft.evaluate(x).dtype)
    return draft.choice([f"{x}.fill_({value})", f"{x}.zero_()", f"{x}.fill_({value})"])


@kind(3)
def unary_(draft: Draft) -> str:
    x = target(draft)
    t = draft.evaluate(x)
    forms = ["neg_()", "abs_()", "square_()", "sin_()", "clamp_(-1, 2)", "clamp_(min=0)", "tanh_()", "relu_()"]
    form = draft.choice(forms)
    if form.startswith(("clamp", "relu", "abs")) and not (t.is_complex() or draft.away(t, 0, -1, 2)):
        raise NoChoice
    return f"{x}.{form}"


@kind(2)
def lerp_(draft: Draft) -> str:
    x = target(draft)
    t = draft.evaluate(x)
    y, z = operand(draft, t), operand(draft, t)
    forms = ["{x}.addcmul_({y}, {z}, value=2)", "{x}.lerp_({y}, 0.5)", "{x}.addcmul_({y}, {z})"]
    return draft.choice(forms).format(x=x, y=y, z=z)


@kind(2, exact=True)
def integer_(draft: Draft) -> str:
    x = draft.pick(writable, lambda t: not is_inexact(t))
    forms = ["bitwise_and_(3)", "bitwise_or_(1)", "bitwise_xor_(1)", "bitwise_not_()", "bitwise_left_shift_(1)"]
    forms += ["floor_divide_(2)", "floor_divide_(0)", "remainder_(3)", "pow_(2)", "eq_(2)", "lt_(1)", "cumsum_(0)"]
    forms.append("logical_not_()")
    return f"{x}.{draft.choice(forms)}"


@kind(2)
def compare_(draft: Draft) -> str:
    """Comparisons write 0 and 1 of the tensor's own dtype."""
    x = draft.pick(writable, lambda t: not t.is_complex() and draft.away(t, 0.5))
    return f"{x}.{draft.choice(['gt_', 'le_', 'ne_'])}(0.5)"


@kind(4)
def out(draft: Draft) -> str:
    x = target(draft)
    t = draft.evaluate(x)
    y, z = operand(draft, t), operand(draft, t)
    shapes = [draft.evaluate(e).shape for e in (y, z)]
    if torch.broadcast_shapes(*shapes) != t.shape:
        z = f"{z}.expand({list(t.shape)})"
    forms = [
        f"torch.add({y}, {z}, out={x})",
        f"torch.mul({y}, {z}, out={x})",
        f"torch.sub({y}, {z}, alpha=2, out={x})",
        f"torch.sin({z}, out={x})",
        f"torch.neg({z}, out={x})",
        f"torch.add({z}, 1, out={x})",
    ]
    # Into an expanded tensor the CPU's reductions write in an order of their own.
    if t.dim() and separate(t) and not share_memory(draft.evaluate(z), t):
        forms += [
            f"torch.sum({z}.unsqueeze(0).expand({[2, *t.shape]}), 0, out={x})",
            f"torch.cumsum({z}, 0, out={x})",
            f"torch.cat([{z}.narrow(0, 0, {t.shape[0] // 2}), {z}.narrow(0, {t.shape[0] // 2}, "
            f"{t.shape[0] - t.shape[0] // 2})], 0, out={x})",
        ]
    form = draft.choice(forms)
    if "requires_grad" not in form and any(draft.evaluate(e).requires_grad for e in (x, y, z)) and draft.chance(0.8):
        form = f"with torch.no_grad(): {form}"
    return form


@kind(8)
def out_matmul(draft: Draft) -> str:
    x = draft.pick(has_dims(2), lambda t: t.dim() == 2, separate)
    rows, columns = draft[x].shape
    dtype = draft[x].dtype
    y = draft.pick(lambda t: t.dim() == 2 and t.shape[0] == rows and t.dtype is dtype)
    width = draft[y].shape[1]
    z = draft.pick(lambda t: t.dim() == 2 and set(t.shape) == {width, columns} and t.dtype is dtype)
    z = z if draft[z].shape[0] == width else f"{z}.t()"
    y, z = (f"{e}.clone()" if share_memory(draft.evaluate(e), draft[x]) else e for e in (y, z))
    return f"with torch.no_grad(): torch.mm({y}, {z}, out={x})"


@kind(2)
def no_grad(draft: Draft) -> str:
    x = target(draft)
    y = operand(draft, draft.evaluate(x))
    may_copy = may_convert(draft, draft.evaluate(y), draft.evaluate(x).dtype)
    return f"with torch.no_grad(): {x}.{draft.choice(['add_', 'mul_', 'copy_'] if may_copy else ['add_'])}({y})"


@kind(exact=True)
def swap_memory(draft: Draft) -> str:
    """Changes of a tensor's geometry or memory in place."""
    x = draft.pick()
    t = draft[x]
    y = draft.pick(lambda o: o.dtype is t.dtype)
    forms = [f"{x}.unsqueeze_(0)", f"{x}.squeeze_()", f"{x}.set_({y})", f"{x}.data = {y}.detach()"]
    if t.dim() >= 2:
        forms += [f"{x}.transpose_(0, 1)", f"{x}.swapaxes_(0, -1)"]
    if t.numel() > 1:
        forms.append(f"{x}.resize_({[t.numel() - 1]})")
    return draft.choice(forms)


@kind(exact=True)
def foreach(draft: Draft) -> str:
    x = draft.pick(separate)
    y = draft.pick(separate, lambda t: not share_memory(t, draft[x]))
    return f"torch.{draft.choice(['_foreach_mul_', '_foreach_add_'])}([{x}, {y}], {draft.choice(['2', '0.5', '-1'])})"
