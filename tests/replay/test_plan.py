"""The simulator: the real scheduler in virtual time plans what the real engine planned; tables and loads."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.cli.main import main
from quire.engine.core import EngineCore
from quire.engine.loop import EngineLoop
from quire.engine.step_log import StepLog
from quire.engine.trace.file import TraceWriter
from quire.engine.trace.records import Finished, Planned, Record, Took, plan_digests
from quire.kv.layout import LayerKV, plan_layout
from quire.replay.capacity import OBJECTIVES, best_of, measure, variants, with_settings
from quire.replay.costs import CostTable, StepLoad, interpolated, shipped_tables
from quire.replay.pictures import capacity_picture
from quire.replay.simulate import SimulatedRequest, Simulation
from quire.replay.trace import Trace
from quire.replay.turns import recorded_outputs, turns
from quire.replay.workload import Workload, simulated, trace_arrivals
from quire.types.errors import ConfigError
from quire.types.outputs import EngineOutputs
from quire.types.request import AdapterRef, EngineRequest
from quire.types.sampling import PoolingParams, SamplingParams
from quire.types.step import StepPlan
from tests.replay.runs import Device, record, recorder, setup


class Plans(StepLog):
    def __init__(self) -> None:
        self.digests: list[object] = []
        self.plans: list[StepPlan] = []

    def planned(self, plan: StepPlan) -> None:
        self.digests.append(plan_digests(plan))
        self.plans.append(plan)


class MeasuredTimes:
    """The times of a recorded run, step by step."""

    idle = delivery = sending = admission = 0.0

    def __init__(self, trace: Trace) -> None:
        begins = [turn.begin for turn in turns(trace.records()) if turn.planned and turn.begin is not None]
        ends = [r.seconds for r in trace.records() if isinstance(r, Finished)]
        self._seconds = iter(ends)
        gaps = [later - now for now, later in pairwise(begins)] + [0.0]
        self._host = (gap - s for gap, s in zip(gaps, ends, strict=True))

    def seconds(self, load: StepLoad) -> float:
        return next(self._seconds)

    def host_seconds(self, rows: int) -> float:
        return next(self._host)


class Seen:
    """When clients saw the tokens of each request, and those of each step."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.ended: dict[str, SimulatedRequest] = {}

    def on_step(self, now: float, outputs: EngineOutputs, open_requests: dict[str, SimulatedRequest]) -> None:
        self.steps.append(now)

    def on_end(self, ended: SimulatedRequest) -> None:
        self.ended[ended.request.request_id] = ended


@pytest.mark.parametrize("seed", range(20))
def test_with_the_measured_times_of_a_run_the_simulator_plans_its_steps(tmp_path: Path, seed: int) -> None:
    """Outputs of both are the same token, so that hashes of blocks are equal too."""
    draw = random.Random(seed)
    made = replace(setup(draw, depth=1), speculative=None)
    log = recorder(tmp_path / "trace", made)
    device = Device(made, frozenset())
    device.fake._sample = lambda state, drafts: [7]  # type: ignore[method-assign]
    core = EngineCore(made.make_scheduler(), device, 1, log=log)
    loop = EngineLoop(core)
    waiting = [
        simulated(
            f"r{i}", [draw.choice((1, 2)) if k < 8 else k for k in range(draw.randint(1, 20))], draw.randint(1, 12)
        )
        for i in range(12)
    ]
    while waiting or loop.has_unfinished():
        while waiting and (draw.random() < 0.3 or not loop.has_unfinished()):
            loop.submit(waiting.pop(0))
        loop.run_once()
    loop.shutdown()
    trace = Trace(tmp_path / "trace")
    recorded = [r.digests for r in trace.records() if isinstance(r, Planned)]
    plans = Plans()
    # A message is taken before the step that it was taken before: its time is that of the step.
    arrivals = [
        (turn.begin, took.message)
        for turn in turns(trace.records())
        for took in turn.took
        if isinstance(took, Took) and isinstance(took.message, EngineRequest) and turn.begin is not None
    ]
    first = arrivals[0][0]
    simulation = Simulation(
        made,
        MeasuredTimes(trace),
        iter([(at - first - 1e-9, lambda request=request: request) for at, request in arrivals]),
        log=plans,
    )
    seen = Seen()
    simulation.run(seen)
    assert plans.digests == recorded
    # What a client waits for, too: a step's outputs leave when the next one begins.
    begins = [turn.begin - first for turn in turns(trace.records()) if turn.planned and turn.begin is not None]
    assert seen.steps[: len(begins) - 1] == pytest.approx(begins[1:], abs=1e-6)


@pytest.fixture(scope="module")
def table() -> CostTable:
    layout = plan_layout([LayerKV("full", None, 64)] * 2, 16)
    made = setup(random.Random(0), depth=1)
    made = replace(
        made,
        layout=layout,
        pool_blocks=(4000,),
        max_num_seqs=64,
        max_num_batched_tokens=512,
        long_prefill_token_threshold=256,
        max_model_len=4096,
        step_time_target=0.0,
        caches_prefixes=True,
        policy="fcfs",
    )
    return CostTable(
        machine="toy",
        model="toy",
        decode=[(1, 0.010), (64, 0.073)],
        decode_context=64,
        prefill=[(1, 0.010), (512, 0.521)],
        per_context=1e-6,
        per_pair=1e-7,
        beside=0.0,
        host=[(1, 0.0), (64, 0.0)],
        setup=made,
        environment={},
    )


def test_one_request_takes_what_the_table_says(table: CostTable) -> None:
    found = measure(table.setup, table, Workload(num_prompts=1, input_len=100, output_len=11).arrivals())
    assert found.ttft_ms["p50"] == pytest.approx(1000 * interpolated(table.prefill, 100))
    decode = [table.seconds(StepLoad(1, 101 + i)) for i in range(10)]
    assert found.duration_s == pytest.approx(interpolated(table.prefill, 100) + sum(decode))
    assert found.output_tokens == 11
    assert found.device_busy == pytest.approx(1.0)
    assert found.itl_ms["p50"] == pytest.approx(1000 * decode[5], rel=0.02)


def test_a_step_of_both_reads_the_weights_once_and_samples_for_every_row(table: CostTable) -> None:
    """Rows that decode cost 1 ms each here, prompt tokens too: sampling is free but for what `decode` says of it."""
    prompt = table.seconds(StepLoad(prompt_tokens=100, ends=1))
    both = table.seconds(StepLoad(8, 8 * 64, 100, ends=1))
    assert both == pytest.approx(prompt + 0.008)
    dear = msgspec.structs.replace(table, decode=[(1, 0.012), (64, 0.138)])  # 2 ms a row: half of it is sampling
    assert dear.seconds(StepLoad(8, 8 * 64, 100, ends=1)) == pytest.approx(both + 0.008)
    assert dear.seconds(StepLoad(8, 8 * 64, 100)) == pytest.approx(both + 0.007), "a chunk samples nothing"
    more = msgspec.structs.replace(table, beside=0.003)
    assert more.seconds(StepLoad(8, 8 * 64, 100, ends=1)) == pytest.approx(both + 0.003)
    assert more.seconds(StepLoad(prompt_tokens=100, ends=1)) == prompt
    read = table.seconds(StepLoad(8, 8 * 64 + 1000, 100, 5000.0, ends=1))
    assert read == pytest.approx(both + 1000 * table.per_context + 5000 * table.per_pair)


def test_a_client_sends_when_it_has_read_and_the_engine_has_begun_a_step_by_then(table: CostTable) -> None:
    slow = msgspec.structs.replace(table, delivery=0.002, host=[(1, 0.001), (64, 0.001)])
    plans, seen = Plans(), Seen()
    load = Workload(num_prompts=3, input_len=20, output_len=4, range_ratio=0.9, seed=3)
    Simulation(slow.setup, slow, load.arrivals(), max_concurrency=2, log=plans).run(seen)
    starts = {start.request_id: index for index, plan in enumerate(plans.plans) for start in plan.starts}
    first_end = min(seen.ended[name].last for name in ("0", "1"))
    steps = [now for now in seen.steps if now <= first_end]
    assert starts["2"] == len(steps) + 1, "the step that began at once is without it"
    third = seen.ended["2"]
    assert third.due == first_end
    assert third.first is not None
    # It waits for the step under way, then its own; a message each way, and what hosts take.
    assert third.first - third.due > slow.seconds(StepLoad(prompt_tokens=20, ends=1)) + 2 * 0.002


def test_requests_of_one_moment_are_sent_in_turn_so_an_idle_engine_begins_with_the_first(table: CostTable) -> None:
    plans, seen = Plans(), Seen()
    slow = msgspec.structs.replace(table, sending=0.0001)
    Simulation(slow.setup, slow, Workload(num_prompts=4, input_len=20, output_len=2).arrivals(), log=plans).run(seen)
    assert [len(plan.starts) for plan in plans.plans[:2]] == [1, 3]
    assert [seen.ended[str(index)].due for index in range(4)] == pytest.approx([0.0, 0.0001, 0.0002, 0.0003])


def test_requests_that_come_at_once_are_taken_in_one_after_the_other(table: CostTable) -> None:
    """Before the step that all of them begin with, which starts later for each."""
    load = Workload(num_prompts=4, input_len=20, output_len=1)
    firsts = []
    for admission in (0.0, 0.003):
        plans, seen = Plans(), Seen()
        costs = msgspec.structs.replace(table, admission=admission)
        Simulation(costs.setup, costs, load.arrivals(), log=plans).run(seen)
        assert len(plans.plans[0].starts) == 4
        firsts.append(seen.ended["0"].first)
    without, with_it = firsts
    assert without is not None
    assert with_it == pytest.approx(without + 4 * 0.003)


def test_a_step_that_finds_the_device_idle_takes_longer(table: CostTable) -> None:
    def seconds(depth: int, idle: float) -> float:
        costs = msgspec.structs.replace(table, idle=idle)
        load = Workload(num_prompts=1, input_len=100, output_len=11)
        return measure(replace(table.setup, steps_in_flight=depth), costs, load.arrivals()).duration_s

    assert seconds(1, 0.003) == pytest.approx(seconds(1, 0.0) + 11 * 0.003)
    assert seconds(2, 0.003) == pytest.approx(seconds(2, 0.0) + 0.003), "others are prepared while one runs"


def test_steps_with_prompts_cost_what_they_are_padded_to(table: CostTable) -> None:
    padded = msgspec.structs.replace(table, setup=replace(table.setup, step_sizes=(32, 64)))
    assert padded.seconds(StepLoad(prompt_tokens=33, ends=1)) == table.seconds(StepLoad(prompt_tokens=64, ends=1))
    assert padded.seconds(StepLoad(prompt_tokens=65, ends=1)) == table.seconds(StepLoad(prompt_tokens=65, ends=1))
    assert padded.seconds(StepLoad(8, 512)) == table.seconds(StepLoad(8, 512)), "decodes are measured by rows"


def test_a_curve_is_straight_between_its_points_and_behind_them() -> None:
    curve = [(1, 1.0), (3, 2.0), (5, 6.0)]
    assert [interpolated(curve, size) for size in (1, 2, 3, 4, 5, 7)] == [1.0, 1.5, 2.0, 4.0, 6.0, 10.0]
    dented = [(1, 1.0), (3, 5.0), (5, 4.0)]
    assert [interpolated(dented, size) for size in (4, 5, 9)] == [4.5, 4.0, 4.0]


def test_shared_prefixes_are_hit(table: CostTable) -> None:
    load = Workload(num_prompts=40, input_len=200, output_len=4, prefix_len=160, max_concurrency=4)
    found = measure(table.setup, table, load.arrivals(), max_concurrency=4)
    assert found.prefix_hit_rate > 0.6
    assert found.peak_running == 4


def test_few_blocks_mean_preemptions_and_less_throughput(table: CostTable) -> None:
    load = Workload(num_prompts=120, input_len=60, output_len=200)
    whole = measure(table.setup, table, load.arrivals())
    short = measure(with_settings(table.setup, {"kv_blocks": 300}), table, load.arrivals())
    assert whole.preemptions == 0
    assert short.preemptions > 0
    assert short.peak_kv_use > 0.9
    assert short.output_tokens_per_s < whole.output_tokens_per_s
    assert short.output_tokens == whole.output_tokens == 120 * 200


def test_the_best_of_several_settings_is_said(table: CostTable) -> None:
    load = Workload(num_prompts=60, input_len=500, output_len=20, request_rate=2.0)
    results = [
        measure(made, table, load.arrivals(), settings=chosen)
        for chosen, made in variants(table.setup, {"max_num_batched_tokens": [128, 2048]})
    ]
    best = min(results, key=OBJECTIVES["itl"].of)
    assert best.settings == {"max_num_batched_tokens": 128}
    assert best_of(results, OBJECTIVES["itl"]).startswith(
        "max_num_batched_tokens 128 has the best p99 ITL of these: "
    )
    picture = capacity_picture(results, "Planned")
    assert picture.startswith("<svg")
    assert "max_num_batched_tokens 128" in picture
    with pytest.raises(ConfigError, match="unknown setting 'colour'"):
        with_settings(table.setup, {"colour": 3})


def test_a_trace_is_a_load_also_when_it_is_redacted(tmp_path: Path, table: CostTable) -> None:
    plain, _ = record(21, tmp_path / "plain", num_requests=20)
    hidden, _ = record(21, tmp_path / "hidden", num_requests=20, trace_redact=True)
    found = [measure(table.setup, table, trace_arrivals(trace)) for trace in (plain, hidden)]
    assert found[0].completed == found[1].completed == 20
    assert found[0].output_tokens == found[1].output_tokens > 20


@pytest.mark.parametrize("redact", [False, True])
def test_a_trace_without_its_beginning_is_a_load(
    tmp_path: Path, table: CostTable, monkeypatch: pytest.MonkeyPatch, redact: bool
) -> None:
    """Every request that is left has the outputs that the whole trace says, also where a segment cut its steps."""
    written: list[Record] = []
    write = TraceWriter.write

    def keep(self: TraceWriter, records: Sequence[Record]) -> bool:
        written.extend(records)
        return write(self, records)

    monkeypatch.setattr(TraceWriter, "write", keep)
    trace, _ = record(
        1, tmp_path / "trace", num_requests=150, most_waiting=2, trace_size=32 << 10, trace_redact=redact
    )
    assert not trace.is_whole
    whole, left = recorded_outputs(written), recorded_outputs(trace.records())
    arrivals = [(at, make()) for at, make in trace_arrivals(trace)]
    names = [made.request_id for _, made in arrivals]
    assert 10 < len(names) < 150
    assert [left.get(name) for name in names] == [whole.get(name) for name in names]
    assert arrivals[0][0] == 0.0
    found = measure(table.setup, table, trace_arrivals(trace))
    assert found.completed == len(names)


@pytest.mark.parametrize("redact", [False, True])
def test_salts_adapters_and_pooling_of_a_trace_are_part_of_its_load(
    tmp_path: Path, table: CostTable, redact: bool
) -> None:
    """Of twelve requests with one prompt, four hit a cached prefix: the second of each kind that may."""
    prompt, made = [5] * 33, replace(setup(random.Random(0), depth=1), speculative=None, caches_prefixes=True)
    plain = SamplingParams(max_tokens=2)
    tuned = AdapterRef("a", "digest of a", "a")
    kinds: list[dict[str, Any]] = [
        {"params": plain},
        {"params": plain, "cache_salt": "one"},
        {"params": plain, "adapter": tuned},
        {"params": PoolingParams(pooling="last"), "cache_salt": "pooled"},
        {"params": PoolingParams(pooling="mean")},
        {"params": SamplingParams(max_tokens=2, prompt_logprobs=0)},
    ]
    log = recorder(tmp_path / "trace", made, trace_redact=redact)
    for index, kind in enumerate(kinds * 2):
        log.took(EngineRequest(request_id=f"{index:08x}", token_ids=prompt, max_tokens=2, **kind))
    log._write()
    log.close()
    arrivals = list(trace_arrivals(Trace(tmp_path / "trace")))
    requests = [make() for _, make in arrivals]
    assert [isinstance(one.params, PoolingParams) for one in requests] == [False, False, False, True, True, False] * 2
    later = ((float(index), make) for index, (_, make) in enumerate(arrivals))  # one after the other
    found = measure(replace(table.setup, layout=made.layout), table, later)
    assert found.completed == 12
    assert found.output_tokens == 8  # one of each that generates: none is recorded
    # 32 of 33 tokens are whole blocks. The cache is not asked for the two mean-pooled requests.
    assert found.prefix_hit_rate == pytest.approx(4 * 32 / (10 * 33))


def test_the_command_prints_a_table_a_sentence_and_a_picture(
    tmp_path: Path, table: CostTable, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "toy.json"
    file.write_bytes(msgspec.json.encode(table))
    flags = ["--num-prompts", "20", "--try", "max-num-batched-tokens=64,1024", "--price-per-hour", "2"]
    assert main(["plan", "toy", "--machine", str(file), *flags, "--picture", str(tmp_path / "plan.svg")]) == 0
    said = capsys.readouterr().out
    assert "of these" in said
    assert "toy on toy" in said
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")
    assert main(["plan", "toy", "--machine", str(file), "--num-prompts", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["completed"] == 5


def test_one_plan_is_one_column_and_says_why_requests_are_refused(
    tmp_path: Path, table: CostTable, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "toy.json"
    file.write_bytes(msgspec.json.encode(table))
    plan = ["plan", "toy", "--machine", str(file), "--num-prompts", "5"]
    assert main([*plan, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 1
    assert main([*plan, "--set", "max_model_len=100"]) == 0
    said = capsys.readouterr().out
    assert said.count("as they are") == 1
    assert "of these" not in said
    assert "5 of 5 requests are refused: request '0' has 128 prompt tokens" in said
    for flags, why in (
        (["--set", "max_num_seqs=nan"], "max_num_seqs is nan but must be a whole number"),
        (["--set", "max_num_seqs=1.5"], "max_num_seqs is 1.5 but must be a whole number"),
        (["--try", "step_time_target=-1"], "step_time_target is -1 but must be a number of seconds"),
        (["--price-per-hour", "-3"], "--price-per-hour is -3 but must be at least 0"),
        (["--trace", "x"], "--num-prompts is of a made-up load, and --trace has its own requests"),
    ):
        assert main([*plan, *flags]) == 1
        assert why in capsys.readouterr().err


def test_settings_that_refuse_requests_are_not_the_best(table: CostTable) -> None:
    load = Workload(num_prompts=40, input_len=100, output_len=10, range_ratio=0.5)
    results = [
        measure(made, table, load.arrivals(), settings=chosen)
        for chosen, made in variants(table.setup, {"max_model_len": [80]})
    ]
    assert results[1].ttft_ms["p99"] < results[0].ttft_ms["p99"]
    assert best_of(results, OBJECTIVES["ttft"]).startswith(
        "the settings as they are have the best p99 TTFT of those that refuse the fewest requests: "
    )


def test_a_machine_that_was_not_measured_is_refused_with_those_that_were(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "smollm2", "--machine", "abacus"]) == 1
    said = capsys.readouterr().err
    assert "no cost table of 'smollm2' on 'abacus'" in said
    assert "quire bench steps smollm2" in said


def test_a_table_of_another_model_is_refused(
    tmp_path: Path, table: CostTable, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "toy.json"
    file.write_bytes(msgspec.json.encode(table))
    assert main(["plan", "--machine", str(file), "--num-prompts", "2"]) == 0
    assert "toy on toy" in capsys.readouterr().out
    assert main(["plan", "game", "--machine", str(file), "--num-prompts", "2"]) == 1
    assert "is a cost table of 'toy', not of 'game'" in capsys.readouterr().err


def test_a_plan_needs_no_torch(tmp_path: Path, table: CostTable) -> None:
    file = tmp_path / "toy.json"
    file.write_bytes(msgspec.json.encode(table))
    code = (
        "import sys; sys.modules['torch'] = None\n"
        f"from quire.cli.main import main; sys.exit(main(['plan', 'toy', '--machine', {str(file)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_shipped_tables_can_be_read_and_say_where_they_were_measured() -> None:
    assert ("epyc-2-cores", "smollm2") in shipped_tables()
    for (machine, model), found in shipped_tables().items():
        assert (machine, model) == (found.machine, found.model)
        assert found.environment["commit"]
        assert found.seconds(StepLoad(8, 800)) > 0
