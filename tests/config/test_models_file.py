"""The file of --models: what it gives, and what it refuses by table and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.config.groups import ServerConfig
from quire.config.models_file import MIN_RESIDENCE, ModelsFile, read_models
from quire.types.errors import ConfigError


def read(folder: Path, text: str, **defaults: object) -> ModelsFile:
    path = folder / "models.toml"
    path.write_text(text)
    return read_models(str(path), defaults, ServerConfig(max_queue=7))


def test_tables_have_engine_settings_and_their_own_settings_of_the_server(tmp_path: Path) -> None:
    models = read(
        tmp_path,
        """
        memory_budget = "100GiB"
        host_memory_budget = 5000

        [models.chat]
        model = "smollm2"
        served_model_name = ["gpt-4", "gpt-4o"]
        kv_cache_memory = "2GiB"
        tool_call_parser = "hermes"

        [models."org/embedder"]
        model = "folder"
        runner = "pooling"
        max_num_seqs = 4
        """,
        max_num_seqs=16,
        seed=3,
    )
    chat, embedder = models.models
    assert (models.memory_budget, models.host_memory_budget, models.min_residence) == (100 << 30, 5000, MIN_RESIDENCE)
    assert chat.names == ("chat", "gpt-4", "gpt-4o")
    assert (chat.engine.model.model, chat.engine.cache.kv_cache_memory) == ("smollm2", 2 << 30)
    assert (chat.server.tool_call_parser, chat.server.max_queue) == ("hermes", 7)
    assert embedder.names == ("org/embedder",)
    assert [each.engine.scheduler.max_num_seqs for each in models.models] == [16, 4]
    assert [each.engine.model.seed for each in models.models] == [3, 3]


ONE = '[models.a]\nmodel = "x"\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no model"),
        ("models = 3", "names no model"),
        ("[models]\na = 3", r"\[models.a\] is 3 but must be a table"),
        ("[models.a]\nseed = 1", r"\[models.a\] has no model"),
        (ONE + "max_num_seq = 4", r"unknown key 'max_num_seq'; did you mean 'max_num_seqs'\?"),
        (ONE + "port = 4", "unknown key 'port'"),
        ("memory_buget = 3\n" + ONE, r"unknown key 'memory_buget'; did you mean 'memory_budget'\?"),
        ("memory_budget = 'many'\n" + ONE, "memory_budget: 'many' is no byte count"),
        ("memory_budget = 0\n" + ONE, "memory_budget is 0 but must be a size"),
        ("min_residence = 0\n" + ONE, "min_residence is 0 but must be seconds"),
        ("min_residence = true\n" + ONE, "min_residence is True"),
        (ONE + "max_num_seqs = 'x'", r"\[models.a\]: max_num_seqs is 'x' but must be int"),
        (ONE + "max_queue = -1", r"\[models.a\]: max_queue is -1 but must be at least 0"),
        (ONE + "served_model_name = 'x'", r"\[models.a\]: served_model_name is 'x', which is wrong"),
        (ONE + "data_parallel_size = 2", "data_parallel_size is for a server of one model"),
        (ONE + "standby = true", "standby is for a server of one model"),
        (ONE + '[models.b]\nmodel = "y"\nserved_model_name = ["a"]', r"the name 'a' is both \[models.a\] and"),
        ("[models.a", "not valid TOML"),
    ],
)
def test_what_cannot_be_is_refused_by_table_and_key(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, text)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_models(str(tmp_path / "none.toml"), {}, ServerConfig())


def test_every_model_has_a_trace_of_its_own(tmp_path: Path) -> None:
    tables = """
        [models.chat]
        model = "a"
        [models."org/coder"]
        model = "b"
        [models.own]
        model = "c"
        trace = "elsewhere"
        """
    models = read(tmp_path, tables, trace="t/quire.trace").models
    assert [each.engine.tracing.trace for each in models] == [
        "t/quire.trace-chat",
        "t/quire.trace-org%2Fcoder",
        "elsewhere",
    ]
    assert read(tmp_path, tables).models[0].engine.tracing.trace is None
    with pytest.raises(ConfigError, match=r"the trace of both .*chat.* and .*own.* is 't/quire\.trace-chat'"):
        read(tmp_path, tables.replace("elsewhere", "t/quire.trace-chat"), trace="t/quire.trace")
