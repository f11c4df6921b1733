"""FlexAttention, compiled and eager: equal to dense attention on the CPU, without memory for all scores at once."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from tests.compile.programs import by_operator, compiled, plans_of

Mod = Callable[..., Tensor]
BATCH, HEADS, WIDTH = 2, 4, 8


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition: all scores at once. The modifications get grids of indices."""
    k, v = (x.expand(q.shape[0], -1, -1, -1).repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    grid = torch.meshgrid(*(torch.arange(s) for s in scores.shape), indexing="ij")
    if score_mod is not None:
        scores = score_mod(scores, *grid)
    if mask_mod is not None:
        scores = scores.masked_fill(~mask_mod(*grid), -math.inf)
    weights = scores.softmax(-1).nan_to_num()
    return weights @ v, scores.logsumexp(-1)


def tensors(length: int, keys: int | None = None, kv_heads: int = HEADS, batch: int = BATCH) -> list[Tensor]:
    torch.manual_seed(1)
    keys = keys or length
    return [
        torch.randn(BATCH, HEADS, length, WIDTH),
        torch.randn(batch, kv_heads, keys, WIDTH),
        torch.randn(batch, kv_heads, keys, WIDTH),
    ]


def check(
    qkv: list[Tensor],
    *,
    mods: Callable[..., tuple[Mod | None, Mod | None]] = lambda: (None, None),
    buffers: tuple[Tensor, ...] = (),
    compile_it: bool = True,
    mask_size: tuple[int | None, int | None] = (None, None),
    block: int = 128,
    rtol: float = 1e-4,
    atol: float = 2e-5,
    **options: Any,
) -> None:
    """Compares with `dense`: results, logsumexp, and gradients of q, k, v and of the floating point buffers.

    Args:
        mods: makes score_mod and mask_mod of the buffers.
    """
    exact = [t.float() if t.dtype is torch.bfloat16 else t.clone() for t in (*qkv, *buffers)]
    host = [t.requires_grad_(t.is_floating_point()) for t in exact]
    device = [t.detach().to("tpu").requires_grad_(t.is_floating_point()) for t in (*qkv, *buffers)]
    score_mod, mask_mod = mods(*host[3:])
    want = dense(*host[:3], score_mod, mask_mod, options.get("scale"))
    score_mod, mask_mod = mods(*device[3:])
    sizes = qkv[0].shape[2], qkv[1].shape[2]
    blocks = create_block_mask(mask_mod, *mask_size, *sizes, device="tpu", BLOCK_SIZE=block) if mask_mod else None
    before = by_operator()

    options.update(score_mod=score_mod, block_mask=blocks, enable_gqa=qkv[0].shape[1] != qkv[1].shape[1])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(q, k, v, return_lse=True, **options)

    got = (compiled(attend) if compile_it else attend)(*device[:3])
    close = functools.partial(torch.testing.assert_close, rtol=rtol, check_dtype=False)
    close([g.detach().cpu() for g in got], [w.detach() for w in want], atol=atol)
    visible = want[1].isfinite().to(want[0].dtype)
    for (out, lse), where in ((want, "cpu"), (got, "tpu")):
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype).to(where)
        finite = torch.where(visible.to(where) > 0, lse, 0)
        torch.autograd.backward([out, finite], [weights, visible.to(where) * 0.5])
    for i, (a, b) in enumerate(zip(host, device, strict=True)):
        if a.is_floating_point():
            close(b.grad.cpu(), a.grad, atol=atol * 10, msg=lambda m, i=i: f"{i}: {m}")
    if compile_it:
        assert by_operator() == before


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def relative(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + (q - k) * 0.02 * (h + 1)


@pytest.mark.parametrize("mods", [(None, None), (relative, None), (None, causal)])
def test_equals_dense_attention(mods: tuple[Any, Any]) -> None:
    check(tensors(300), mods=lambda: mods)


def test_eager_equals_dense_attention() -> None:
    check(tensors(70), mods=lambda: (relative, causal), compile_it=False)


def test_lengths_heads_and_scale() -> None:
    """Fewer queries than keys, neither a multiple of a block; groups of heads share keys; another scale."""
    check(tensors(70, 1100, kv_heads=2), mods=lambda: (relative, lambda b, h, q, k: k <= q + 900), scale=0.2)


def test_one_batch_of_keys_for_all() -> None:
    check(tensors(40, 150, batch=1), mods=lambda: (None, causal), mask_size=(BATCH, None))


@pytest.mark.parametrize("per_head", [True, False])
def test_documents(per_head: bool) -> None:
    """Each batch (and head) has lists of its own; queries see their own document only."""
    ids = torch.stack([torch.arange(400) // 90, torch.arange(400) // 33])

    def mods(ids: Tensor) -> tuple[None, Mod]:
        if per_head:
            return None, lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (q >= k - h * 40)
        return None, lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (q >= k)

    check(tensors(400, kv_heads=2), mods=mods, buffers=(ids,), mask_size=(BATCH, HEADS if per_head else None), block=64)


def test_gradients_of_captured_buffers() -> None:
    """A bias for each pair, a slope for each head read twice, and one for each distance."""
    torch.manual_seed(3)
    buffers = torch.randn(HEADS, 150, 150), torch.randn(HEADS), torch.randn(300)

    def mods(bias: Tensor, slope: Tensor, distance: Tensor) -> tuple[Mod, Mod]:
        def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (s + bias[h, q, k]) * slope[h] + slope[h] + distance[q - k + 150]

        return score_mod, causal

    check(tensors(150), mods=mods, buffers=buffers)


def test_a_modification_that_is_not_linear() -> None:
    check(tensors(200), mods=lambda: (lambda s, b, h, q, k: 5 * torch.tanh(s / 5) + torch.where(q > k, s, -s), causal))


def test_queries_that_see_nothing() -> None:
    check(tensors(300), mods=lambda: (None, lambda b, h, q, k: (q >= 140) & (q >= k)))


def test_double_precision() -> None:
    check([t.double() for t in tensors(200)], mods=lambda: (relative, causal), rtol=1e-10, atol=1e-10)


def test_bfloat16_is_as_accurate_as_a_dense_product() -> None:
    check([t.bfloat16() for t in tensors(200)], mods=lambda: (None, causal), rtol=2e-2, atol=1e-2)


def test_autocast_attends_in_bfloat16() -> None:
    qkv = tensors(200)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("tpu", torch.bfloat16):
            return flex_attention(q, k, v, score_mod=relative)

    leaves = [t.to("tpu").requires_grad_() for t in qkv]
    got = compiled(attend)(*leaves)
    got.float().sum().backward()
    assert got.dtype is torch.bfloat16
    assert leaves[0].grad.dtype is torch.float32
    torch.testing.assert_close(got.detach().cpu().float(), dense(*qkv, relative)[0], rtol=2e-2, atol=2e-2)


def test_blocks_decide_where_a_mask_says_nothing() -> None:
    """A BlockMask made of lists, with no mask_mod: rows 0 and 1 look at blocks (1) and (0, 2)."""
    blocks = BlockMask.from_kv_blocks(
        torch.tensor([[[1, 2]]], dtype=torch.int32, device="tpu"),
        torch.tensor([[[[1, 0, 2], [0, 2, 1]]]], dtype=torch.int32, device="tpu"),
        BLOCK_SIZE=32,
        seq_lengths=(64, 96),
    )
    qkv = tensors(64, 96)
    got = compiled(lambda q, k, v: flex_attention(q, k, v, block_mask=blocks))(*(t.to("tpu") for t in qkv))
    listed = torch.tensor([[0, 1, 0], [1, 0, 1]]).bool()
    want = dense(*qkv, mask_mod=lambda b, h, q, k: listed[q // 32, k // 32])[0]
    torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)


def test_lengths_may_be_dynamic() -> None:
    function = torch.compile(flex_attention, fullgraph=True, dynamic=True)
    for length in (130, 260):
        qkv = tensors(length)
        blocks = create_block_mask(causal, None, None, length, length, device="tpu")
        got = function(*(t.to("tpu") for t in qkv), score_mod=relative, block_mask=blocks)
        torch.testing.assert_close(got.cpu(), dense(*qkv, relative, causal)[0], rtol=1e-4, atol=1e-5)


def test_wrong_arguments_raise_what_pytorch_raises() -> None:
    q, k, v = (t.to("tpu") for t in tensors(32))
    with pytest.raises(ValueError, match="same embedding dimension"):
        flex_attention(q, k[..., :4], v)
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        flex_attention(*(t.requires_grad_() for t in tensors(32)))


# --- memory and work -------------------------------------------------------------------------------------------------


def train(length: int) -> Callable[[], None]:
    def run() -> None:
        q, k, v = (torch.randn(1, 2, length, WIDTH, device="tpu", requires_grad=True) for _ in range(3))
        blocks = create_block_mask(causal, None, None, length, length, device="tpu")
        compiled(lambda q, k, v: flex_attention(q, k, v, score_mod=relative, block_mask=blocks))(
            q, k, v
        ).sum().backward()

    return run


def test_memory_grows_linearly_with_the_length() -> None:
    sizes = []
    for length in (1024, 2048, 4096):
        forward, backward = plans_of(train(length))[-2:]
        sizes.append([p.compiled().analysis().temporary_bytes for p in (forward, backward)])
    scores = 2 * 4096 * 4096 * 4
    for short, middle, long in zip(*sizes, strict=True):
        assert long - middle <= 2.2 * (middle - short) + 4096
        assert long < scores / 8


def test_blocks_that_are_not_listed_are_not_computed() -> None:
    """Keys and values there are NaN, which would reach the result through a weight of zero."""
    length, window = 1024, 100
    q, k, v = tensors(length)
    late = torch.arange(length)[:, None] >= 640
    blocks = create_block_mask(lambda b, h, q, k: (q - k).abs() < window, None, None, length, length, device="tpu")
    poisoned = [torch.where(late, math.nan, t) for t in (k, v)]
    leaves = [t.to("tpu").requires_grad_() for t in (q, *poisoned)]
    out = compiled(lambda q, k, v: flex_attention(q, k, v, block_mask=blocks))(*leaves)[:, :, :512]
    out.sum().backward()
    torch.testing.assert_close(
        out.detach().cpu(), dense(q, k, v, mask_mod=lambda b, h, q, k: (q - k).abs() < window)[0][:, :, :512]
    )
    assert leaves[0].grad[:, :, :512].isfinite().all()
