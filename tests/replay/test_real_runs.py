"""A real run of the default model is recorded, and replayed by the command to the bit."""

from __future__ import annotations

import stat
from pathlib import Path

import msgspec
import pytest

from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.engine.trace.file import MAGIC, TraceWriter
from quire.engine.trace.records import Finished, Record
from quire.replay.trace import Trace
from quire.types.structured import StructuredOutputsParams

PROMPTS = ["The capital of France is", "One, two, three,", "The capital of France is a city", "List the numbers:"]


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay chooses the kernels of its process."""
    monkeypatch.setenv("QUIRE_CPU_ISA", "")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replay") / "trace"
    params = [
        SamplingParams(max_tokens=12, temperature=0.0, logprobs=2),
        SamplingParams(max_tokens=12, temperature=0.8, seed=3, n=2),
        SamplingParams(max_tokens=6, prompt_logprobs=1),
        SamplingParams(max_tokens=20, structured_outputs=StructuredOutputsParams(regex="[0-9]{3}( [0-9]{2}){3}")),
    ]
    with LLM(trace=str(path), max_num_batched_tokens=32, max_num_seqs=4) as llm:
        llm.generate(PROMPTS, params, use_tqdm=False)
    return path


def test_a_real_run_is_replayed_to_the_bit(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stat.S_IMODE(recorded.stat().st_mode) == 0o600
    assert main(["replay", str(recorded)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("EQUAL: "), said
    assert "5 requests" in said


def test_a_changed_token_is_named_with_its_step_and_request(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = Trace(recorded)
    records: list[Record] = list(trace.records())
    at = [i for i, r in enumerate(records) if isinstance(r, Finished) and any(r.token_ids)][4]
    end = records[at]
    assert isinstance(end, Finished)
    changed = [[token + 1 for token in ids] for ids in end.token_ids]
    records[at] = msgspec.structs.replace(end, token_ids=changed)
    path = tmp_path / "changed"
    writer = TraceWriter(path, trace.header, 1 << 20)
    writer.write(records)
    writer.close()
    assert main(["replay", str(path)]) == 3
    said = capsys.readouterr().out
    assert f"step {end.step_id}, request " in said
    assert "token_ids of the result differ" in said


def test_a_trace_of_another_kernel_path_model_or_version_is_refused(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = Trace(recorded)
    header = trace.header
    path = {**header.kernel_path, "kv_cache_dtype": "float31"}
    for change, cause in (
        ({"kernel_path": path}, "recorded with kv_cache_dtype 'float31' and this machine has 'float16'"),
        ({"kernel_path": {**header.kernel_path, "instruction_set": "abacus"}}, "instruction_set 'abacus'"),
        ({"model_digest": "0"}, "is not the recorded one"),
        ({"version": "0.0.1"}, "was recorded by Quire 0.0.1"),
        ({"redacted": True}, "the trace is redacted"),
        ({"segment": 3}, "was rotated away"),
    ):
        file = tmp_path / "changed"
        writer = TraceWriter(file, msgspec.structs.replace(header, **change), 1 << 20)
        writer.close()
        assert main(["replay", str(file)]) == 1
        assert cause in capsys.readouterr().err
    assert file.read_bytes().startswith(MAGIC)
