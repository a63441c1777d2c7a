"""LoRA on a CPU: decode steps of a batch with adapters and of the same batch without, in turn, in one engine.

    python benchmarks/lora_cpu.py [--adapters 4] [--rank 16] [--batch 32] [--rounds 6] [--dtype auto]

Adapters are random, on all linear layers; rows take them in turn. What counts is the ratio: it is to be at most 1.15.
Writes results/cpu/lora.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from report import RESULTS, environment
from safetensors.torch import save_file

from quire.bench.report import write_report
from quire.config.engine import EngineConfig
from quire.engine.build import build_engine
from quire.engine.control import obey
from quire.engine.core import EngineCore
from quire.loader.adapter_files import adapter_ref
from quire.loader.hub import find_model
from quire.loader.open import open_checkpoint
from quire.types.messages import Command
from quire.types.request import AdapterRef, EngineRequest
from quire.types.sampling import SamplingParams

_TOKENS = 96  # that each row decodes in a round


def make_adapter(folder: Path, config: EngineConfig, rank: int, seed: int) -> AdapterRef:
    """A folder as PEFT saves it."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, info in open_checkpoint(find_model(config.model)).tensors().items():
        if name.endswith("_proj.weight"):
            outputs, inputs = info.shape
            base = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{base}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * 0.01
            tensors[f"{base}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * 0.01
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return adapter_ref(folder.name, str(folder))


def decode(core: EngineCore, batch: int, adapters: list[AdapterRef | None], name: str) -> float:
    """Seconds of the median decode step of `batch` rows."""
    for index in range(batch):
        params = SamplingParams(temperature=0.0, max_tokens=_TOKENS, ignore_eos=True)
        prompt = [100 + index, *range(200, 215)]
        core.add_request(
            EngineRequest(
                request_id=f"{name}-{index}",
                token_ids=prompt,
                params=params,
                max_tokens=_TOKENS,
                adapter=adapters[index % len(adapters)],
            )
        )
    times = []
    while core.has_unfinished():
        if not core.has_work():
            continue
        begin = time.perf_counter()
        for output in core.step().outputs:
            assert output.error is None, output.error
        stats = core.stats()
        if stats.num_running == batch and not stats.num_prefilling:
            times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--dtype", default="auto", help="of adapters in their slots")
    args = parser.parse_args()
    config = EngineConfig.from_flat(
        model=args.model,
        enable_lora=True,
        max_loras=args.adapters,
        max_lora_rank=args.rank,
        lora_dtype=args.dtype,
        max_model_len=128,
        max_num_seqs=args.batch,
        enable_prefix_caching=False,
    )
    root = Path(tempfile.mkdtemp())
    adapters: list[AdapterRef | None] = [
        make_adapter(root / f"adapter{index}", config, args.rank, index) for index in range(args.adapters)
    ]
    core, _, _ = build_engine(config)
    for adapter in adapters:  # so that none is waited for later
        while not (reply := obey(core, Command(0, "read_adapter", adapter))).error and not reply.value.is_read:
            assert reply.value.error is None, reply
            time.sleep(0.01)  # or the reading thread would wait for the interpreter's lock
        assert reply.error is None, reply
    ratios, steps = [], []
    for index in range(args.rounds):
        plain = decode(core, args.batch, [None], f"plain{index}")
        adapted = decode(core, args.batch, adapters, f"adapted{index}")
        ratios.append(adapted / plain)
        steps.append({"without_ms": round(plain * 1e3, 2), "with_ms": round(adapted * 1e3, 2)})
        print(f"without {plain * 1e3:7.2f} ms, with {adapted * 1e3:7.2f} ms, ratio {ratios[-1]:.3f}", flush=True)
    print(f"median ratio {statistics.median(ratios[1:]):.3f}, wanted at most 1.15")
    core.shutdown()
    results = {"median_ratio": round(statistics.median(ratios[1:]), 3), "wanted": 1.15, "rounds": steps}
    print(write_report(RESULTS / "cpu" / "lora.json", environment("quire", "torch"), results))


if __name__ == "__main__":
    main()
