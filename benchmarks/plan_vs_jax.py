"""The programs the TPU compiler gets from us and from JAX for the same maths: predicted time, memory, compile time.

    .venv/bin/pip install -c constraints.txt jax
    .venv/bin/python benchmarks/plan_vs_jax.py [--target v5e:2x2] [--block llama]

One training step (forward, backward, AdamW) in bfloat16 of a Llama-style block and of a ResNet bottleneck: ours as
fused eager cuts it and with a compiled forward and backward, theirs as one donated `jax.jit`. All are read by the same
cost model (`planner.hlo_text`); the compiler's own total stands beside it, in which it counts the body of a loop once.
Scratch is the peak less code and less parameters, optimizer state and inputs as they lie in memory, padding included.
Compiling is CPU time, which other work on the machine hardly changes. Nothing runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

BLOCKS = ("llama", "resnet")
SIDES = ("fused", "compiled", "jax")
TARGETS = ("v5e:2x2", "tpu7x:2x2x1")
WIDTH, HEADS, KV_HEADS, HIDDEN, SEQUENCE = 2048, 16, 4, 5632, 2048
CHANNELS, INNER, IMAGES, SIDE = 256, 64, 32, 56
SHAPES = {
    "llama": [
        *((WIDTH,), (WIDTH, WIDTH), (KV_HEADS * 128, WIDTH), (KV_HEADS * 128, WIDTH), (WIDTH, WIDTH)),
        *((WIDTH,), (HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN)),
    ],
    "resnet": [
        *((INNER, CHANNELS, 1, 1), (INNER,), (INNER,), (INNER, INNER, 3, 3), (INNER,), (INNER,)),
        *((CHANNELS, INNER, 1, 1), (CHANNELS,), (CHANNELS,)),
    ],
}
INPUT = {"llama": (1, SEQUENCE, WIDTH), "resnet": (IMAGES, CHANNELS, SIDE, SIDE)}
LR, BETA1, BETA2, EPS, DECAY = 1e-3, 0.9, 0.999, 1e-8, 0.01


def ours(block, target, mode):
    import torch
    from torch.nn import functional as F

    from torch_tpu import planner
    from torch_tpu.planner import compiling, hlo_text, machine, measure, script

    planner._use(target)
    state = {}

    def llama(x, norm1, wq, wk, wv, wo, norm2, w1, w3, w2):
        def heads(t, n):
            return t.view(1, SEQUENCE, n, 128).transpose(1, 2)

        h = F.rms_norm(x, (WIDTH,), norm1, 1e-5)
        q, k, v = heads(F.linear(h, wq), HEADS), heads(F.linear(h, wk), KV_HEADS), heads(F.linear(h, wv), KV_HEADS)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + F.linear(a.transpose(1, 2).reshape(1, SEQUENCE, WIDTH), wo)
        h = F.rms_norm(x, (WIDTH,), norm2, 1e-5)
        return x + F.linear(F.silu(F.linear(h, w1)) * F.linear(h, w3), w2)

    def resnet(x, c1, g1, b1, c2, g2, b2, c3, g3, b3):
        def norm(t, g, b):
            return F.batch_norm(t, None, None, g, b, training=True)

        h = F.relu(norm(F.conv2d(x, c1), g1, b1))
        h = F.relu(norm(F.conv2d(h, c2, padding=1), g2, b2))
        return F.relu(x + norm(F.conv2d(h, c3), g3, b3))

    def loss(x, *p):
        return {"llama": llama, "resnet": resnet}[block](x, *p).float().square().mean()

    if mode == "compiled":
        loss = torch.compile(loss)

    def step():
        if not state:
            state["p"] = [torch.zeros(s, device="tpu", dtype=torch.bfloat16, requires_grad=True) for s in SHAPES[block]]
            state["o"] = torch.optim.AdamW(state["p"], lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY)
            state["x"] = torch.randn(INPUT[block], dtype=torch.bfloat16).to("tpu")
        loss(state["x"], *state["p"]).backward()
        state["o"].step()
        state["o"].zero_grad()

    record, window = script.run_function(step, [], 3)
    began = time.process_time()
    answers = compiling.analyse([r.program for r in record.runs[window.begin : window.end]], lambda done, count: None)
    cpu = time.process_time() - began
    made = measure.measure(record, window, answers, machine.machine(target), target)
    lies = {}
    for answer in answers.values():
        lies |= {p.sizes: p.bytes for p in hlo_text.read(answer.hlo, machine.machine(target)).parameters}
    kept = 3 * sum(lies[s] for s in SHAPES[block]) + lies[INPUT[block]]
    code = made.memory.parts["code"]
    return {
        "seconds": made.seconds,
        "compiler_seconds": made.compiler_seconds,
        "scratch": made.memory.peak - kept - code,
        "compile": cpu,
        "programs": len(made.programs),
        "operations": [(o.operator, o.kind, o.seconds) for o in made.operations[:8]],
    }


def theirs(block, target):
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies

    from torch_tpu.planner import hlo_text, machine

    def linear(x, w):
        return x @ w.T

    def rms(x, w):
        f = x.astype(jnp.float32)
        return (f * jax.lax.rsqrt((f * f).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype) * w

    def llama(x, norm1, wq, wk, wv, wo, norm2, w1, w3, w2):
        def heads(t, n):
            return t.reshape(1, SEQUENCE, n, 128)

        h = rms(x, norm1)
        q, k, v = heads(linear(h, wq), HEADS), heads(linear(h, wk), KV_HEADS), heads(linear(h, wv), KV_HEADS)
        a = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(a.reshape(1, SEQUENCE, WIDTH), wo)
        h = rms(x, norm2)
        return x + linear(jax.nn.silu(linear(h, w1)) * linear(h, w3), w2)

    def resnet(x, c1, g1, b1, c2, g2, b2, c3, g3, b3):
        def conv(t, w):
            return jax.lax.conv_general_dilated(t, w, (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW"))

        def norm(t, g, b):
            f = t.astype(jnp.float32)
            mean = f.mean((0, 2, 3), keepdims=True)
            var = ((f - mean) ** 2).mean((0, 2, 3), keepdims=True)
            scaled = (f - mean) * jax.lax.rsqrt(var + 1e-5)
            return (scaled * g[:, None, None] + b[:, None, None]).astype(t.dtype)

        h = jax.nn.relu(norm(conv(x, c1), g1, b1))
        h = jax.nn.relu(norm(conv(h, c2), g2, b2))
        return jax.nn.relu(x + norm(conv(h, c3), g3, b3))

    def step(p, m, v, t, x):
        loss = lambda p: (  # noqa: E731
            {"llama": llama, "resnet": resnet}[block](x, *p).astype(jnp.float32) ** 2
        ).mean()
        grads = jax.grad(loss)(p)
        t = t + 1
        first, second = 1 - BETA1**t, jnp.sqrt(1 - BETA2**t)

        def update(p, m, v, g):
            p = p * (1 - LR * DECAY)
            m = m + (g - m) * (1 - BETA1)
            v = v * BETA2 + g * g * (1 - BETA2)
            return p - ((LR / first) * m / (jnp.sqrt(v) / second + EPS)).astype(p.dtype), m, v

        out = [update(*a) for a in zip(p, m, v, grads, strict=True)]
        return [o[0] for o in out], [o[1] for o in out], [o[2] for o in out], t

    device = topologies.get_topology_desc(platform="tpu", topology_name=target).devices[0]
    place = jax.sharding.SingleDeviceSharding(device)

    def like(shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    kept = [like(s) for s in SHAPES[block]]
    lowered = jax.jit(step, donate_argnums=(0, 1, 2)).lower(kept, kept, kept, like((), jnp.float32), like(INPUT[block]))
    began = time.process_time()
    compiled = lowered.compile()
    cpu = time.process_time() - began
    stats, cost = compiled.memory_analysis(), compiled.cost_analysis()
    own = machine.machine(target)
    operations = hlo_text.read(compiled.as_text(), own).operations
    busy = sum(o.seconds for o in operations if not o.hidden)
    grouped = {}
    for o in operations:
        name = o.place.replace("jit(step)/", "")
        grouped[name, o.kind] = grouped.get((name, o.kind), 0.0) + (0 if o.hidden else o.seconds)
    return {
        "seconds": max(busy, sum(o.bytes for o in operations) / own.bandwidth),
        "compiler_seconds": cost["optimal_seconds"] % 1,
        "scratch": stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes,
        "compile": cpu,
        "programs": 1,
        "operations": sorted(((*k, s) for k, s in grouped.items()), key=lambda e: -e[2])[:8],
    }


def measured(side, block, target):
    environment = {
        **os.environ,
        "TORCH_TPU_PLATFORM": target,
        "TORCH_TPU_CACHE_DIR": "",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_LOG_DIR": "disabled",
        "TPU_STDERR_LOG_LEVEL": "3",
        "TPU_MIN_LOG_LEVEL": "3",
        "TPU_ACCELERATOR_TYPE": "v5litepod-1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, __file__, "--side", side, "--block", block, "--target", target]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--block", choices=BLOCKS)
    parser.add_argument("--target")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--operations", action="store_true", help="the costliest operations of both")
    given = parser.parse_args()
    if given.side:
        asked = given.block, given.target
        print(json.dumps(theirs(*asked) if given.side == "jax" else ours(*asked, given.side)))
        return
    print(f"{'':24}{'':>8}{'time':>12}{'compiler':>12}{'scratch':>12}{'compile CPU':>13}{'programs':>10}")
    for target in [given.target] if given.target else TARGETS:
        for block in [given.block] if given.block else BLOCKS:
            sides = {side: measured(side, block, target) for side in SIDES}
            for side, m in sides.items():
                times = "".join(f"{m[k] * 1e3:>9.3f} ms" for k in ("seconds", "compiler_seconds"))
                rest = f"{m['scratch'] / 2**20:>8.1f} MiB{m['compile']:>11.1f} s{m['programs']:>10}"
                print(f"{f'{block} on {target}':24}{side:>8}{times}{rest}")
            for side in SIDES[:-1]:
                measures = ("seconds", "compiler_seconds", "scratch", "compile")
                ratios = (sides[side][k] / sides["jax"][k] for k in measures)
                print(f"{'':16}{f'{side} / jax':>16}" + "".join(f"{r:>11.2f}×" for r in ratios), flush=True)
            if given.operations:
                for side, m in sides.items():
                    for name, kind, seconds in m["operations"]:
                        print(f"    {side:9}{seconds * 1e6:>9.1f} µs  {kind:16}{name}")


if __name__ == "__main__":
    main()
