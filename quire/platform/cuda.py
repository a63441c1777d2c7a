"""The CUDA platform: work is queued on the device and the host runs ahead of it."""

from __future__ import annotations

import importlib.util
import mmap
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from quire.platform.base import DefaultMemory, HostCopy, MemorySupply, Platform
from quire.platform.recording import CudaGraphPool
from quire.types.errors import ConfigError, EngineError
from quire.utils.log import get_logger

logger = get_logger(__name__)

_OLDEST = (8, 0)  # Ampere, the first with bfloat16
_KERNEL_BYTES = 1 << 20  # more than a compiled kernel has
_CHUNK = 1 << 29  # bytes of pinned memory that are taken at a time


class CudaPlatform(Platform):
    name = "cuda"
    device = torch.device("cuda")
    default_dtype = torch.bfloat16
    default_max_num_seqs = 256
    default_max_num_batched_tokens = 8192
    default_steps_in_flight = 2
    default_step_time_target = 0.023
    step_times = (0.004, 5e-5, 2.5e-5, 1e-9)  # Llama 8B on an H200
    attention_backends = ("triton",)
    deterministic_backend = "triton_fixed"
    uses_host_memory = False
    asynchronous = True
    batch_invariant = False
    graph_sizes = (1, 2, 4, 8, *range(16, 257, 16), 320, 384, 448, 512)
    mixed_graph_sizes = (32, 64, 128, 192, 256, 384, 512, 768, 1024)
    narrow_above = 1024  # smaller mixed steps are captured whole

    def start(self, num_threads: int | None) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        if not torch.cuda.is_available():
            why = "finds no GPU" if torch.backends.cuda.is_built() else "was built without CUDA"
            raise ConfigError(f"device is 'cuda' but torch {torch.__version__} here {why}; set --device cpu, or auto")
        torch.cuda.init()
        capability = torch.cuda.get_device_capability()
        if capability < _OLDEST:
            found, needed = (".".join(map(str, version)) for version in (capability, _OLDEST))
            raise ConfigError(
                f"{torch.cuda.get_device_name()} has compute capability {found}, and kernels need {needed} or newer;"
                " set --device cpu"
            )
        _check_kernel_folder()

    @property
    def hardware(self) -> str:
        return f"cuda {torch.cuda.get_device_name()}, torch {torch.__version__}"

    @property
    def num_cards(self) -> int:
        return torch.cuda.device_count()

    def available_memory(self, utilization: float = 1.0, card: int = 0) -> MemorySupply:
        free, total = torch.cuda.mem_get_info(card)
        left = max(0, free - int(total * (1.0 - utilization)))
        return MemorySupply(left, "free memory of the GPU", "raise --gpu-memory-utilization, or free some of it")

    def peak_memory(self, work: Callable[[], None]) -> int | None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        torch.cuda.empty_cache()
        return peak

    def default_kv_memory(self, available: int, one_request: int) -> DefaultMemory:
        # Less a reserve for the allocator's rounding and for graphs.
        return DefaultMemory(max(0, available * 97 // 100 - (1 << 30)), "what weights and workspace leave")

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def is_sticky(self, error: Exception) -> bool:
        return isinstance(error, torch.AcceleratorError)

    def is_out_of_memory(self, error: Exception) -> bool:
        return isinstance(error, torch.OutOfMemoryError)

    def release_memory(self) -> None:
        super().release_memory()
        torch.cuda.empty_cache()

    def host_copy(
        self, constant: Iterable[torch.Tensor], changing: Iterable[torch.Tensor], cleared: Iterable[torch.Tensor]
    ) -> HostCopy:
        return PinnedCopy(_storages(constant), _storages(changing), _storages(cleared))

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def graph_pool(self, num_bytes: int) -> CudaGraphPool:
        return CudaGraphPool(num_bytes)


class PinnedCopy(HostCopy):
    """In pinned memory, taken once: pinning takes longer than copying. What is constant is copied once, too.

    In chunks of one size, so that many can be pinned at a time.
    """

    def __init__(
        self,
        constant: Mapping[int, torch.UntypedStorage],
        changing: Mapping[int, torch.UntypedStorage],
        cleared: Mapping[int, torch.UntypedStorage],
    ) -> None:
        self._constant = list(constant.values())
        self._changing = [s for address, s in changing.items() if address not in constant and address not in cleared]
        self._cleared = [(storage, storage.nbytes()) for storage in cleared.values()]
        self._sizes = {id(storage): storage.nbytes() for storage in (*self._constant, *self._changing)}
        with ThreadPoolExecutor() as pool:
            chunks = range(-(-sum(self._sizes.values()) // _CHUNK))
            self._chunks = list(pool.map(lambda _: _pinned_chunk(), chunks))
        addresses = [chunk.data_ptr() for chunk in self._chunks]
        weakref.finalize(self, lambda: [torch.cuda.cudart().cudaHostUnregister(each) for each in addresses])
        self._is_copied = False

    def move(self) -> None:
        first = 0
        for storages, copies in ((self._constant, not self._is_copied), (self._changing, True)):
            for storage in storages:
                if copies:
                    self._each_piece(storage, first, lambda host, device: host.copy_(device, non_blocking=True))
                first += self._sizes[id(storage)]
        torch.cuda.synchronize()
        self._is_copied = True
        for storage in (*self._constant, *self._changing, *(storage for storage, _ in self._cleared)):
            storage.resize_(0)

    def put_back(self) -> None:
        first = 0
        for storage in (*self._constant, *self._changing):
            storage.resize_(self._sizes[id(storage)])
            self._each_piece(storage, first, lambda host, device: device.copy_(host, non_blocking=True))
            first += self._sizes[id(storage)]
        for storage, size in self._cleared:
            storage.resize_(size)
            _bytes_of(storage).zero_()
        torch.cuda.synchronize()

    def _each_piece(
        self, storage: torch.UntypedStorage, first: int, copy: Callable[[torch.Tensor, torch.Tensor], object]
    ) -> None:
        """Its bytes are those from `first` on, of all chunks one after the other."""
        device, done = _bytes_of(storage), 0
        while done < len(device):
            chunk, start = divmod(first + done, _CHUNK)
            size = min(_CHUNK - start, len(device) - done)
            copy(self._chunks[chunk][start : start + size], device[done : done + size])
            done += size


def _pinned_chunk() -> torch.Tensor:
    """Pinned memory that goes back to the system; several times faster to get than from CUDA's own allocator."""
    memory = mmap.mmap(-1, _CHUNK)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    chunk = torch.frombuffer(memory, dtype=torch.uint8)
    chunk.view(-1, mmap.PAGESIZE)[:, 0] = 0  # so that every page is there
    failure = int(torch.cuda.cudart().cudaHostRegister(chunk.data_ptr(), _CHUNK, 0))
    if failure:
        raise EngineError(
            f"host memory for sleeping weights cannot be pinned (CUDA error {failure}); sleep at level 2"
        )
    return chunk


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Those with bytes on the device, by their address."""
    found = (tensor.untyped_storage() for tensor in tensors if tensor.is_cuda)
    return {storage.data_ptr(): storage for storage in found if storage.nbytes()}


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _check_kernel_folder() -> None:
    """Kernels are compiled into files: no room for them would else be found in the middle of a step."""
    if importlib.util.find_spec("triton") is None:
        return  # whoever needs it says so
    from triton import knobs

    folder = Path(knobs.cache.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_KERNEL_BYTES))
    except OSError as error:
        why = (
            f"compiled kernels cannot be written to {folder} ({error.strerror}); set TRITON_CACHE_DIR to a folder"
            " that this user may write to and that has room"
        )
        if folder.is_dir() and any(folder.iterdir()):  # perhaps all that there will be need of, in a read-only image
            logger.warning("%s", why)
            return
        raise ConfigError(why) from error


class DescribedCuda(CudaPlatform):
    """A GPU that is not at hand, as far as a plan of memory needs it."""

    is_here = False

    def __init__(self, name: str, total: int, free: int) -> None:
        self._name, self._total, self._free = name, total, free

    def start(self, num_threads: int | None) -> None:
        return None

    @property
    def hardware(self) -> str:
        return f"cuda {self._name}"

    def available_memory(self, utilization: float = 1.0, card: int = 0) -> MemorySupply:
        left = max(0, self._free - int(self._total * (1.0 - utilization)))
        return MemorySupply(left, f"of one {self._name}", "raise --gpu-memory-utilization, or use more cards")
