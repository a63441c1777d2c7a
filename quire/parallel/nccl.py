"""Collectives of GPUs, through NCCL. CUDA graphs hold them like any other kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from quire.parallel.collectives import Collectives


class NcclCollectives(Collectives):
    """Sums are made of what is gathered, in a tree over the ranks, so that a message's size changes no bit."""

    def __init__(self, device: torch.device, rank: int, size: int, meeting: str) -> None:
        """`meeting` is a file that does not exist yet, the same for all ranks. Each rank sees its own GPU alone."""
        device = torch.device(device.type, 0)
        store = FileStore(meeting, size)
        if not dist.is_initialized():
            dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
        self._size, self._device = size, device

    def all_reduce(self, x: Tensor) -> Tensor:
        return _tree(self._gather(x), 0, self._size)

    def all_gather(self, x: Tensor, total: int) -> Tensor:
        share = -(-total // self._size)
        padded = torch.nn.functional.pad(x, (0, share - x.shape[1])) if x.shape[1] < share else x
        columns = self._gather(padded).transpose(0, 1).reshape(x.shape[0], self._size * share)
        return columns if columns.shape[1] == total else columns[:, :total].contiguous()

    def minimum(self, values: Sequence[int]) -> list[int]:
        mine = torch.tensor(list(values), dtype=torch.int64, device=self._device)
        dist.all_reduce(mine, op=dist.ReduceOp.MIN)
        return [int(value) for value in mine.tolist()]

    def _gather(self, x: Tensor) -> Tensor:
        """[size, *x.shape]"""
        out = torch.empty((self._size, *x.shape), dtype=x.dtype, device=x.device)
        dist.all_gather_into_tensor(out, x.contiguous())
        return out


def _tree(parts: Tensor, first: int, count: int) -> Tensor:
    """The sum of parts [first, first + count), halved again and again, as the CPU's kernel does it."""
    if count == 1:
        return parts[first]
    half = count // 2
    return _tree(parts, first, half) + _tree(parts, first + half, count - half)
