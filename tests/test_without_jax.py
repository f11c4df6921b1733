"""The device needs jaxlib, not JAX."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["jax"] = None  # any import of jax raises
import torch
import torch_tpu

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
x, y = torch.randn(16, 4), torch.randn(16, 1)
losses = {}
for device in ("cpu", "tpu"):
    network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
    network.load_state_dict(model.state_dict())
    network.to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.1)
    losses[device] = []
    for _ in range(3):
        loss = torch.nn.functional.mse_loss(network(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[device].append(loss.item())
assert max(abs(a - b) for a, b in zip(losses["cpu"], losses["tpu"])) < 1e-5, losses
assert losses["tpu"][-1] < losses["tpu"][0]
assert not any(name.split(".")[0] == "jax" for name, module in sys.modules.items() if module is not None)
print("trained without jax")
"""


def test_a_training_step_without_jax() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "trained without jax" in result.stdout
