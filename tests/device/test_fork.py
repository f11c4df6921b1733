"""Forked and spawned children."""

from __future__ import annotations

import torch

SCRIPT = """
import os
import torch, torch_tpu

def in_child(use):
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            answer = str(use())
        except RuntimeError as error:
            answer = str(error)
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = pipe.read()
    os.wait()
    return answer
"""

REFUSED = "Cannot re-initialize TPU in forked subprocess"


def test_the_device_is_refused_in_a_child_forked_after_its_first_use(run_python):
    script = """
x = torch.ones(2, device="tpu")
x.cpu()
print(in_child(lambda: torch.ones(2, device="tpu").tolist()))
print(in_child(lambda: (x + 1).tolist()))
print(in_child(lambda: torch.ones(2).to("tpu").cpu()))
print(in_child(lambda: torch.tpu.synchronize()))
print(in_child(lambda: torch.tpu._is_in_bad_fork()))
print(in_child(lambda: (torch.manual_seed(1), torch.ones(2).sum().item())[1]))
print((x + 1).tolist())
"""
    lines = run_python(SCRIPT + script).splitlines()
    assert all(line.startswith(REFUSED) for line in lines[:4]), lines
    assert "spawn" in lines[0]
    assert lines[4:] == ["True", "2.0", "[2.0, 2.0]"]


def test_the_device_works_in_a_child_forked_before_its_first_use(run_python):
    script = """
torch.manual_seed(3)
print(in_child(lambda: (torch.tpu._is_in_bad_fork(), (torch.ones(2, device="tpu") + 1).tolist())))
print((torch.ones(2, device="tpu") + 1).tolist())
"""
    assert run_python(SCRIPT + script).splitlines() == ["(False, [2.0, 2.0])", "[2.0, 2.0]"]


def square(x):
    return (torch.tensor(x, device="tpu") ** 2).tolist()


def test_the_device_works_in_spawned_children():
    assert square([2.0]) == [4.0]
    with torch.multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(square, [[1.0, 3.0]]) == [[1.0, 9.0]]
