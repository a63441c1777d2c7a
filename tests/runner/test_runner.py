"""The runner over hand-written plans, against the same model run straight through."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from quire.config.engine import EngineConfig
from quire.types.sampling import SamplingParams
from quire.types.step import RowStart, StepPlan, StepResult
from quire.worker.direct import DirectModel
from quire.worker.worker import Worker
from tests.e2e.tiny import VOCAB, make_model

BLOCK = 16
PROMPT = [3 + 7 * index % (VOCAB - 3) for index in range(40)]
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def logits(folder: Path) -> torch.Tensor:
    with torch.inference_mode():
        return DirectModel(EngineConfig.from_flat(model=str(folder))).logits(PROMPT).clone()


@pytest.fixture
def worker(folder: Path) -> Worker:
    return Worker(EngineConfig.from_flat(model=str(folder), max_num_seqs=4, max_model_len=128))


def start(row: int, tokens: list[int], params: SamplingParams = GREEDY, computed: int = 0) -> RowStart:
    return RowStart(row, f"r{row}", tokens, len(tokens), computed, params, 0, ())


def step(worker: Worker, number: int, counts: dict[int, int], starts: tuple[RowStart, ...] = ()) -> StepResult:
    """Row r owns blocks 1 + 8 r, 2 + 8 r, ... for all of its context."""
    cells = [(s.row, index) for s in starts for index in range(8)]
    plan = StepPlan(
        number,
        list(counts),
        list(counts.values()),
        starts=list(starts),
        block_rows=[row for row, _ in cells],
        block_groups=[0] * len(cells),
        block_indices=[index for _, index in cells],
        block_ids=[1 + 8 * row + index for row, index in cells],
    )
    return worker.execute(plan).result()


def test_a_row_samples_when_it_has_caught_up(worker: Worker, logits: torch.Tensor) -> None:
    assert step(worker, 0, {2: 30}, (start(2, PROMPT),)).token_ids == [[]]
    assert step(worker, 1, {2: 10}).token_ids == [[int(logits[-1].argmax())]]


def test_rows_of_one_step_are_in_the_plans_order(worker: Worker, logits: torch.Tensor) -> None:
    starts = (start(3, PROMPT), start(0, PROMPT[:5]), start(1, PROMPT[:20]))
    result = step(worker, 0, {1: 20, 3: 7, 0: 5}, starts)
    assert result.token_ids == [[int(logits[19].argmax())], [], [int(logits[4].argmax())]]


def test_prompt_logprobs_are_those_of_the_next_tokens(worker: Worker, logits: torch.Tensor) -> None:
    params = SamplingParams(temperature=0.0, prompt_logprobs=2)
    first = step(worker, 0, {0: 5, 1: 33}, (start(0, PROMPT[:5]), start(1, PROMPT, params)))
    second = step(worker, 1, {1: 7})
    assert sorted(first.prompt_logprobs) == [1]
    entries = first.prompt_logprobs[1] + second.prompt_logprobs[0]
    assert [len(first.prompt_logprobs[1]), len(second.prompt_logprobs[0])] == [33, 6]
    expected = logits.log_softmax(-1)
    for position, entry in enumerate(entries):
        target = PROMPT[position + 1]
        assert entry.token_ids[0] == target
        assert entry.logprobs[0] == pytest.approx(float(expected[position, target]), abs=1e-4)
        assert entry.rank == int((expected[position] > expected[position, target]).sum()) + 1
        assert entry.token_ids[1:] == expected[position].topk(2).indices.tolist()
    assert step(worker, 2, {1: 1}).prompt_logprobs == {}, "outputs are no prompt"


def test_a_row_may_start_after_a_prefix_hit(worker: Worker, logits: torch.Tensor) -> None:
    step(worker, 0, {0: 40}, (start(0, PROMPT),))
    shared = StepPlan(
        1,
        [1],
        [8],
        starts=[start(1, PROMPT, computed=32)],
        block_rows=[1, 1, 1],
        block_groups=[0, 0, 0],
        block_indices=[0, 1, 2],
        block_ids=[1, 2, 20],
    )
    assert worker.execute(shared).result().token_ids == [[int(logits[-1].argmax())]]


def test_a_freed_row_serves_the_next_request(worker: Worker, logits: torch.Tensor) -> None:
    wanted = SamplingParams(temperature=0.0, prompt_logprobs=1, logprobs=1)
    step(worker, 0, {0: 5}, (start(0, PROMPT[:5], wanted),))
    plan = StepPlan(1, [0], [20], freed_rows=[0], starts=[start(0, PROMPT[:20])])
    result = worker.execute(plan).result()
    assert result.token_ids == [[int(logits[19].argmax())]]
    assert (result.logprobs, result.prompt_logprobs) == ({}, {}), "nothing of the row's first owner is left"


def test_errors_are_told_by_row(worker: Worker) -> None:
    impossible = SamplingParams(allowed_token_ids=[9], bad_words_token_ids=((9,),))
    result = step(worker, 0, {0: 5, 1: 5}, (start(0, PROMPT[:5]), start(1, PROMPT[:5], impossible)))
    assert list(result.errors) == [1]
    assert "no token may be chosen" in result.errors[1]
    assert len(result.token_ids[0]) == 1


def test_masks_of_a_step_that_failed_touch_no_other(
    worker: Worker, logits: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = (start(0, PROMPT[:5]), start(1, PROMPT[:20]))
    step(worker, 0, {0: 5}, (starts[0],))
    running = worker.execute(StepPlan(1, [0], [1], mask_slots={0: 0}))
    masks = np.zeros((1, -(-VOCAB // 32)), dtype=np.int32)
    with monkeypatch.context() as patch:
        patch.setattr(worker.runner.ways[0], "sample", lambda step: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            running.sample(masks)
    assert step(worker, 2, {1: 20}, (starts[1],)).token_ids == [[int(logits[19].argmax())]]


def test_masks_made_in_the_workers_room(worker: Worker) -> None:
    step(worker, 0, {0: 5, 1: 5}, (start(0, PROMPT[:5]), start(1, PROMPT[:6])))
    running = worker.execute(StepPlan(1, [1, 0], [1, 1], mask_slots={1: 0, 0: 1}))
    room = worker.runner.sampler.masks.room(2)
    room.fill(0)
    room.view(np.uint32)[0, 150 // 32] = 1 << 150 % 32
    room.view(np.uint32)[1, 31 // 32] = 1 << 31
    running.sample(room)
    assert running.result().token_ids == [[150], [31]]


@pytest.mark.parametrize("held", [0, 1, 2])
def test_a_row_advances_by_the_drafts_that_hold(worker: Worker, held: int) -> None:
    """Row 1 says what it says alone; row 0 says the same, guessed to some part."""
    known = [step(worker, 0, {0: 5, 1: 5}, (start(0, PROMPT[:5]), start(1, PROMPT[:5]))).token_ids[0][0]]
    known += [step(worker, number, {1: 1}).token_ids[0][0] for number in range(1, 6)]
    drafts = [token if index < held else token ^ 1 for index, token in enumerate(known[1:3])]
    result = worker.execute(StepPlan(6, [0], [3], draft_token_ids={0: drafts})).result()
    assert result.token_ids == [known[1 : 2 + held]]
    rows = worker.runner.rows
    assert int(rows.num_tokens[0]) == rows.host_num_tokens[0] == 7 + held
    assert int(rows.num_computed[0]) == rows.host_num_computed[0] == 6 + held
    assert not rows.unsettled
    assert step(worker, 7, {0: 1}).token_ids == [[known[2 + held]]]


def test_a_result_that_comes_late_changes_no_other_request(worker: Worker) -> None:
    step(worker, 0, {0: 5}, (start(0, PROMPT[:5]),))
    running = worker.execute(StepPlan(1, [0], [3], draft_token_ids={0: [7, 8]}))
    rows = worker.runner.rows
    assert rows.unsettled == {0: 1}
    rows.free(0)
    rows.start(start(0, PROMPT[:9]))
    running.result()
    assert (rows.host_num_tokens[0], rows.host_num_computed[0], rows.unsettled) == (9, 0, {})


def test_results_hold_no_tensors(worker: Worker) -> None:
    import msgspec

    params = SamplingParams(logprobs=3, prompt_logprobs=1)
    result = step(worker, 0, {0: 5}, (start(0, PROMPT[:5], params),))
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=StepResult)
    assert again == result
