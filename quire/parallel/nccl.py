"""Collectives of GPUs, through NCCL. CUDA graphs hold them like any other kernel."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from quire.kernels.triton.rank_sum import rank_sum
from quire.parallel.collectives import Collectives, NullCollectives
from quire.parallel.pipeline import Link


class NcclCollectives(Collectives):
    """Sums are made of what is gathered, by one kernel, in a tree over the ranks: a message's size changes no bit."""

    gathers_parts = True

    def __init__(self, device: torch.device, size: int, group: dist.ProcessGroup | None = None) -> None:
        """`group` has `size` ranks; None: all there are."""
        self._size, self._device, self._group = size, device, group

    def all_reduce(self, x: Tensor) -> Tensor:
        return rank_sum(self.gather_parts(x))

    def all_gather(self, x: Tensor, total: int) -> Tensor:
        share = -(-total // self._size)
        padded = torch.nn.functional.pad(x, (0, share - x.shape[1])) if x.shape[1] < share else x
        columns = self.gather_parts(padded).transpose(0, 1).reshape(x.shape[0], self._size * share)
        return columns if columns.shape[1] == total else columns[:, :total].contiguous()

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return rank_sum(self.scatter_parts(x))

    def gather_rows(self, x: Tensor, total: int) -> Tensor:
        return self.gather_parts(x).flatten(0, 1)[:total]

    def own_rows(self, x: Tensor) -> Tensor:
        return self._shares(x)[dist.get_rank(self._group)]

    def exchange(self, x: Tensor, routes: Tensor) -> Tensor:
        """Every rank gets every row: CUDA graphs hold messages of one size, whatever the routes."""
        rows = self.gather_parts(x.reshape(-1, x.shape[-1]))
        sources = routes.view(-1, 2)[:, 0]
        return rows[sources, torch.arange(len(sources), device=x.device)].view(x.shape)

    def minimum(self, values: Sequence[int]) -> list[int]:
        mine = torch.tensor(list(values), dtype=torch.int64, device=self._device)
        dist.all_reduce(mine, op=dist.ReduceOp.MIN, group=self._group)
        return [int(value) for value in mine.tolist()]

    def gather_parts(self, x: Tensor) -> Tensor:
        out = torch.empty((self._size, *x.shape), dtype=x.dtype, device=x.device)
        dist.all_gather_into_tensor(out, x.contiguous(), group=self._group)
        return out

    def scatter_parts(self, x: Tensor) -> Tensor:
        shares = self._shares(x)
        out = torch.empty_like(shares)
        dist.all_to_all_single(out, shares, group=self._group)
        return out

    def _shares(self, x: Tensor) -> Tensor:
        """x [n, ..] as [ranks, share, ..], with zeros behind its rows."""
        missing = -x.shape[0] % self._size
        padded = torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x.contiguous()
        return padded.view(self._size, -1, *x.shape[1:])


class NcclLink(Link):
    """Between the GPUs of neighbouring stages. Sends wait, on the device, until the other side receives.

    Those of the last stage have a group, and so a stream, of their own: the first receives them after more sends.
    """

    def __init__(self, rank: int, tensor_size: int, stages: int) -> None:
        count, last = tensor_size * stages, tensor_size * (stages - 1)
        self._before, self._after = (rank - tensor_size) % count, (rank + tensor_size) % count
        self._is_first, self._is_last = rank < tensor_size, rank >= last
        # Every rank has to make every group.
        backs = [dist.new_group([place, last + place]) for place in range(tensor_size)] if stages > 1 else [None]
        self._back = backs[rank % len(backs)]
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, x: Tensor) -> None:
        x = x.contiguous()
        if not self._is_last:
            dist.send(x, self._after)
            return
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()
        work = dist.isend(x, self._after, group=self._back)
        assert work is not None, "this rank is one of the group"
        self._sending.append((work, x))

    def receive(self, out: Tensor) -> bool:
        dist.recv(out, self._before, group=self._back if self._is_first else None)
        return True


def open_store(host: str) -> tuple[Store, str]:
    """A store on a free port of this host's address, where ranks on any host meet; and the meeting's name."""
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return store, f"tcp://{host}:{store.port}"


def start_nccl(device: torch.device, rank: int, size: int, meeting: str) -> NcclCollectives:
    """Of all ranks, who meet at a file that does not exist yet or at a store's tcp://ADDRESS:PORT.

    Each rank sees its own GPU alone.
    """
    device = torch.device(device.type, 0)
    if not dist.is_initialized():
        host, _, port = meeting.removeprefix("tcp://").rpartition(":")
        store: Store = TCPStore(host, int(port)) if meeting.startswith("tcp://") else FileStore(meeting, size)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
    return NcclCollectives(device, size)


def nccl_collectives(
    device: torch.device, rank: int, tensor_size: int, stages: int, meeting: str
) -> tuple[Collectives, Collectives]:
    """Of the ranks that share this one's layers, and of all, see `start_nccl`."""
    size = tensor_size * stages
    if size == 1:
        return NullCollectives(), NullCollectives()
    world = start_nccl(device, rank, size, meeting)
    if stages == 1:
        return world, world
    # Every rank has to make every group.
    members = [list(range(stage * tensor_size, (stage + 1) * tensor_size)) for stage in range(stages)]
    groups = [dist.new_group(ranks) for ranks in members]
    if tensor_size == 1:
        return NullCollectives(), world
    return NcclCollectives(device, tensor_size, groups[rank // tensor_size]), world
