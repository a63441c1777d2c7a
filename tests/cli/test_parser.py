"""The command line's own parser: no abbreviations, suggestions, and one line about a mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quire.cli import main as cli
from quire.cli.parser import Parser
from tests.e2e.tiny_tokenizer import write_tokenizer


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that these arguments are refused with."""
    with pytest.raises(SystemExit) as exit_info:
        cli.main(arguments)
    assert exit_info.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    return line


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        (["serve", "--prot", "8110"], "--port"),
        (["serve", "--protect", "8110"], "--protect-health"),
        (["serve", "--max_model_len", "64"], "--max-model-len"),
        (["run", "Hello", "--temprature=0.5"], "--temperature"),
        (["serve", "--no-enable-prefix-cache"], "--no-enable-prefix-caching"),
        (["serve", "--max-num", "8"], "--max-num-seqs"),
        (["bench", "latency", "--batchsize", "2"], "--batch-size"),
        (["--versoin", "fit"], "--version"),
    ],
)
def test_a_flag_is_never_abbreviated_but_suggested(
    arguments: list[str], suggestion: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = next(word for word in arguments if word.startswith("--")).partition("=")[0]
    line = refusal(arguments, capsys)
    assert line.startswith(f"error: unknown flag {wrong}; did you mean ")
    assert suggestion in line.partition("?")[0].partition("mean ")[2].split(" or ")


def test_a_flag_like_no_other_is_refused_without_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(["bench", "serve", "--zzz"], capsys)
    assert line == "error: unknown flag --zzz; `quire bench serve --help` lists the flags"


def test_the_unknown_flag_is_named_before_a_word_that_was_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown flag --prmpt" in refusal(["run", "--prmpt", "Hello", "there"], capsys)


def test_a_word_too_many_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(["fit", "a", "b"], capsys) == "error: unexpected argument 'b'; `quire fit --help` lists the flags"


@pytest.mark.parametrize(
    ("arguments", "about"),
    [
        (["serve", "--port", "http"], "argument --port: invalid int value: 'http'"),
        (["serve", "--dtype", "float8"], "argument --dtype: invalid choice: 'float8'"),
        (["serve", "--kv-cache-memory", "much"], "argument --kv-cache-memory: 'much' is no byte count"),
        (["serve", "--port"], "argument --port: expected one argument"),
        (["sevre"], "argument COMMAND: invalid choice: 'sevre'"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_a_bad_value_prints_the_line_about_it(
    arguments: list[str], about: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(arguments, capsys)
    assert line.startswith(f"error: {about}")
    assert "--help` lists" in line


def test_a_dash_alone_is_no_flag() -> None:
    parser = Parser(prog="x")
    parser.add_argument("prompt")
    assert parser.parse_args(["-"]).prompt == "-"


# Torch is a second or two of imports, and the engine process of `quire serve` imports it first of all.
MISTAKES = [
    ["run", "Hello", "--max-model-len", "0"],
    ["run", "Hello", "--quantization", "int3"],
    ["run", "Hello", "--attention-backend", "flash"],
    ["run", "Hello", "--structured-outputs-backend", "outlines"],
    ["run", "Hello", "--max-num-seqs", "100", "--max-num-batched-tokens", "10"],
    ["run", "Hello", "--model", "/nowhere"],
    ["run", "Hello", "--tokenizer", "/nowhere"],
    ["run", "Hello", "--chat-template", "{% flow %}"],
    ["run", "Hello", "--load-format", "gguf"],
    ["run", "--explain", "--quantization", "int3"],
    ["chat", "--top-p", "7"],
    ["chat", "--quantization", "int3"],
    ["fit", "--attention-backend", "flash"],
    ["fit", "--model", "/nowhere"],
    ["fit", "--load-format", "gguf"],
    ["verify", "--text="],
    ["verify", "--tolerance", "-1"],
    ["verify", "--quantization", "int3"],
    ["serve", "--quantization", "int3"],
    ["serve", "--port", "70000"],
    ["serve", "--tool-call-parser", "xml"],
    ["serve", "--port", "0", "--load-format", "gguf"],
    ["bench", "latency", "--batch-size", "0"],
    ["bench", "latency", "--quantization", "int3"],
    ["bench", "throughput", "--warmup", "-1"],
    ["bench", "startup", "--quantization", "int3"],
]


def test_mistakes_in_settings_are_found_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    write_tokenizer(tmp_path)
    code = (
        "import json, sys\n"
        "from quire.cli.main import main\n"
        "class NoTorch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        assert name not in ('torch', 'transformers'), f'{name} is imported'\n"
        "sys.meta_path.insert(0, NoTorch())\n"
        "for arguments in json.load(sys.stdin):\n"
        "    code = main(arguments)\n"
        "    assert code == 1, (arguments, code)\n"
    )
    commands = [words if "--model" in words else [*words, "--model", str(tmp_path)] for words in MISTAKES]
    done = subprocess.run([sys.executable, "-c", code], input=json.dumps(commands), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == len(MISTAKES), done.stderr
    for words, line in zip(MISTAKES, errors, strict=True):
        assert words[-1].removeprefix("--text=").strip("{% }") in line, words


@pytest.mark.parametrize(
    ("words", "model", "names", "modules"),
    [
        ("M --lora-modules a=x b=y", "M", [], ["a=x", "b=y"]),
        ("--lora-modules a=x b=y", None, [], ["a=x", "b=y"]),
        ("--lora-modules=a=x b=y M", "M", [], ["a=x", "b=y"]),
        ("--lora-modules a=x M", "M", [], ["a=x"]),
        ("--lora-modules a=x ./of=last/week", "./of=last/week", [], ["a=x"]),
        ('--lora-modules {"name":"a"} {"name":"b"} --port 9 M', "M", [], ['{"name":"a"}', '{"name":"b"}']),
        ("--lora-modules a=x --lora-modules b=y c=z --debug", None, [], ["a=x", "b=y", "c=z"]),
        ("M --served-model-name a b --lora-modules c=z", "M", ["a", "b"], ["c=z"]),
        ("--served-model-name a b --model M", "M", ["a", "b"], []),
        ("--served-model-name a M", "M", ["a"], []),
        ("M --served-model-name a --port 9", "M", ["a"], []),
    ],
)
def test_a_flag_of_serve_takes_several_words_that_cannot_be_the_model(
    words: str, model: str | None, names: list[str], modules: list[str]
) -> None:
    found = vars(cli.build_parser("serve").parse_args(["serve", *words.split()]))
    assert found.get("engine.model") == model
    assert found.get("server.served_model_name", []) == names
    assert found.get("server.lora_modules", []) == modules


def test_names_before_the_model_are_told_to_come_after_it(capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(["serve", "--served-model-name", "a", "b", "M"], capsys)
    assert "unexpected argument 'M'; the model comes first where --served-model-name has several:" in line
    assert "quire serve MODEL --served-model-name A B" in line
