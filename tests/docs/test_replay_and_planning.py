"""docs/guides/replay.md and capacity-planning.md: their commands are understood, and run on a tiny model."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import msgspec
import pytest

from quire.cli.main import build_parser, main
from quire.cli.replay import EXIT_DIFFERS
from quire.engine.trace.file import TraceWriter
from quire.engine.trace.records import Finished
from quire.replay.capacity import OBJECTIVES, TUNABLE
from quire.replay.costs import read_table
from quire.replay.trace import Trace
from tests.e2e.tiny import make_model
from tests.replay.runs import record
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
    (bench,) = (shlex.split(command) for command in COMMANDS if command.startswith("bench "))
    bench[2] = str(make_model(tmp_path / "model", "llama", max_position_embeddings=512))
    few = ["--max-num-seqs", "16", "--max-num-batched-tokens", "64", "--kv-cache-memory", "4MiB", "--seconds", "1"]
    assert main([*bench, *few]) == 0
    table = read_table(tmp_path / "my-server.json")
    assert table.machine == "my-server"
    assert [size for size, _ in table.decode] == [1, 2, 4, 8, 16]
    assert [size for size, _ in table.prefill] == [1, 8, 16, 32, 64]
    assert 0 < table.delivery < 0.1
    assert 0 < table.sending < 0.1
    assert 0 < table.admission < 0.1
    assert 0 < table.host[0][1] < 0.1
    plans = [command for command in COMMANDS if command.startswith("plan ")]
    assert len(plans) == 3
    for command in plans:
        few = [] if "--trace" in command else ["--num-prompts", "40"]  # the last one counts
        name, _, *flags = shlex.split(command)
        assert main([name, bench[2], *flags, *few]) == 0  # of the model that was measured
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
