"""The default model as a user meets it: through Python, streamed, through the async engine and the command line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from quire import LLM, SamplingParams
from quire.config.engine import EngineConfig
from quire.frontend.async_engine import AsyncEngine

QUESTION = "What is the capital of France?"
MESSAGES = [{"role": "user", "content": QUESTION}]
ANSWER = "The capital of France is Paris."
ANSWER_IDS = [504, 3575, 282, 4649, 314, 7042, 30, 2]
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(kv_cache_memory=64 << 20, max_num_seqs=16) as llm:
        yield llm


def test_chat(llm: LLM) -> None:
    (output,) = llm.chat(MESSAGES, GREEDY)
    (completion,) = output.outputs
    assert completion.token_ids == ANSWER_IDS
    assert (completion.text, completion.finish_reason) == (ANSWER, "stop")
    assert output.finished
    assert output.prompt is not None
    assert output.prompt.endswith(f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n")


def test_streamed_pieces_join_to_the_answer(llm: LLM) -> None:
    outputs = list(llm.stream(MESSAGES, GREEDY))
    assert "".join(output.outputs[0].text for output in outputs) == ANSWER
    assert [token for output in outputs for token in output.outputs[0].token_ids] == ANSWER_IDS
    assert len(outputs) > 4
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_a_batch_answers_as_if_alone(llm: LLM) -> None:
    others = [[{"role": "user", "content": f"Name {count} colours."}] for count in range(2, 6)]
    short = SamplingParams(temperature=0.0, max_tokens=10)
    outputs = llm.chat([MESSAGES, *others, MESSAGES], short)
    assert outputs[0].outputs[0].token_ids == outputs[-1].outputs[0].token_ids == ANSWER_IDS
    alone = llm.chat(others[2], short)[0]
    assert outputs[3].outputs[0].token_ids == alone.outputs[0].token_ids
    assert outputs[3].outputs[0].text == alone.outputs[0].text


def test_generate_with_logprobs_and_a_stop_string(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, logprobs=2, stop="Paris", prompt_logprobs=1)
    (output,) = llm.generate("The capital of France is", params)
    completion = output.outputs[0]
    assert completion.text.strip() == ""
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "Paris")
    assert completion.logprobs is not None
    assert any(entry.decoded_token == " Paris" for entry in completion.logprobs[0].values())
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_the_same_seed_gives_the_same_text(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=12, n=2)
    first, second = llm.generate(["Once upon a time", "Once upon a time"], params)
    assert [c.text for c in first.outputs] == [c.text for c in second.outputs]
    assert first.outputs[0].text != first.outputs[1].text


async def test_the_async_engine() -> None:
    config = EngineConfig.from_flat(kv_cache_memory=64 << 20)
    async with AsyncEngine.from_config(config) as engine:
        text = ""
        async for output in engine.chat(
            MESSAGES, SamplingParams(temperature=0.0, max_tokens=64, output_kind="delta")
        ):
            text += output.outputs[0].text
        assert text == ANSWER


def quire(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quire", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120)


def test_run_with_an_argument() -> None:
    done = quire("run", QUESTION)
    assert (done.returncode, done.stdout, done.stderr) == (0, ANSWER + "\n", "")


def test_run_from_stdin() -> None:
    done = quire("run", "--max-tokens", "3", stdin=QUESTION + "\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "The capital of\n", "")


def test_chat_from_a_pipe_remembers_the_conversation() -> None:
    done = quire("chat", "--temperature", "0", "--max-tokens", "10", stdin=QUESTION + "\nAnd of Italy?\n")
    assert (done.returncode, done.stdout) == (0, f"{ANSWER}\nThe capital of Italy is Rome.\n")


def test_fit_prints_the_ledger_without_loading() -> None:
    done = quire("fit", "--kv-cache-memory", "64MiB")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [
        "weights",
        "KV",
        "rows",
        "block",
        "masks",
        "sampling",
        "activations",
        "attention",
        "spare",
        "total",
        "KV",
        "max_model_len",
    ]
    assert "134.5 M parameters of 5.7 bits" in lines[0]
