"""Random number generators."""

from __future__ import annotations

import copy
import pickle
import struct
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from torch_tpu.device import generator as generators


def unpack(state):
    return struct.unpack("<Qq", bytes(state.tolist()))


def test_generators_of_other_devices_are_pytorchs():
    generator = torch.Generator()
    assert type(generator) is torch._C.Generator
    assert isinstance(generator, torch.Generator)
    assert generator.device == torch.device("cpu")
    same = torch.Generator().manual_seed(1)
    assert torch.equal(torch.rand(3, generator=generator.manual_seed(1)), torch.rand(3, generator=same))
    assert issubclass(torch._C.Generator, torch.Generator)


def test_device_and_seeds():
    generator = torch.Generator("tpu")
    assert isinstance(generator, torch.Generator)
    assert generator.device == torch.device("tpu:0")
    assert generator.initial_seed() == torch.Generator().initial_seed()
    assert generator.manual_seed(7) is generator
    assert generator.initial_seed() == 7
    assert generator.manual_seed(-1).initial_seed() == 2**64 - 1
    assert generator.seed() == generator.initial_seed()
    assert generator.seed() != generator.seed()
    with pytest.raises(RuntimeError, match="Overflow"):
        generator.manual_seed(2**64)


def test_state_is_seed_and_offset_in_16_bytes():
    generator = torch.Generator("tpu").manual_seed(5)
    state = generator.get_state()
    assert (state.dtype, state.device.type, state.numel()) == (torch.uint8, "cpu", 16)
    assert unpack(state) == (5, 0)
    assert generators.take(generator, 6) == (5, 0)
    assert unpack(generator.get_state()) == (5, 8)
    assert generators.take(generator, 4) == (5, 8)
    assert generator.get_offset() == 12
    generator.set_state(state)
    assert generators.take(generator, 1) == (5, 0)


def test_a_wrong_state_is_refused():
    generator = torch.Generator("tpu")
    with pytest.raises(RuntimeError, match="wrong size"):
        generator.set_state(torch.get_rng_state())
    with pytest.raises(TypeError, match="ByteTensor"):
        generator.set_state(torch.zeros(16))


def test_take_refuses_a_generator_of_another_device():
    with pytest.raises(RuntimeError, match="Expected a 'tpu' device type for generator but found 'cpu'"):
        generators.take(torch.Generator(), 4)
    with pytest.raises(RuntimeError, match="Expected a 'tpu' device type for generator but found 'cpu'"):
        torch.randn(2, device="tpu", generator=torch.Generator())


def test_take_is_safe_between_threads():
    generator = torch.Generator("tpu")
    taken = []

    def draw():
        for _ in range(500):
            taken.append(generators.take(generator, 4)[1])

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(0, 8000, 4))


def test_copies_of_a_generator():
    generator = torch.Generator("tpu").manual_seed(3)
    generators.take(generator, 4)
    for other in (generator.clone_state(), pickle.loads(pickle.dumps(generator)), copy.deepcopy(generator)):
        assert isinstance(other, torch.Generator)
        assert torch.equal(other.get_state(), generator.get_state())
        generators.take(other, 4)
        assert not torch.equal(other.get_state(), generator.get_state())


def test_graphsafe_state_is_shared():
    generator = torch.Generator("tpu").manual_seed(3)
    shared = generator.graphsafe_get_state()
    generators.take(shared, 4)
    assert generator.get_offset() == 4
    other = torch.Generator("tpu").graphsafe_set_state(generator)
    generators.take(other, 4)
    assert generator.get_offset() == 8


def test_an_operation_draws_from_the_generator_it_is_given():
    one, two = (torch.Generator("tpu").manual_seed(11) for _ in range(2))
    before = torch.tpu.get_rng_state()
    x = torch.randn(5, device="tpu", generator=one)
    assert torch.equal(x.cpu(), torch.randn(5, device="tpu", generator=two).cpu())
    assert not torch.equal(x.cpu(), torch.randn(5, device="tpu", generator=one).cpu())
    assert one.get_offset() == 16
    assert torch.equal(before, torch.tpu.get_rng_state())


def test_manual_seed_seeds_the_device_and_leaves_the_cpu_stream_alone():
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    x = torch.rand(4, device="tpu")
    assert torch.equal(torch.rand(2), expected)
    assert torch.tpu.initial_seed() == 5
    torch.manual_seed(5)
    assert torch.equal(torch.rand(4, device="tpu").cpu(), x.cpu())
    torch.tpu.manual_seed_all(5)
    assert torch.equal(torch.rand(4, device="tpu").cpu(), x.cpu())
    torch.tpu.seed_all()
    assert torch.tpu.initial_seed() != 5


def test_rng_state_functions():
    state = torch.tpu.get_rng_state()
    x = torch.rand(4, device="tpu")
    torch.tpu.set_rng_state(state)
    assert torch.equal(torch.rand(4, device="tpu").cpu(), x.cpu())
    torch.tpu.set_rng_state_all([state])
    assert torch.equal(torch.tpu.get_rng_state_all()[0], state)
    assert torch.tpu.default_generators[0].device.type == "tpu"
    with torch.random.fork_rng():
        torch.rand(4, device="tpu")
    assert torch.equal(torch.tpu.get_rng_state("tpu:0"), state)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_repeats_the_forward_numbers(use_reentrant):
    masks = []

    def block(x):
        mask = (torch.rand(64, device="tpu") < 0.5).float()
        masks.append(mask.cpu())
        return x * mask

    x = torch.ones(64, device="tpu", requires_grad=True)
    checkpoint(block, x, use_reentrant=use_reentrant).sum().backward()
    assert len(masks) == 2
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(x.grad.cpu(), masks[0])


def test_the_default_generator_moves_on_with_each_operation():
    draws = [torch.rand(3, device="tpu").cpu() for _ in range(3)]
    assert not torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[1], draws[2])
