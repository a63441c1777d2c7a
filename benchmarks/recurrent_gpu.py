"""The gated delta rule of long prompts on a GPU, beside the kernels of flash-linear-attention on the same inputs.

    python benchmarks/recurrent_gpu.py [--rows 1x8192 8x1024] [--kinds gated kimi]

Shapes are those of Qwen3-Next (gated: 16 heads of keys, 32 of values, 128 wide) and Kimi-Linear (kimi: 32 heads, each
channel decays by itself). All take queries, keys and values as the projections give them, norm them and make the
gates; Quire's also leave a state for the prefix cache. Microseconds by CUDA events, best of several runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quire.kernels.triton import chunked_states, states
from quire.ops.states import StatePlaces, StateShape

SHAPES = {"gated": StateShape(0, 1, 32, 16, 128, 128), "kimi": StateShape(0, 1, 32, 32, 128, 128, decay_dim=128)}
BLOCK = 16


def best_of(run: Callable[[], Any], repeats: int = 10) -> float:
    """Microseconds."""
    run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1e3)
    return min(times)


def make_inputs(shape: StateShape, count: int) -> tuple[Tensor, ...]:
    """(queries, keys and values; decays; strengths; a; dt_bias), as a layer's projections give them."""
    torch.manual_seed(0)
    width = 2 * shape.num_key_heads * shape.key_dim + shape.num_heads * shape.value_dim
    decays = shape.num_heads * shape.decay_dim
    sizes = ((count, width), (count, decays), (count, shape.num_heads))
    given = [torch.randn(size, device="cuda").to(torch.bfloat16) for size in sizes]
    return *given, -torch.rand(shape.num_heads, device="cuda"), torch.rand(decays, device="cuda")


def make_places(rows: int, length: int) -> StatePlaces:
    """Rows that begin, each with a state for its end alone."""
    tables = torch.zeros(rows, length // BLOCK, dtype=torch.int32)
    tables[:, -1] = torch.arange(1, rows + 1)
    starts = torch.arange(0, rows * length + 1, length, dtype=torch.int32)
    parts = (tables, torch.arange(rows), torch.full((rows,), length, dtype=torch.int32), starts)
    return StatePlaces(*(part.cuda() for part in parts), BLOCK)


def fla_runner(kind: str, shape: StateShape, given: tuple[Tensor, ...], rows: int) -> Callable[[], Tensor]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    qkv, decay, strength, a, bias = given
    keys = shape.num_key_heads * shape.key_dim
    q, k, v = (part.reshape(rows, -1, part.shape[1] // 128, 128) for part in qkv.split([keys, keys, 4096], dim=1))
    g = decay.view(rows, -1, *((32, 128) if kind == "kimi" else (32,)))
    gates = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    more = {"A_log": (-a).log(), "dt_bias": bias, "output_final_state": True, **gates}
    function = chunk_kda if kind == "kimi" else chunk_gated_delta_rule

    @torch.no_grad()
    def run() -> Tensor:
        return function(q, k, v, g, strength.view(rows, -1, 32), **more)[0].flatten(2).flatten(0, 1)

    return run


def compare(kind: str, rows: int, length: int) -> None:
    shape = SHAPES[kind]
    given, places = make_inputs(shape, rows * length), make_places(rows, length)
    cache = torch.zeros(rows + 1, shape.size, device="cuda")
    ways: dict[str, Callable[[], Tensor]] = {
        "fast": lambda: chunked_states.gated_delta(*given, cache, places, shape),
        "deterministic": lambda: states.gated_delta(*given, cache, places, shape),
    }
    try:
        ways["fla"] = fla_runner(kind, shape, given, rows)
    except ImportError as error:
        print(f"fla: {error}")
    wanted = ways["deterministic"]().float()
    for name, run in ways.items():
        try:
            difference = float((run().float() - wanted).abs().max() / wanted.abs().max())
            us = best_of(run)
            print(f"{kind:6} {rows} x {length}: {name:14} {us:9.1f} us, differs by {difference:.1e}", flush=True)
        except Exception as error:
            print(f"{kind:6} {rows} x {length}: {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        ways["fast"]()
    for event in profile.key_averages():
        print(f"         {event.device_time_total:9.1f} us  {event.key[:80]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", default=["1x8192", "8x1024"])
    parser.add_argument("--kinds", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    args = parser.parse_args()
    for kind in args.kinds:
        for rows, length in (map(int, case.split("x")) for case in args.rows):
            compare(kind, rows, length)


if __name__ == "__main__":
    main()
