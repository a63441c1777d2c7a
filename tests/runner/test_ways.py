"""A way to run steps is one file and one line of WAYS: the file is written here, and nothing else knows of it."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from quire.runner.eager import Eager
from quire.runner.ways import WAYS, Way, WayKind
from quire.types.sampling import SamplingParams
from tests.e2e.tiny import Driver, make_engine, make_model
from tests.runner.engines import Spy, runner_of, worker_of

DECODE_ALONE = '''
"""Steps that decode one row, through the program itself; others are left to other ways."""
import torch
from quire.platform.transfer import Download, upload
from quire.runner.step import Sampled
from quire.types.ledger import LedgerLine

class DecodeAlone:
    name, step_sizes = "decode_alone", ()

    def __init__(self, program):
        self.program, self.ran = program, 0

    @staticmethod
    def contributes(context):
        yield LedgerLine("one row", context.sizes.hidden_size * context.sizes.itemsize, "its hidden state")

    @classmethod
    def make(cls, context, program, eager, room):
        return cls(program) if context.platform.name == "cpu" and room > 1 else None

    @torch.inference_mode()
    def forward(self, step):
        shape = step.shape
        if not shape.is_decode or shape.num_rows > 1 or shape.sampling.logprobs is not None:
            return False
        step.hidden = self.run(step)
        self.ran += 1
        return True

    def run(self, step):
        from quire.attention.base import HostLengths
        from quire.runner.inputs import StepInputs
        program, tokens = self.program, step.tokens
        device = program.tables.tables.device
        inputs = StepInputs(1, 1, (), program.rows.scratch_row, device)
        inputs.load(step.plan.rows, tokens, ())
        lengths = HostLengths([1], tokens.contexts)
        finite = torch.empty(1, dtype=torch.bool, device=device)
        return program.mixed(inputs.lists, 1, None, finite, num_tokens=1, narrow=False, lengths=lengths).last

    @torch.inference_mode()
    def sample(self, step):
        rows = upload(step.sample_rows, step.hidden.device, torch.int64)
        ahead = torch.zeros_like(rows, dtype=torch.int32)
        step.sampled = Sampled(Download(self.program.sample(step.shape.sampling, step.hidden, rows, ahead)))

    def go_on(self, rows, hidden, kind, count):
        return None  # steps of a drafter, which another way runs

    def capture_next(self):
        return False
'''


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, contexts: ExitStack) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "ways_added"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "decode_alone.py").write_text(DECODE_ALONE)
    for name in ("ways_added", "ways_added.decode_alone"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    contexts.enter_context(WAYS.with_entries({"decode_alone": "ways_added.decode_alone:DecodeAlone"}))


def test_a_way_is_added_by_one_file_and_one_line(tmp_path: Path, added: None) -> None:
    model = make_model(tmp_path / "model", "llama")
    settings = {"attention_backend": "torch_ref"}  # whose steps no other way takes
    core = make_engine(model, **settings)
    way, eager = runner_of(core).ways
    assert type(way).__name__ == "DecodeAlone"
    for protocol in (Way, WayKind):
        assert {name for name in {**vars(protocol), **protocol.__annotations__} if name[0] != "_"} <= {*dir(way)}
    assert isinstance(eager, Eager)
    lines = {line.name: line.num_bytes for line in worker_of(core).plan.ledger.entries}
    assert lines["one row"] == 4 * worker_of(core).plan.sizes.hidden_size
    spy = Spy(eager)
    found = []
    for ways in ([way, spy], [eager]):
        runner_of(core).ways = ways
        driver = Driver(core)
        for index, params in enumerate(({"temperature": 0.0}, {"temperature": 0.9, "top_k": 9, "seed": 3})):
            asked = SamplingParams(max_tokens=4 + 4 * index, ignore_eos=True, **params)
            driver.add(str(index), [5 + index, 6, 7], asked)
        found.append({name: answer.content() for name, answer in driver.finish().items()})
    assert found[0] == found[1]
    assert [shape.is_decode for shape in spy.ran] == [False, True, True, True], "what it does not take goes on"
    assert way.ran == 4
