"""quire run, chat and top as people see them, in a terminal driven by tmux, with the default model."""

from __future__ import annotations

from tests.cli.console_server import FRAME, console_server
from tests.cli.tmux import terminal

GREEDY = ("--temperature", "0", "--max-tokens", "24", "--max-model-len", "512")


def test_a_prompt_is_answered_and_the_speed_told() -> None:
    with terminal() as screen:
        screen.start(["run", "smollm2", "Name the capital of France.", *GREEDY])
        shown = screen.wait_for("ended with 0")
    assert "Paris" in shown
    assert "tok/s" in shown
    assert max(len(line) for line in shown.splitlines()) <= 80


def test_a_model_alone_is_talked_with() -> None:
    with terminal() as screen:
        screen.start(["run", "smollm2", *GREEDY], width=60)
        screen.wait_for("/help lists the commands.")
        screen.type("Name the capital of France.")
        screen.wait_for("Paris", "tok/s")
        screen.type("/set parameter max_tokens 3")
        screen.wait_for("set parameter max_tokens 3")
        screen.type('"""Count')
        screen.type('to ten."""')
        screen.wait_for("[3 tokens")
        screen.type("/set parameter max_tokens 400")
        screen.type("/set parameter ignore_eos true")
        screen.wait_for("set parameter ignore_eos true")
        screen.type("Write a long story.")
        screen.wait_for("Write a long story.\n")
        screen.press("C-c")  # ends the answer or the line, and never the program
        screen.type("/show")
        shown = screen.wait_for("messages   ", "max_tokens 400")
        assert "ended with" not in shown
        screen.type("/bye")
        screen.wait_for("ended with 0")


def test_top_shows_load_and_requests() -> None:
    with terminal() as screen, console_server() as server:
        screen.start(["top", server.address, "--api-key", "secret"], width=140)
        shown = screen.wait_for("prefill 3,072 of 8,190", "no free KV blocks")
        for text in ("quire top", "ready", "123.4", "42%", "10 / 20 / 30 ms", "request-1"):
            assert text in shown
        server.frame = FRAME | {"status": "restarting", "detail": "the engine died"}
        screen.wait_for("restarting", "the engine died")
        screen.press("q")
        screen.wait_for("ended with 0")
    assert set(server.keys) == {"Bearer secret"}
