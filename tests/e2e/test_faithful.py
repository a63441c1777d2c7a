"""The default model's packed weights against its dequantized float32 self in plain torch, and batches of any size."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from quire import LLM, SamplingParams
from quire.config.engine import EngineConfig
from quire.frontend.tokenizer import load_tokenizer
from quire.loader.hub import resolve_model
from quire.worker.direct import DirectModel

TEXT = """The lighthouse stood at the end of the long stone pier, where the river met the sea. Every evening an old
man climbed its one hundred and twelve steps to light the lamp, and every morning he climbed them again to put it out.
In winter the waves broke over the wall and froze on the railings, so that the tower looked as if it were made of
glass. Ships from the north brought timber and salt; ships from the south brought oranges, wool and news. The keeper
wrote down the name of each one in a ledger, together with the hour and the direction of the wind. When he was asked
why, he said that somebody might want to know. Water boils at 100 degrees Celsius at sea level, and at about 93
degrees on a mountain of 2,000 metres, because the air presses less on it. def mean(values): return sum(values) /
len(values). The committee will meet on Tuesday, 14 March, to discuss the budget for the coming year."""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(kv_cache_memory=128 << 20, max_num_seqs=32) as llm:
        yield llm


def mean_logprob(token_ids: list[int], **settings: str) -> float:
    direct = DirectModel(EngineConfig.from_flat(kv_cache_memory=64 << 20, max_model_len=512, **settings))
    with torch.inference_mode():
        logprobs = direct.logits(token_ids).double().log_softmax(-1)
    return float(logprobs[:-1].gather(1, torch.tensor(token_ids[1:])[:, None]).mean())


@pytest.mark.parametrize("activations", ["float32", "int16"])
def test_perplexity_is_that_of_the_dequantized_model(activations: str, monkeypatch: pytest.MonkeyPatch) -> None:
    token_ids = load_tokenizer(resolve_model("smollm2").path).encode(TEXT)
    assert 200 < len(token_ids) < 400
    packed = mean_logprob(token_ids, activations=activations)
    monkeypatch.setattr("quire.kernels.cpu.library.load", lambda: None)
    reference = mean_logprob(token_ids, dtype="float32")
    assert -4 < reference < -1, "the text is read as language"
    # Perplexity is exp of the negative mean: 0.1 % of it is 0.001 of the mean.
    assert abs(packed - reference) < 1e-3


def test_greedy_tokens_are_equal_for_batches_of_1_7_and_32(llm: LLM) -> None:
    questions = [f"Name {number} things that are {colour}." for number in range(2, 10) for colour in ("red", "green")]
    questions += [f"What is {number} plus {number}?" for number in range(16)]
    chats = [[{"role": "user", "content": question}] for question in questions]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    found = {size: [o.outputs[0].token_ids for o in llm.chat(chats[:size], params)] for size in (32, 7, 1)}
    assert found[7] == found[32][:7]
    assert found[1] == found[32][:1]


PEAK_OF_A_RUN = """
import re, sys
from pathlib import Path
from quire.cli.main import main
assert main(["run", "--max-tokens", "4", "What is the capital of France?"]) == 0
print(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc; other systems need another way to measure")
def test_a_run_takes_little_memory() -> None:
    command = [sys.executable, "-c", PEAK_OF_A_RUN]
    answer, peak = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True
    ).stdout.splitlines()
    assert answer == "The capital of France"
    assert int(peak) * 1024 < 600e6, "torch and the model together"
