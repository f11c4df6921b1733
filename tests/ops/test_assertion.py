"""`torch._assert_async` on device tensors."""

from __future__ import annotations

import pytest
import torch


def test_holds() -> None:
    assert torch._assert_async(torch.tensor([3.0], device="tpu")) is None


@pytest.mark.parametrize("value", [0.0, 0, False])
def test_fails_with_the_default_words(value: float) -> None:
    with pytest.raises(RuntimeError, match="Expected Tensor with single nonzero value, but got zero"):
        torch._assert_async(torch.tensor(value, device="tpu"))


def test_fails_with_the_given_words() -> None:
    with pytest.raises(RuntimeError, match=r"^lengths \{must\} agree$"):
        torch._assert_async(torch.tensor(False, device="tpu"), "lengths {must} agree")


def test_functional_form() -> None:
    token = torch.ops.aten._make_dep_token(device="tpu")
    assert token.device.type == "tpu"
    after = torch.ops.aten._functional_assert_async.msg(torch.tensor(True, device="tpu"), "never", token)
    assert after.shape == ()
    with pytest.raises(RuntimeError, match=r"^sizes differ$"):
        torch.ops.aten._functional_assert_async.msg(torch.tensor(0, device="tpu"), "sizes differ", token)
