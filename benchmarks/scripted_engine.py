"""`quire serve` over an engine that computes nothing: `python benchmarks/scripted_engine.py FLAGS`.

The server, its two processes, the scheduler, the KV manager and the grammars are the real ones; only the executor
says scripted tokens of the default model's vocabulary: a call where the prompt shows tools, else a sentence, as far
as the grammar of a request allows it. With --engine it is the engine process.
"""

from __future__ import annotations

import sys
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.cli.parser import Parser
from quire.config.args import add_engine_arguments, add_server_arguments, engine_config_from, server_config_from
from quire.config.engine import EngineConfig
from quire.engine.constraints import Constraints
from quire.engine.core import EngineCore
from quire.engine.loop import EngineLoop
from quire.engine.process import serve
from quire.engine.zmq_client import OnPhase, ZmqClient
from quire.frontend.tokenizer import Tokenizer, load_tokenizer
from quire.kv.layout import LayerKV, plan_layout
from quire.kv.manager import KVCacheManager
from quire.loader.hub import resolve_model
from quire.sched.scheduler import Scheduler
from quire.sched.state import Limits
from quire.server.launch import run_server
from quire.structured.manager import GrammarManager
from quire.types.masks import Masks
from quire.types.messages import EngineInfo
from quire.types.sampling import SamplingParams
from quire.types.step import RowStart, StepPlan, StepResult, TokenLogprobs
from quire.utils.log import setup_logging
from quire.worker.executor import Executor

MODEL = "smollm2"
MAX_MODEL_LEN, MAX_NUM_SEQS, BLOCK_SIZE, NUM_BLOCKS = 2048, 64, 16, 4096
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
SENTENCES = (
    "Paris.",
    "The sky is blue because air scatters short waves more than long ones.",
    "Grüße aus Köln! 🚀 Das Wetter ist heiter bis wolkig.",
    "1, 2, 3, 5, 8, 13, 21, STOP and go on with 34, 55, 89.",
    "日本の首都は東京です。",
)


@dataclass
class Row:
    script: list[int]
    prompt: list[int]
    params: SamplingParams
    eos: int
    num_known: int
    num_computed: int
    num_said: int


class ScriptedStep(Future[StepResult]):
    def __init__(self, executor: ScriptedExecutor, plan: StepPlan) -> None:
        super().__init__()
        self._executor, self._plan = executor, plan

    def sample(self, masks: Future[Masks]) -> None:
        masked = [row for row in self._plan.rows if row in self._plan.mask_slots]
        self.set_result(self._executor.run(self._plan, dict(zip(masked, masks.result(), strict=True))))


class ScriptedExecutor(Executor):
    """Says the script of each row that caught up, a token a step, as far as its grammar allows that."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._rows: dict[int, Row] = {}
        self._encoded = {text: tokenizer.encode(text, add_special_tokens=False) for text in (CALL, *SENTENCES)}

    def execute(self, plan: StepPlan) -> ScriptedStep:
        for row in plan.freed_rows:
            self._rows.pop(row, None)
        for start in plan.starts:
            self._rows[start.row] = self._started(start)
        step = ScriptedStep(self, plan)
        if not plan.mask_slots:
            step.set_result(self.run(plan, {}))
        return step

    def is_sticky(self, error: Exception) -> bool:
        return False

    def shutdown(self) -> None:
        self._rows.clear()

    def _started(self, start: RowStart) -> Row:
        assert isinstance(start.params, SamplingParams)
        prompt = start.token_ids[: start.num_prompt_tokens]
        shown = self._tokenizer.decode(prompt, skip_special_tokens=False)
        calls = "<tools>" in shown and sum(prompt) % 4
        text = CALL if calls else SENTENCES[sum(prompt) % len(SENTENCES)]
        known, eos = len(start.token_ids), (*start.eos_token_ids, 0)[0]
        said = known - start.num_prompt_tokens
        return Row(self._encoded[text], prompt, start.params, eos, known, start.num_computed_tokens, said)

    def run(self, plan: StepPlan, masks: dict[int, Masks]) -> StepResult:
        result = StepResult(plan.step_id, [])
        for index, (number, count) in enumerate(zip(plan.rows, plan.num_tokens, strict=True)):
            row = self._rows[number]
            begin = row.num_computed
            row.num_computed += count
            if row.params.prompt_logprobs is not None and not row.num_said:
                told = row.prompt[begin + 1 : row.num_computed + 1]
                result.prompt_logprobs[index] = [_logprobs(token, row.params.prompt_logprobs) for token in told]
            if row.num_computed < row.num_known:
                result.token_ids.append([])
                continue
            token = _choose(row, masks.get(number))
            row.num_known += 1
            row.num_said += 1
            result.token_ids.append([token])
            if row.params.logprobs is not None:
                result.logprobs[index] = [_logprobs(token, row.params.logprobs)]
        return result


def _choose(row: Row, mask: Masks | None) -> int:
    wanted = row.eos
    if row.num_said < len(row.script):
        wanted = row.script[row.num_said]
    elif row.params.ignore_eos:
        wanted = row.script[row.num_said % len(row.script)]
    if mask is None or mask[wanted // 32] >> (wanted % 32) & 1:
        return wanted
    if mask[row.eos // 32] >> (row.eos % 32) & 1:
        return row.eos
    word = int(np.flatnonzero(mask)[0])
    bits = int(mask[word]) & 0xFFFFFFFF
    return 32 * word + (bits & -bits).bit_length() - 1


def _logprobs(token: int, count: int) -> TokenLogprobs:
    others = [other for other in range(100, 100 + count) if other != token]
    return TokenLogprobs([token, *others], [-0.5, *(-2.0 - 0.1 * index for index in range(len(others)))], 1)


def build(config: EngineConfig, report: Any) -> tuple[EngineLoop, EngineInfo]:
    report("import")
    tokenizer = load_tokenizer(resolve_model(MODEL).path)
    layout = plan_layout([LayerKV("full", None, 4)], BLOCK_SIZE)
    scheduler = Scheduler(
        Limits(
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=512,
            long_prefill_token_threshold=256,
            max_model_len=MAX_MODEL_LEN,
        ),
        policy="fcfs",
        kv=KVCacheManager(layout, NUM_BLOCKS, True),
    )
    core = EngineCore(scheduler, ScriptedExecutor(tokenizer), 1, Constraints(GrammarManager()))
    size = tokenizer.vocab_size
    info = EngineInfo(size, MAX_MODEL_LEN, BLOCK_SIZE, NUM_BLOCKS, MAX_NUM_SEQS)
    return EngineLoop(core), info


def main() -> int:
    if "--engine" in sys.argv[1:]:
        return serve(build)
    parser = Parser()
    add_server_arguments(parser)
    add_engine_arguments(parser)
    args = parser.parse_args()
    setup_logging("info")

    def launch(config: EngineConfig, on_phase: OnPhase) -> ZmqClient:
        return ZmqClient(config, on_phase=on_phase, command=[sys.executable, __file__, "--engine"])

    run_server(engine_config_from(args), server_config_from(args), launch)
    return 0


if __name__ == "__main__":
    sys.exit(main())
