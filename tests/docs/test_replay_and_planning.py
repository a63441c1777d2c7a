"""docs/guides/replay.md and capacity-planning.md: their commands are understood, and those that need no model run."""

from __future__ import annotations

import random
import re
import shlex
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from quire.cli.main import build_parser, main
from quire.cli.replay import EXIT_DIFFERS
from quire.engine.trace.file import Trace, TraceWriter
from quire.engine.trace.records import Finished
from quire.kv.layout import LayerKV, plan_layout
from quire.replay.capacity import OBJECTIVES, TUNABLE
from quire.replay.costs import CostTable
from tests.e2e.tiny import make_model
from tests.replay.runs import record, setup
from tests.replay.test_speculation import record as run_engine

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
TEXTS = {name: (GUIDES / f"{name}.md").read_text(encoding="utf-8") for name in ("replay", "capacity-planning")}
COMMANDS = [line for text in TEXTS.values() for line in re.findall(r"^\$ quire (.*)$", text, flags=re.M)]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_understood(command: str) -> None:
    words = shlex.split(command)
    build_parser(words[0]).parse_args(words)


def test_plans_run_as_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    record(1, tmp_path / "quire.trace", num_requests=10)
    made = replace(
        setup(random.Random(0), depth=1),
        layout=plan_layout([LayerKV("full", None, 64)], 16),
        pool_blocks=(2000,),
        max_num_seqs=64,
        max_num_batched_tokens=512,
        max_model_len=2048,
        policy="fcfs",
    )
    table = CostTable(
        machine="my-server",
        model="smollm2",
        decode=[(1, 0.010), (64, 0.040)],
        decode_context=64,
        prefill=[(1, 0.010), (512, 0.300)],
        per_context=1e-7,
        per_pair=1e-8,
        beside=0.0,
        host=[(1, 0.0002)],
        setup=made,
        environment={},
    )
    (tmp_path / "my-server.json").write_bytes(msgspec.json.encode(table))
    plans = [command for command in COMMANDS if command.startswith("plan ")]
    assert len(plans) == 3
    for command in plans:
        assert main(shlex.split(command)) == 0
    assert (tmp_path / "plan.svg").read_text(encoding="utf-8").startswith("<svg")


def test_replays_run_as_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a trace in which one token of one request is another."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUIRE_CPU_ISA", "")
    run_engine(make_model(tmp_path / "model", "llama"), tmp_path / "right", 0)
    trace = Trace(tmp_path / "right")
    records = list(trace.records())
    where = next(i for i, r in enumerate(records) if isinstance(r, Finished) and any(r.token_ids))
    end = records[where]
    assert isinstance(end, Finished)
    records[where] = msgspec.structs.replace(end, token_ids=[[i + 1 for i in ids] for ids in end.token_ids])
    writer = TraceWriter(tmp_path / "quire.trace", trace.header, 1 << 24)
    writer.write(records)
    writer.close()
    replays = [command for command in COMMANDS if command.startswith("replay ")]
    assert len(replays) == 3
    for command in replays:
        assert main(shlex.split(command)) == EXIT_DIFFERS
        assert "DIFFERENT" in capsys.readouterr().out
    assert (tmp_path / "few.ids").read_text() == "r0\n"
    (tmp_path / "others.ids").write_text("r1\nr2\n")
    assert main(["replay", "quire.trace", "--requests", "others.ids"]) == 0


def test_settings_and_objectives_are_named() -> None:
    for name in (*TUNABLE, *OBJECTIVES):
        assert f"`{name}`" in TEXTS["capacity-planning"]
