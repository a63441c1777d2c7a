"""quire run: prompt in, streamed answer out."""

from __future__ import annotations

import io
import sys
from collections.abc import Generator
from itertools import islice
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from quire.cli.main import main
from quire.config.engine import EngineConfig
from quire.types.outputs import RequestOutput
from quire.types.sampling import SamplingParams
from tests.cli.fakes import FakeLLM, install


@pytest.fixture
def llms(monkeypatch: pytest.MonkeyPatch) -> list[FakeLLM]:
    return install(monkeypatch)


def test_answers_the_prompt(llms: list[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "hello world"]) == 0
    assert capsys.readouterr() == ("You said: hello world\n", "")
    assert llms[0].requests == [[{"role": "user", "content": "hello world"}]]
    assert llms[0].settings == {}
    assert llms[0].aborted == []


def test_says_the_same_thing_twice_by_default(llms: list[FakeLLM]) -> None:
    main(["run", "x"])
    params = llms[0].params[0]
    assert params.greedy
    assert params.max_tokens is None
    assert params.output_kind == "delta"


def test_flags_reach_engine_and_sampling(llms: list[FakeLLM]) -> None:
    engine = ["--model", "a.gguf", "--max-model-len", "64", "--kv-cache-memory", "1MiB"]
    main(["run", "x", *engine, "--temperature=0.5", "--seed", "9", "--max-tokens", "3", "--stop", "a", "--stop", "b"])
    assert llms[0].settings == {"model": "a.gguf", "max_model_len": 64, "kv_cache_memory": 1 << 20}
    params = llms[0].params[0]
    assert (params.temperature, params.seed, params.max_tokens, params.stop) == (0.5, 9, 3, ("a", "b"))


def test_a_system_message_comes_first(llms: list[FakeLLM]) -> None:
    main(["run", "x", "--system", "Be brief."])
    assert llms[0].requests[0][0] == {"role": "system", "content": "Be brief."}


def test_raw_passes_the_text_itself(llms: list[FakeLLM]) -> None:
    main(["run", "--raw", "Once upon"])
    assert llms[0].requests == ["Once upon"]


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_the_prompt_may_come_from_stdin(
    llms: list[FakeLLM], arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
    assert main(["run", *arguments]) == 0
    assert llms[0].requests == [[{"role": "user", "content": "from a pipe"}]]


def test_bad_sampling_values_fail_before_a_model_is_loaded(
    llms: list[FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "x", "--top-p", "7"]) == 1
    assert capsys.readouterr().err == "error: top_p is 7.0 but must be in (0, 1]\n"
    assert llms == []


@pytest.mark.parametrize(("arguments", "stdin"), [([""], "unread"), ([], " \n")])
def test_an_empty_prompt_is_refused_before_a_model_is_loaded(
    llms: list[FakeLLM],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    stdin: str,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
    assert main(["run", *arguments]) == 1
    assert capsys.readouterr().err == "error: the prompt is empty; give a text as the argument or on stdin\n"
    assert llms == []


def test_a_terminal_gets_a_line_of_statistics(
    llms: list[FakeLLM], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    main(["run", "a b"])
    out, err = capsys.readouterr()
    assert out == "You said: a b\n"
    assert "starting" in err  # the bar
    assert "4 tokens, " in err.splitlines()[-1]
    assert "first token after" in err


def test_ctrl_c_ends_the_answer_and_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(FakeLLM):
        def stream(self, request: Any, params: SamplingParams) -> Generator[RequestOutput, None, None]:
            yield from islice(super().stream(request, params), 2)
            raise KeyboardInterrupt

    install(monkeypatch, Interrupted)
    assert main(["run", "x"]) == 130
    assert capsys.readouterr() == ("You said:\n", "")


def test_explain_says_every_value_and_why_without_a_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "a.gguf"
    model.touch()
    lines = ["dtype = bfloat16 (default on cuda)", "max_num_seqs = 4 (set by the user)", "weights  1 GiB"]
    asked: list[EngineConfig] = []

    def plan_engine(config: EngineConfig, *, needs_weights: bool) -> SimpleNamespace:
        asked.append(config)
        assert not needs_weights
        settings = SimpleNamespace(explain=lambda: lines[:2])
        return SimpleNamespace(settings=settings, ledger=SimpleNamespace(format=lambda: lines[2]))

    planning = ModuleType("quire.planning.engine_plan")
    monkeypatch.setattr(planning, "plan_engine", plan_engine, raising=False)
    monkeypatch.setitem(sys.modules, "quire.planning.engine_plan", planning)
    assert main(["run", "--explain", "--model", str(model), "--max-num-seqs", "4"]) == 0
    assert asked == [EngineConfig.from_flat(model=str(model), max_num_seqs=4)]
    assert capsys.readouterr().out.splitlines() == lines


@pytest.mark.parametrize(
    ("arguments", "model", "prompt"),
    [
        (["smollm2", "hello"], "smollm2", "hello"),
        (["smollm2", "--temperature", "0", "hello"], "smollm2", "hello"),
        (["--temperature", "0", "smollm2", "hello"], "smollm2", "hello"),
        (["some/model", "hello"], "some/model", "hello"),
        (["either/or question"], None, "either/or question"),
        (["hello"], None, "hello"),
        (["--model", "some/model", "smollm2"], "some/model", "smollm2"),
        (["- a list"], None, "- a list"),
        (["smollm2"], "smollm2", "from a pipe"),
        (["some/model"], "some/model", "from a pipe"),
        (["smollm2", "-"], "smollm2", "from a pipe"),
    ],
)
def test_words_are_a_model_and_a_prompt(
    llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch, arguments: list[str], model: str | None, prompt: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
    assert main(["run", *arguments]) == 0
    assert llms[0].settings.get("model") == model
    assert llms[0].requests == [[{"role": "user", "content": prompt}]]


def test_a_path_and_a_local_name_are_models(
    llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "My-Model.gguf").touch()
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    for word in ("my-model", "My-Model:latest", str(tmp_path)):
        monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
        assert main(["run", word]) == 0
        assert llms[-1].settings == {"model": word}


def test_a_model_alone_is_talked_with_on_a_terminal(
    llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    typed = iter(["one", "/bye"])
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    assert main(["run", "smollm2"]) == 0
    assert capsys.readouterr().out == "You said: one\n"
    assert llms[0].params[0].temperature == 0.7


def test_a_prompt_without_quotation_marks_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "tell", "me", "more"]) == 1
    assert "put quotation marks around the prompt" in capsys.readouterr().err
