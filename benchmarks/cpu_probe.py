"""One engine, loaded once and asked over standard input to generate; what benchmarks/cpu_peers.py talks to.

    python benchmarks/cpu_probe.py quire|llama.cpp|vllm|openvino|transformers MODEL THREADS

Each line in is {"prompts": [[token, ...], ...], "outputs": n}; each line out the seconds it took to complete all of
them greedily with exactly n tokens. The first line out says how long import and load took. It runs in the engine's
own environment, so it imports nothing of Quire unless that is the engine.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

STARTED = time.perf_counter()

Generate = Callable[[list[list[int]], int], None]

MAX_LENGTH = 2048
STREAMS = 32


def quire(model: str, threads: int, activations: str = "auto") -> Generate:
    from quire import LLM, SamplingParams

    llm = LLM(model, enable_prefix_caching=False, max_model_len=MAX_LENGTH, activations=activations)

    def generate(prompts: list[list[int]], outputs: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True, detokenize=False)
        done = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        check([len(request.outputs[0].token_ids) for request in done], outputs)

    return generate


def llama_cpp(model: str, threads: int) -> Generate:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_parallel, params.n_ctx, params.kv_unified = STREAMS, STREAMS * 512, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.verbosity = -1
    server = xllamacpp.Server(params)

    def complete(ids: list[int], outputs: int, counts: list[int]) -> None:
        answer = server.handle_completions(
            {"prompt": ids, "n_predict": outputs, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        )
        counts.append(answer["usage"]["completion_tokens"])

    def generate(prompts: list[list[int]], outputs: int) -> None:
        counts: list[int] = []
        calls = [threading.Thread(target=complete, args=(ids, outputs, counts)) for ids in prompts]
        for call in calls:
            call.start()
        for call in calls:
            call.join()
        if len(counts) != len(prompts):
            raise SystemExit(f"{len(prompts) - len(counts)} of {len(prompts)} requests failed")
        check(counts, outputs)

    return generate


def vllm(model: str, threads: int) -> Generate:
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype="float32", max_model_len=MAX_LENGTH, max_num_seqs=STREAMS, enable_prefix_caching=False)

    def generate(prompts: list[list[int]], outputs: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True, detokenize=False)
        done = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        check([len(request.outputs[0].token_ids) for request in done], outputs)

    return generate


def openvino(model: str, threads: int) -> Generate:
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = MAX_LENGTH
    pipeline = genai.LLMPipeline(model, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=threads)

    def generate(prompts: list[list[int]], outputs: int) -> None:
        ids = np.array(prompts, dtype=np.int64)
        config = genai.GenerationConfig(max_new_tokens=outputs, ignore_eos=True, do_sample=False)
        inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        check([len(tokens) for tokens in pipeline.generate(inputs, config).tokens], outputs)

    return generate


def transformers(model: str, threads: int) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def generate(prompts: list[list[int]], outputs: int) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = loaded.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=outputs,
                min_new_tokens=outputs,
                do_sample=False,
                pad_token_id=0,
            )
        check([out.shape[1] - ids.shape[1]], outputs)

    return generate


ENGINES = {
    "quire": quire,
    "quire-int8": partial(quire, activations="int8"),
    "llama.cpp": llama_cpp,
    "vllm": vllm,
    "openvino": openvino,
    "transformers": transformers,
}


def check(counts: list[int], outputs: int) -> None:
    """A shorter answer would be a false result."""
    if any(count != outputs for count in counts):
        raise SystemExit(f"asked for {outputs} tokens each, got {sorted(set(counts))}")


def main() -> None:
    name, model, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    # Engines print to standard output as they like; the answers go where it pointed at first.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    generate = ENGINES[name](model, threads)

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    answer({"ready_s": time.perf_counter() - STARTED})
    for line in sys.stdin:
        job = json.loads(line)
        started = time.perf_counter()
        generate(job["prompts"], job["outputs"])
        answer({"seconds": time.perf_counter() - started})


if __name__ == "__main__":
    main()
