"""quire chat: history, commands, and what Ctrl-C does."""

from __future__ import annotations

import io
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main
from quire.types.errors import EngineDeadError, RequestError
from quire.types.outputs import RequestOutput
from quire.types.sampling import SamplingParams
from tests.cli.fakes import FakeLLM, install


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def talk(
    monkeypatch: pytest.MonkeyPatch, text: str, *flags: str, llm_type: type[FakeLLM] = FakeLLM
) -> tuple[int, list[FakeLLM]]:
    made = install(monkeypatch, llm_type)
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return main(["chat", *flags]), made


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_the_history_grows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, (llm,) = talk(monkeypatch, "one\n\ntwo\n")
    assert code == 0
    assert llm.requests == [[user("one")], [user("one"), assistant("You said: one"), user("two")]]
    assert capsys.readouterr() == ("You said: one\nYou said: two\n", "")


def test_clear_forgets_all_but_the_system_message(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (llm,) = talk(monkeypatch, "one\n/clear\ntwo\n", "--system", "Be kind.")
    system = {"role": "system", "content": "Be kind."}
    assert llm.requests == [[system, user("one")], [system, user("two")]]


def test_exit_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    code, (llm,) = talk(monkeypatch, "/exit\nnever\n")
    assert code == 0
    assert llm.requests == []


def test_help_and_unknown_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _, (llm,) = talk(monkeypatch, "/help\n/fly\n/ is a slash\n")
    out, err = capsys.readouterr()
    assert "/clear" in err
    assert "unknown command /fly; /help lists the commands" in err
    assert out == "You said: / is a slash\n"
    assert len(llm.requests) == 1


def test_the_model_is_positional(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (llm,) = talk(monkeypatch, "", "a.gguf", "--top-k", "5")
    assert llm.settings == {"model": "a.gguf"}


def test_ctrl_c_stops_the_answer_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupted(FakeLLM):
        def stream(self, request: Any, params: SamplingParams) -> Generator[RequestOutput, None, None]:
            for output in super().stream(request, params):
                yield output
                if len(self.requests) == 1 and output.outputs[0].text == " said:":
                    signal.raise_signal(signal.SIGINT)

    code, (llm,) = talk(monkeypatch, "one\ntwo\n", llm_type=Interrupted)
    assert code == 0
    assert capsys.readouterr().out == "You said:\nYou said: two\n"
    assert llm.aborted == [1]
    assert llm.requests[1] == [user("one"), assistant("You said:"), user("two")]


def test_ctrl_c_before_an_answer_begins_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(FakeLLM):
        def stream(self, request: Any, params: SamplingParams) -> Generator[RequestOutput, None, None]:
            if request[-1]["content"] == "one":
                signal.raise_signal(signal.SIGINT)
            return super().stream(request, params)

    code, (llm,) = talk(monkeypatch, "one\ntwo\n", llm_type=Interrupted)
    assert code == 0
    assert llm.requests == [[user("two")]]


def test_a_bad_request_is_said_and_forgotten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Short(FakeLLM):
        def answer(self, request: Any) -> list[str]:
            if "long" in request[-1]["content"]:
                raise RequestError("the prompt has 9000 tokens but the model takes 8192; /clear starts anew")
            return super().answer(request)

    code, (llm,) = talk(monkeypatch, "a long one\nshort\n", llm_type=Short)
    assert code == 0
    out, err = capsys.readouterr()
    assert out == "You said: short\n"
    assert err.startswith("error: the prompt has 9000 tokens")
    assert llm.requests[1] == [user("short")]


def test_a_dead_engine_ends_the_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Dead(FakeLLM):
        def answer(self, request: Any) -> list[str]:
            raise EngineDeadError("the engine has stopped; start again")

    code, (llm,) = talk(monkeypatch, "one\ntwo\n", llm_type=Dead)
    assert code == 1
    assert len(llm.requests) == 1
    assert capsys.readouterr().err == "error: the engine has stopped; start again\n"


def test_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def typed() -> Iterator[str | type[BaseException]]:
        yield "one"
        yield KeyboardInterrupt
        yield "two"
        yield EOFError

    lines = typed()

    def fake_input(prompt: str) -> str:
        line = next(lines)
        if isinstance(line, str):
            return line
        raise line

    made = install(monkeypatch)
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", fake_input)
    assert main(["chat"]) == 0
    assert [len(request) for request in made[0].requests] == [1, 3]
    assert "/exit or Ctrl-D leaves." in capsys.readouterr().err


def test_parameters_are_set(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        "/set parameter temperature 0.25",
        "/set parameter num_predict 9",
        "/set parameter stop END",
        "one",
        "/set parameter temperature hot",
        "/set parameter top_p 7",
        "/set parameter warmth 1",
        "/set parameter seed",
        "/set nothing",
        "/show",
        "two",
    ]
    _, (llm,) = talk(monkeypatch, "\n".join(lines))
    params = llm.params[0]
    assert (params.temperature, params.max_tokens, params.stop) == (0.25, 9, ("END",))
    assert llm.params[1] == params
    err = capsys.readouterr().err
    for said in (
        "temperature cannot be 'hot'",
        "top_p is 7.0",
        "no parameter 'warmth'",
        "give a value too",
        "set what?",
    ):
        assert f"error: {said}" in err or said in err
    assert "temperature 0.25" in err


def test_the_system_message_can_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (llm,) = talk(monkeypatch, "one\n/set system Be brief.\ntwo\n/clear\nthree\n", "--system", "Be kind.")
    brief = {"role": "system", "content": "Be brief."}
    assert llm.requests[1] == [brief, user("one"), assistant("You said: one"), user("two")]
    assert llm.requests[2] == [brief, user("three")]


def test_a_conversation_is_saved_and_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    talk(monkeypatch, "one\n/save my-chat\n/save ../evil\n/load nothing\n")
    assert (tmp_path / "chats" / "my-chat.json").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in (tmp_path / "chats").iterdir()] == ["my-chat.json"]
    err = capsys.readouterr().err
    assert "'../evil' is no name" in err
    assert "there are: my-chat" in err
    _, (llm,) = talk(monkeypatch, "/load my-chat\ntwo\n")
    assert llm.requests == [[user("one"), assistant("You said: one"), user("two")]]


def test_a_message_may_have_several_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (llm,) = talk(monkeypatch, '"""first\nsecond\n\nthird"""\nnext\n"""one line"""\n"""never\nclosed')
    said = [request[-1]["content"] for request in llm.requests if isinstance(request[-1], dict)]
    assert said == ["first\nsecond\n\nthird", "next", "one line", "never\nclosed"]
