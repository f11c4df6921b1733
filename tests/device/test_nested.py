"""Where PyTorch makes nested tensors: encoders in evaluation, attention on jagged tensors, and strided ones refused."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torch_tpu import metrics

PADDINGS = {
    "behind": [[0, 0, 0, 0, 1], [0, 0, 0, 1, 1], [0, 0, 0, 0, 0]],
    "between": [[0, 1, 0, 0, 1], [0, 0, 0, 1, 1], [0, 0, 0, 0, 0]],
    "a whole row": [[0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 1, 1]],
    "none": [[0] * 5] * 3,
}


def both(module: nn.Module) -> tuple[nn.Module, nn.Module]:
    return module, copy.deepcopy(module).to("tpu")


def encoder(**options: Any) -> nn.TransformerEncoder:
    own = {name: options.pop(name) for name in ("mask_check", "norm", "enable_nested_tensor") if name in options}
    layer = nn.TransformerEncoderLayer(16, 2, 32, **{"batch_first": True, **options})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that an option keeps the encoder from using nested tensors
        return nn.TransformerEncoder(layer, 2, **own).eval()


ENCODERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm first": {"norm_first": True},
    "gelu": {"activation": "gelu"},
    "norm behind": {"norm": nn.LayerNorm(16)},
    "unchecked mask": {"mask_check": False},
    "not nested": {"enable_nested_tensor": False},
    "batch second": {"batch_first": False},
    "without bias": {"bias": False},
}


@pytest.mark.parametrize(
    ("name", "inference"),
    [*((name, torch.no_grad) for name in ENCODERS), ("plain", torch.inference_mode), ("plain", torch.enable_grad)],
)
def test_an_encoder_with_padding_in_evaluation(name: str, inference: Any) -> None:
    """The same values in the padding too: zeros, or those of the ordinary path, whichever the CPU takes."""
    known, ours = both(encoder(**ENCODERS[name]))
    x = torch.randn(3, 5, 16)
    for kind, rows in PADDINGS.items():
        if kind == "between" and "mask_check" in ENCODERS[name]:
            continue  # the caller vouches for the mask
        padding = torch.tensor(rows, dtype=torch.bool)
        for mask in (padding, torch.zeros(3, 5).masked_fill(padding, -torch.inf)):
            given = x if ENCODERS[name].get("batch_first", True) else x.transpose(0, 1)
            with inference():
                want = known(given, src_key_padding_mask=mask)
                got = ours(given.tpu(), src_key_padding_mask=mask.tpu())
            assert type(got) is torch.Tensor
            torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_an_encoder_with_padding_by_other_ways() -> None:
    """Two masks, a causal hint, training, compiled, fused."""
    known, ours = both(encoder())
    x, padding = torch.randn(3, 5, 16), torch.tensor(PADDINGS["behind"], dtype=torch.bool)
    causal = nn.Transformer.generate_square_subsequent_mask(5) == -torch.inf
    close = lambda got, want: torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)  # noqa: E731
    with torch.no_grad():
        both_masks = {"mask": causal, "src_key_padding_mask": padding}
        close(ours(x.tpu(), **{k: v.tpu() for k, v in both_masks.items()}), known(x, **both_masks))
        want = known(x, src_key_padding_mask=padding)
        close(ours(x.tpu(), src_key_padding_mask=padding.tpu(), is_causal=True), want)
        with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE):
            close(ours(x.tpu(), src_key_padding_mask=padding.tpu()), want)
        compiled = torch.compile(ours)(x.tpu(), src_key_padding_mask=padding.tpu()).cpu()
        torch.testing.assert_close(compiled[~padding], want[~padding], rtol=1e-4, atol=1e-5)
    for module, given in ((known, (x, padding)), (ours, (x.tpu(), padding.tpu()))):
        module(given[0], src_key_padding_mask=given[1])[~given[1]].square().sum().backward()
    for (name, p), q in zip(known.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q.grad.cpu(), p.grad, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_a_layer_and_attention_alone(batch_first: bool, norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=batch_first, norm_first=norm_first).eval()
    x, padding = torch.randn(3, 5, 16), torch.tensor(PADDINGS["behind"], dtype=torch.bool)
    x = x if batch_first else x.transpose(0, 1)
    known, ours = both(layer)
    floats = torch.zeros(3, 5).masked_fill(padding, -torch.inf)
    with torch.no_grad():
        for mask in (None, padding, floats):
            given = None if mask is None else mask.tpu()
            want = known(x, src_key_padding_mask=mask)
            torch.testing.assert_close(ours(x.tpu(), src_key_padding_mask=given).cpu(), want, rtol=1e-4, atol=1e-5)
            for need in (False, True):
                want, weights = known.self_attn(x, x, x, key_padding_mask=mask, need_weights=need)
                y = x.tpu()
                got, own = ours.self_attn(y, y, y, key_padding_mask=given, need_weights=need)
                torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)
                if need:
                    torch.testing.assert_close(own.cpu(), weights, rtol=1e-4, atol=1e-5)


def test_whether_a_mask_is_left_aligned() -> None:
    x = torch.ones(3, 5, 2, device="tpu")
    for kind, rows in PADDINGS.items():
        mask = torch.tensor(rows, dtype=torch.bool).logical_not()
        want = torch._nested_tensor_from_mask_left_aligned(x.cpu(), mask)
        assert torch._nested_tensor_from_mask_left_aligned(x, mask.tpu()) == want, kind
    with pytest.raises(RuntimeError, match="left aligned"):
        torch._nested_tensor_from_mask(x, torch.tensor([[0, 1, 1, 1, 1]] * 3, dtype=torch.bool, device="tpu"))


def jagged(parts: list[torch.Tensor], device: str, grad: bool = True) -> torch.Tensor:
    return torch.nested.nested_tensor(parts, layout=torch.jagged, device=device, requires_grad=grad)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("lengths", [[2, 4], [1, 7, 3], [5]])
def test_attention_on_jagged_tensors(lengths: list[int]) -> None:
    parts = [[torch.randn(n, 2, 8) for n in lengths] for _ in range(3)]
    results = {}
    for device in ("cpu", "tpu"):
        leaves = [jagged(p, device) for p in parts]
        out = F.scaled_dot_product_attention(*(leaf.transpose(1, 2) for leaf in leaves), scale=0.3)
        out.values().square().sum().backward()
        values = [leaf.grad.values() for leaf in leaves]
        results[device] = [tuple(out.shape[1::2]), [t.shape for t in out.unbind()], out.values(), *values]
    assert results["cpu"][:2] == results["tpu"][:2]
    for want, got in zip(results["cpu"][2:], results["tpu"][2:], strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_attention_of_jagged_queries_on_other_keys() -> None:
    """Keys of their own lengths, without gradients; what the CPU refuses is refused."""
    queries = [torch.randn(n, 2, 8) for n in (2, 4)]
    keys = [torch.randn(n, 2, 8) for n in (3, 1)]
    want, got = (
        F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), k.transpose(1, 2)).values().cpu()
        for q, k in ((jagged(queries, d, False), jagged(keys, d, False)) for d in ("cpu", "tpu"))
    )
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    for device in ("cpu", "tpu"):
        q = jagged(queries, device).transpose(1, 2)
        with pytest.raises(RuntimeError, match="No viable backend"):
            F.scaled_dot_product_attention(q, q, q, is_causal=True)


STRIDED = """
import torch, warnings
warnings.simplefilter("ignore")
x, mask = torch.ones(2, 3, 4, device="tpu"), torch.ones(2, 3, dtype=torch.bool, device="tpu")
parts = [torch.ones(2), torch.ones(3)]
sizes, strides, offsets = torch.tensor([[2], [3]]), torch.tensor([[1], [1]]), torch.tensor([0, 2])
def nested(**options):
    return torch.nested.nested_tensor(parts, device="tpu", **options)
tries = [
    lambda: repr(nested()), lambda: nested().unbind(), lambda: nested().sum(), lambda: nested().cpu(),
    lambda: nested()[0],
    lambda: nested(requires_grad=True).clone(), lambda: nested(requires_grad=True) * 2,
    lambda: nested(requires_grad=True).sum(), lambda: nested(requires_grad=True).unbind(),
    lambda: nested(requires_grad=True).detach(), lambda: nested().requires_grad_().double(),
    lambda: nested(requires_grad=True).to_padded_tensor(0.0), lambda: nested(requires_grad=True).add(1).contiguous(),
    lambda: torch.nested.nested_tensor(parts).to("tpu"),
    lambda: torch.nested.nested_tensor(parts, requires_grad=True).to("tpu"),
    lambda: torch.nested.nested_tensor([p.tpu() for p in parts]),
    lambda: torch.nested.as_nested_tensor([p.tpu() for p in parts]), lambda: torch.nested.as_nested_tensor(x),
    lambda: torch._nested_view_from_buffer(torch.ones(5, device="tpu"), sizes, strides, offsets),
    lambda: torch._nested_from_padded(x, torch.tensor([[2, 4], [3, 4]])),
]
for n, attempt in enumerate(tries):
    try:
        attempt()
        print(n, "accepted")
    except NotImplementedError as error:
        said = str(error)
        print(n, "has no strided nested tensors" in said and "layout=torch.jagged" in said and "<string>" in said)
"""


def test_strided_nested_tensors_are_refused(run_python: Any) -> None:
    """An error where autograd asks for their sizes would end the process."""
    assert {line.split(maxsplit=1)[1] for line in run_python(STRIDED).splitlines()} == {"True"}


COMPILED = {
    "elements": lambda x, w: (x * 2).sin(),
    "layer": lambda x, w: F.layer_norm(F.linear(x, w).relu(), (4,)),
    "products": lambda x, w: x * (x @ w),
    "padded": lambda x, w: (x @ w).to_padded_tensor(0.0),
}


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.filterwarnings("ignore:NestedTensor does not implement _stable_hash_for_caching")
def test_jagged_tensors_are_compiled(name: str) -> None:
    """Each batch has other lengths, and as many sums of lengths as there are programs."""
    function = COMPILED[name]
    compiled = torch.compile(function, backend="tpu", fullgraph=True)
    w = torch.randn(4, 4)
    metrics.reset()
    for lengths in ((2, 3), (2, 3), (1, 5, 2), (4, 1)):
        parts = [torch.randn(n, 4) for n in lengths]
        outcomes = []
        for run, device in ((function, "cpu"), (compiled, "tpu")):
            leaves = [p.clone().to(device).requires_grad_() for p in parts]
            x = torch.nested.as_nested_tensor(leaves, layout=torch.jagged)
            result = run(x, w.to(device))
            values = result.values() if result.is_nested else result
            values.square().sum().backward()
            assert result.is_nested == (name != "padded")
            assert not result.is_nested or result.shape == x.shape  # the same jagged dimension
            outcomes.append([values.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves)])
        for got, want in zip(*outcomes[::-1], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert not {"graph_by_operator", "graph_cut"} & metrics.counters().keys()
