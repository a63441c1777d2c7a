"""`quire bench moe`: the experts' matmuls of one layer; on a GPU, which tiles are fastest, kept for later starts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from quire.bench.options import check_least
from quire.bench.tables import Grid
from quire.kernels.cpu.grouped import GroupedMatmul
from quire.kernels.cpu.matrix import PackedMatrix
from quire.platform.base import Platform
from quire.platform.registry import get_platform
from quire.types.errors import ConfigError

TOKENS = (1, 16, 64, 256, 1024)


@dataclass(frozen=True)
class MoeOptions:
    experts: int
    width: int
    hidden: int
    top_k: int
    dtype: str
    repeats: int


def bench_moe(options: MoeOptions) -> tuple[list[Grid], dict[str, Any]]:
    """Times in ms by tokens; on a GPU of the tiles that are found and written, on a CPU of each storage."""
    for flag in ("experts", "width", "top_k", "repeats"):
        check_least(flag, getattr(options, flag), 1)
    check_least("hidden_size", options.hidden, 1)
    if options.top_k > options.experts:
        raise ConfigError(f"top_k is {options.top_k}, and there are {options.experts} experts; lower it to that")
    platform = get_platform("auto")
    results = _on_cpu(options, platform) if platform.uses_host_memory else _on_gpu(options, platform)
    grid = Grid(["", *(f"{count} tokens" for count in TOKENS)])
    grid.rows += [[name, *(f"{value:.3f}" for value in row)] for name, row in results["ms"].items()]
    return [grid], results


def _on_cpu(options: MoeOptions, platform: Platform) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    times: dict[str, list[float]] = {}
    for storage in ("float32", "int8", "int4"):
        for activations in ("float32",) if storage == "float32" else ("float32", "int16", "int8"):
            gate_up, down = (
                GroupedMatmul(
                    [
                        [PackedMatrix.from_float(torch.randn(shape, generator=generator), storage)]
                        for _ in range(options.experts)
                    ],
                    activations=activations,
                )
                for shape in ((2 * options.width, options.hidden), (options.hidden, options.width))
            )

            def run(x: Tensor, ids: Tensor, weights: Tensor, up: Any = gate_up, down: Any = down) -> Tensor:
                out: Tensor = down.down(up.gate_up(x, ids, "silu"), ids, weights)
                return out

            times[f"{storage} weights, {activations} activations"] = _times(run, options, torch.float32, platform)
    return {"ms": times}


def _on_gpu(options: MoeOptions, platform: Platform) -> dict[str, Any]:
    from quire.kernels.triton import grouped_configs, sparse_mlp

    dtype = getattr(torch, options.dtype)
    sizes: dict[str, Any] = {"dtype": dtype, "device": platform.device}
    gate_up = torch.randn(options.experts, 2 * options.width, options.hidden, **sizes) * options.hidden**-0.5
    down = torch.randn(options.experts, options.hidden, options.width, **sizes) * options.width**-0.5

    def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return sparse_mlp.sparse_mlp_fixed(x, ids, weights, gate_up, None, down, None, "silu", False)

    before = _times(run, options, dtype, platform)
    line = replace(
        grouped_configs.shapes_for(options.experts, options.width, dtype),
        experts=options.experts,
        width=options.width,
        dtype=options.dtype,
        device=grouped_configs.device_name(),
    )
    for field, slots in (("few", sparse_mlp.FEW), ("some", sparse_mlp.SOME), ("sorted", 4 * sparse_mlp.SOME)):
        line = _best(line, field, max(1, slots * options.experts // options.top_k), run, options, platform)
    path = grouped_configs.path_of_machine()
    grouped_configs.add(path, line)
    with grouped_configs.using(line):
        after = _times(run, options, dtype, platform)
    return {"ms": {"as it was": before, "as found": after}, "written": str(path)}


def _best(
    line: Any, field: str, tokens: int, run: Callable[..., Tensor], options: MoeOptions, platform: Platform
) -> Any:
    """The line with the fastest shape for this number of tokens."""
    from quire.kernels.triton.grouped_configs import using

    old, found = getattr(line, field), []
    for bn, bk, warps, stages in product((64, 128, 256), (64, 128), (4, 8), (3, 4)):
        tried = replace(line, **{field: replace(old, bn=bn, bk=bk, num_warps=warps, num_stages=stages)})
        try:
            with using(tried):
                found.append((_time(run, options, tokens, getattr(torch, options.dtype), platform), tried))
        except Exception as error:  # a shape that does not fit the device's registers or memory
            if "out of resource" not in str(error).lower():
                raise
    return min(found, key=lambda pair: pair[0])[1] if found else line


def _times(run: Callable[..., Tensor], options: MoeOptions, dtype: torch.dtype, platform: Platform) -> list[float]:
    return [_time(run, options, tokens, dtype, platform) for tokens in TOKENS]


def _time(
    run: Callable[..., Tensor], options: MoeOptions, tokens: int, dtype: torch.dtype, platform: Platform
) -> float:
    """The least of some runs, in ms; experts are chosen uniformly."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, options.experts, generator=generator).argsort(-1)[:, : options.top_k]
    x = torch.randn(tokens, options.hidden, generator=generator).to(platform.device, dtype)
    weights = torch.full((tokens, options.top_k), 1 / options.top_k).to(platform.device)
    given = (x, ids.to(torch.int32).contiguous().to(platform.device), weights)
    run(*given)
    found = []
    for _ in range(options.repeats):
        platform.synchronize()
        started = time.perf_counter()
        run(*given)
        platform.synchronize()
        found.append(time.perf_counter() - started)
    return 1e3 * min(found)
