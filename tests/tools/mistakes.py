"""A program for the checking library: gives each kernel a tensor without memory for its last number.

Every such call is made in a process of its own, after the same call with nothing amiss in this one. Prints for each
the instruction set, the kernel, what is one number too short, and the exit code.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from quire.attention import cpu_native
from quire.attention.base import AttentionSpec, LayerCache, make_batch
from quire.kernels.cpu import library, matrix, ops, shaping, step

Maker = Callable[..., Tensor]
Call = Callable[[Maker], object]
WIDTHS = (33, 64)  # whose last number is read by itself, and in a whole vector
SHORT = ("what it reads", "what it writes")


def whole(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def short(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Like `whole`, but its last element lies just behind the memory that it has."""
    flat = np.zeros(int(np.prod(shape)) - 1, dtype=str(dtype).removeprefix("torch."))
    strides = [flat.itemsize * int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
    return torch.from_numpy(np.lib.stride_tricks.as_strided(flat, shape, strides))


def calls(width: int) -> dict[str, Call]:
    """Calls of each kernel with one tensor that it reads, which the caller makes."""
    packed = {storage: matrix.PackedMatrix.from_float(whole(37, width), storage) for storage in matrix.STORAGES}
    matmul = matrix.Matmul([*packed.values()], activations="float32")
    integers = matrix.Matmul([packed["int8"], packed["int4"]], activations="int16")
    bytes_ = matrix.Matmul([packed["int8"], packed["int4"]], activations="int8")
    weight, three = whole(width), torch.arange(3)
    return {
        "matmul of a row": lambda make: matmul(make(1, width)),
        "matmul of few rows": lambda make: matmul(make(5, width)),
        "matmul of rows": lambda make: matmul(make(40, width)),
        "matmul of a row of integers": lambda make: integers(make(1, width)),
        "matmul of few rows of integers": lambda make: integers(make(5, width)),
        "matmul of rows of integers": lambda make: integers(make(40, width)),
        "matmul of a row of bytes": lambda make: bytes_(make(1, width)),
        "matmul of rows of bytes": lambda make: bytes_(make(100, width)),
        "scale_rows": lambda make: ops.scale_rows(make(3, width), whole(3, 1), width // 2),
        "linear": lambda make: ops.linear_transposed(make(5, width), whole(37, width)),
        "linear's weight": lambda make: ops.linear_transposed(whole(5, width), make(37, width)),
        "rms_norm": lambda make: ops.rms_norm(make(3, width), weight, 1e-6),
        "add_rms_norm": lambda make: ops.add_rms_norm(whole(3, width), make(3, width), weight, 1e-6),
        "norm's weight": lambda make: ops.add_rms_norm(whole(3, width), whole(3, width), make(width), 1e-6),
        "gated": lambda make: ops.silu_and_mul(make(3, 2 * width)),
        "first_max": lambda make: ops.first_max(make(3, width)),
        "gather_rows": lambda make: ops.gather_rows(make(4, width), three + 1),
        "gather_rotation": lambda make: ops.gather_rotation(make(4, 2 * width), three + 1, torch.float32),
        "pack_floats": lambda make: matrix.PackedMatrix.from_float(make(37, width)).dequantize(),
        "sample_within": lambda make: ops.sample_within(
            make(3, width), torch.ones(4, 3, dtype=torch.float64), three, three
        ),
        "append_tokens": lambda make: step.append_tokens(
            make(3, dtype=torch.int32),
            *(whole(3), three, whole(3, 9, dtype=torch.int32)),
            *(whole(3, dtype=torch.int64), whole(3, dtype=torch.int64), 9),
        ),
        "keep_allowed": lambda make: shaping.keep_allowed(
            make(3, width), three, whole(1, -(-width // 32), dtype=torch.int32), whole(1, 3, dtype=torch.int32)
        ),
        "prepare_qkv": lambda make: attend(width, make(32, 5 * width), whole),
        "attention": lambda make: attend(width, whole(32, 5 * width), make),
    }


def attend(width: int, qkv: Tensor, make_cache: Maker) -> Tensor:
    """Three query heads and one pair over two blocks, all that the cache has."""
    spec, backend = AttentionSpec(3, 1, width, 0.3), cpu_native.NativeAttention()
    cache = make_cache(*backend.cache_shape(2, 16, 1, width))
    tables = torch.tensor([[0, 1]], dtype=torch.int32)
    metadata = backend.prepare_eager(make_batch([32], [32], tables, torch.arange(32), 16))
    at = LayerCache(spec, cache, metadata)
    return backend.attend(at, backend.write(at, qkv, None, None))


def exit_code(call: Call, too_short: str) -> int:
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with ExitStack() as stack:
        if too_short == "what it writes":
            for module in (ops, matrix, step, shaping, cpu_native):
                stack.enter_context(mock.patch.object(module, "empty", short))
        call(whole if too_short == "what it writes" else short)
    os._exit(0)


def main() -> None:
    loaded = library.load()
    assert loaded is not None
    for isa in loaded.instruction_sets:
        loaded.select(isa)
        for width in WIDTHS:
            for name, call in calls(width).items():
                call(whole)
                for too_short in SHORT:
                    print(isa, f"{name}, {width} wide", too_short, exit_code(call, too_short), sep="\t", flush=True)


if __name__ == "__main__":
    main()
