"""Classifiers, rerankers and reward models through the whole engine, beside transformers on the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from quire.engine.core import EngineCore
from quire.types.errors import ConfigError
from quire.types.sampling import PoolingParams
from tests.e2e.test_encoders import DISTIL, SIZES, WINDOWS, make_encoder
from tests.e2e.test_pooling import PROMPTS, pool, vector
from tests.e2e.tiny import VOCAB, make_engine
from tests.models.zoo import SIZES as DECODER
from tests.runner.engines import worker_of

ENCODERS = (
    "Bert",
    "Roberta",
    "XLMRoberta",
    "DistilBert",
    "ModernBert",
    "NomicBert",
    "MPNet",
    "DebertaV2",
    "Gte",
    "JinaEmbeddingsV3",
)
DECODERS = ("Llama", "Qwen2", "Qwen3", "Mistral")
LOGITS = PoolingParams(task="classify", pooling="cls", head="classify", activation="none")


def make_classifier(folder: Path, name: str, kind: str, **keys: Any) -> torch.nn.Module:
    sizes = DISTIL if name == "DistilBert" else SIZES if name in ENCODERS else {**DECODER, "pad_token_id": 0}
    config = getattr(transformers, f"{name}Config")(
        **{
            **sizes,
            "vocab_size": VOCAB,
            "max_position_embeddings": 160,
            "num_labels": 3,
            **WINDOWS.get(name, {}),
            **keys,
        }
    )
    torch.manual_seed(1)
    auto = getattr(transformers, f"AutoModelFor{kind}")
    model = auto.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "norm" in path.lower() or path.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    return model


def engine(folder: Path, **settings: Any) -> EngineCore:
    return make_engine(folder, **{"max_model_len": 150, **settings})


@pytest.mark.parametrize("kind", ["SequenceClassification", "TokenClassification"])
@pytest.mark.parametrize("name", [*ENCODERS, *DECODERS])
def test_logits_equal_transformers_and_do_not_depend_on_the_batch(name: str, kind: str, tmp_path: Path) -> None:
    theirs = make_classifier(tmp_path, name, kind)
    core = engine(tmp_path)
    pooler = worker_of(core).plan.pooler
    assert pooler is not None
    assert (pooler.tasks, pooler.labels) == (
        ("classify" if kind == "SequenceClassification" else "token_classify",),
        ("LABEL_0", "LABEL_1", "LABEL_2"),
    )
    params = PoolingParams(task=pooler.tasks[0], pooling=pooler.kind, head="classify", activation="none")
    outputs = pool(core, PROMPTS, params)
    for tokens, output in zip(PROMPTS, outputs, strict=True):
        with torch.inference_mode():
            expected = theirs(torch.tensor([tokens])).logits[0]
        np.testing.assert_allclose(vector(output), expected.numpy(), atol=2e-4)
    small = engine(tmp_path, max_num_batched_tokens=150, max_num_seqs=2)
    assert [output.pooled for output in pool(small, PROMPTS, params)] == [output.pooled for output in outputs]
    assert pool(core, PROMPTS[4:], params)[0].pooled == outputs[4].pooled


@pytest.mark.parametrize(("activation", "expected"), [("softmax", torch.softmax), ("sigmoid", None)])
def test_probabilities(activation: Any, expected: Any, tmp_path: Path) -> None:
    theirs = make_classifier(tmp_path, "Bert", "SequenceClassification")
    output = pool(engine(tmp_path), PROMPTS[4:], PoolingParams(pooling="cls", head="classify", activation=activation))
    with torch.inference_mode():
        logits = theirs(torch.tensor(PROMPTS[4:])).logits[0]
    wanted = logits.softmax(0) if expected else logits.sigmoid()
    np.testing.assert_allclose(vector(output[0]), wanted.numpy(), atol=1e-5)


@pytest.mark.parametrize("name", ["Bert", "NomicBert"])
def test_tokens_of_the_second_text_of_a_pair_have_a_type_of_their_own(name: str, tmp_path: Path) -> None:
    theirs = make_classifier(tmp_path, name, "SequenceClassification", num_labels=1)
    core = engine(tmp_path)
    splits = [40, 1, 20, 64, None]
    for prompts in (PROMPTS, PROMPTS[2:3]):  # beside prompts that are no pairs, and alone
        for tokens, at in zip(prompts, splits[PROMPTS.index(prompts[0]) :], strict=False):
            types = [int(at is not None and place >= at) for place in range(len(tokens))]
            with torch.inference_mode():
                expected = theirs(torch.tensor([tokens]), token_type_ids=torch.tensor([types])).logits[0]
            params = PoolingParams(pooling="cls", head="classify", activation="none", second_text_at=at)
            (output,) = pool(core, [tokens], params)
            np.testing.assert_allclose(vector(output), expected.numpy(), atol=1e-4)


def test_a_reward_model_has_two_layers_on_top(tmp_path: Path) -> None:
    theirs = make_classifier(tmp_path, "Qwen2", "TokenClassification", num_labels=1)
    torch.manual_seed(5)
    theirs.score = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    theirs.config.architectures = ["Qwen2ForRewardModel"]
    theirs.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        (tmp_path / "config.json").read_text().replace("Qwen2ForTokenClassification", "Qwen2ForRewardModel")
    )
    core = engine(tmp_path)
    pooler = worker_of(core).plan.pooler
    assert pooler is not None
    assert (pooler.kind, pooler.activation) == ("all", "none")
    (output,) = pool(core, PROMPTS[4:], PoolingParams(pooling="all", head="classify", activation="none"))
    with torch.inference_mode():
        expected = theirs.score(theirs.model(torch.tensor(PROMPTS[4:])).last_hidden_state)[0]
    np.testing.assert_allclose(vector(output), expected.numpy(), atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_a_generator_judges_by_the_logits_of_two_tokens(tied: bool, tmp_path: Path) -> None:
    theirs = make_classifier(tmp_path, "Qwen3", "CausalLM", tie_word_embeddings=tied)
    core = engine(tmp_path, convert="classify")
    pooler = worker_of(core).plan.pooler
    assert pooler is not None
    assert (pooler.label_tokens, pooler.labels, pooler.activation) == (("no", "yes"), ("yes",), "sigmoid")
    params = PoolingParams(pooling="last", label_token_ids=(5, 9), activation="sigmoid")
    outputs = pool(core, PROMPTS, params)
    for tokens, output in zip(PROMPTS, outputs, strict=True):
        with torch.inference_mode():
            logits = theirs(torch.tensor([tokens])).logits[0, -1]
        assert vector(output)[0] == pytest.approx(float(logits[[5, 9]].softmax(0)[1]), abs=1e-4)
        assert pool(core, [tokens], params)[0].pooled == output.pooled


@pytest.mark.parametrize("name", [name for name in ENCODERS if name != "NomicBert"])
def test_sparse_weights_are_the_highest_logits_of_masked_tokens(name: str, tmp_path: Path) -> None:
    theirs = make_classifier(tmp_path, name, "MaskedLM")
    modules = [{"type": "x.MLMTransformer", "path": ""}, {"type": "x.SpladePooling", "path": "1_SpladePooling"}]
    (tmp_path / "modules.json").write_text(str(modules).replace("'", '"'))
    core = engine(tmp_path)
    pooler = worker_of(core).plan.pooler
    assert pooler is not None
    assert pooler.tasks == ("sparse",)
    params = PoolingParams(pooling="max", head="sparse", activation="log1p_relu")
    for tokens, output in zip(PROMPTS, pool(core, PROMPTS, params), strict=True):
        with torch.inference_mode():
            expected = torch.log1p(theirs(torch.tensor([tokens])).logits[0].relu()).amax(0)
        np.testing.assert_allclose(vector(output), expected.numpy(), atol=2e-4)


def test_a_classifier_embeds_when_asked_and_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    make_classifier(tmp_path, "Llama", "SequenceClassification")
    embedder = worker_of(engine(tmp_path, convert="embed")).plan.pooler
    assert embedder is not None
    assert embedder.tasks == ("embed", "token_embed")
    with pytest.raises(ConfigError, match="is a model that only pools"):
        engine(tmp_path, runner="generate")
    make_classifier(tmp_path, "Bert", "MaskedLM")
    with pytest.raises(ConfigError, match="has no classifier and generates nothing: it embeds"):
        engine(tmp_path, convert="classify")


def dense(folder: Path, name: str, sizes: tuple[int, int], activation: str) -> torch.nn.Linear:
    """A Dense module of sentence-transformers, in a folder of its own."""
    torch.manual_seed(len(name))
    layer = torch.nn.Linear(*sizes)
    (folder / name).mkdir()
    named = {"in_features": sizes[0], "out_features": sizes[1], "bias": True, "activation_function": activation}
    (folder / name / "config.json").write_text(json.dumps(named))
    save_file({f"linear.{key}": value.detach() for key, value in layer.named_parameters()}, folder / name / FILE)
    return layer


FILE = "model.safetensors"


def test_dense_modules_come_after_pooling(tmp_path: Path) -> None:
    theirs = make_encoder(tmp_path, "Bert")
    first = dense(tmp_path, "2_Dense", (64, 48), "torch.nn.modules.activation.Tanh")
    second = dense(tmp_path, "3_Dense", (48, 24), "torch.nn.modules.linear.Identity")
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "2_Dense", "Dense ": "3_Dense", "Normalize": "4"}
    modules = [{"type": f"sentence_transformers.models.{kind.strip()}", "path": at} for kind, at in paths.items()]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    core = engine(tmp_path)
    pooler = worker_of(core).plan.pooler
    assert pooler is not None
    assert (pooler.size, pooler.kind, list(pooler.heads)) == (24, "mean", ["embed"])
    outputs = pool(core, PROMPTS, PoolingParams(pooling="mean", head="embed"))
    for tokens, output in zip(PROMPTS, outputs, strict=True):
        with torch.inference_mode():
            mean = theirs(torch.tensor([tokens])).last_hidden_state[0].mean(0)
            expected = torch.nn.functional.normalize(second(first(mean).tanh()), dim=0)
        np.testing.assert_allclose(vector(output), expected.numpy(), atol=1e-5)
        assert pool(core, [tokens], PoolingParams(pooling="mean", head="embed"))[0].pooled == output.pooled
    worker_of(core).sleep(2)
    worker_of(core).wake()
    after = pool(core, PROMPTS, PoolingParams(pooling="mean", head="embed"))
    assert [output.pooled for output in after] == [output.pooled for output in outputs], "the modules come back too"


def test_a_projection_of_each_token_makes_a_multi_vector_model(tmp_path: Path) -> None:
    theirs = make_encoder(tmp_path, "Bert")
    layer = dense(tmp_path, "1_Dense", (64, 16), "torch.nn.modules.linear.Identity")
    modules = [{"type": "x.Transformer", "path": ""}, {"type": "pylate.models.Dense.Dense", "path": "1_Dense"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    prefixes = {"query_prefix": "[Q] ", "document_prefix": "[D] "}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prefixes))
    core = engine(tmp_path)
    pooler = worker_of(core).plan.pooler
    assert pooler is not None
    assert (pooler.tasks, pooler.score) == (("token_embed",), "late")
    assert (pooler.query_prefix, pooler.document_prefix) == ("[Q] ", "[D] ")
    (output,) = pool(core, PROMPTS[4:], PoolingParams(pooling="all", head="token_embed"))
    with torch.inference_mode():
        expected = torch.nn.functional.normalize(
            layer(theirs(torch.tensor(PROMPTS[4:])).last_hidden_state[0]), dim=-1
        )
    np.testing.assert_allclose(vector(output), expected.numpy(), atol=1e-5)
