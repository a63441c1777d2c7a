"""What a model folder says of pooling: the files of sentence-transformers, and the architecture. Torch-free."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from quire.config.groups import ModelConfig
from quire.loader.colbert import read_colbert
from quire.loader.hub import ModelSource
from quire.loader.model_config import read_optional_json
from quire.types.errors import CheckpointError, ConfigError
from quire.types.pooling import Classifier, HeadActivation, HeadLayer, Heads, PoolerConfig
from quire.types.sampling import Activation, PoolingKind
from quire.utils.schema import decode_json

logger = logging.getLogger(__name__)

_MODULES = "modules.json"
_SPARSE, _COLBERT = "sparse_linear", "colbert_linear"  # of BGE-M3: a file of its own each
_KNOWN_MODULES = ("Transformer", "MLMTransformer", "Pooling", "SpladePooling", "Dense", "Normalize")
QWEN3_RERANKER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct"
    ' provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
# As GGUF files number them; without one (0) a file is of a model that generates.
_GGUF_KINDS: dict[int, PoolingKind] = {1: "mean", 2: "cls", 3: "last"}
_MODES: dict[str, PoolingKind] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}


class _Module(msgspec.Struct):
    """An entry of modules.json: a step from a text to its vector."""

    type: str
    path: str = ""

    @property
    def kind(self) -> str:
        return self.type.rpartition(".")[2]


class _Settings(msgspec.Struct):
    """config_sentence_transformers.json and sentence_bert_config.json, as far as they are read."""

    prompts: dict[str, str] = {}
    default_prompt_name: str | None = None
    max_seq_length: int | None = None
    query_prefix: str = ""
    document_prefix: str = ""
    query_length: int | None = None
    do_query_expansion: bool = True
    attend_to_expansion_tokens: bool = False
    skiplist_words: list[str] = []


def read_pooler(
    config: ModelConfig,
    source: ModelSource,
    model_config: Mapping[str, Any],
    *,
    size: int,
    generates: bool,
    is_encoder: bool,
    classifier: Classifier | None = None,
    token_head: tuple[HeadLayer, ...] = (),
) -> PoolerConfig | None:
    """How the model is to pool; None if it is only to generate.

    `generates`: whether the architecture can; `classifier`: what the checkpoint has on top; `token_head`: the same of
    an encoder that predicts masked tokens.
    """
    has_modules = source.kind == "folder" and (source.path / _MODULES).is_file()
    generates = generates and classifier is None
    of_file = _GGUF_KINDS.get(cast("int", model_config.get("pooling_type")))
    runner, convert = config.runner, config.convert
    if runner == "auto":
        asked = convert in ("embed", "classify")
        runner = "pooling" if asked or has_modules or of_file or not generates else "generate"
    if runner == "generate":
        if convert == "classify":
            raise ConfigError(
                f"convert is {convert!r} but runner is 'generate'; set --runner pooling, or leave one out"
            )
        if not generates:
            raise ConfigError(
                f"runner is 'generate' but {source.name!r} is a model that only pools; set --runner auto"
            )
        return PoolerConfig("last", size, tasks=("embed",), generates=True) if convert == "embed" else None
    if classifier is not None and convert != "embed":
        return _as_classifier(classifier, size, model_config)
    if convert == "classify":
        if not generates:
            raise ConfigError(
                f"convert is 'classify' but {source.name!r} has no classifier and generates nothing: it embeds; leave"
                " --convert out"
            )
        return _as_reranker(size, model_config)
    kind: PoolingKind = of_file or ("cls" if is_encoder else "last")
    dimensions = _dimensions(model_config)
    if not has_modules and "HF_ColBERT" in (model_config.get("architectures") or ()) and convert != "embed":
        return read_colbert(source.path, size)
    if not has_modules:
        return PoolerConfig(kind, size, dimensions=dimensions)
    found = _read_sentence_transformer(source.path, kind, size, token_head, is_encoder)
    return msgspec.structs.replace(found, dimensions=dimensions)


def _dimensions(model_config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Sizes that vectors may be cut to by the config's keys of Matryoshka models; None: it does not say."""
    sizes = model_config.get("matryoshka_dimensions")
    if sizes is None:
        return () if model_config.get("is_matryoshka") is False else None
    if not isinstance(sizes, list) or not all(type(size) is int and size > 0 for size in sizes):
        raise ConfigError(f"matryoshka_dimensions is {sizes!r} but must be a list of positive integers")
    return tuple(sizes)


def _as_classifier(classifier: Classifier, size: int, model_config: Mapping[str, Any]) -> PoolerConfig:
    count = classifier.layers[-1].out_size
    names = model_config.get("id2label") or {}
    of_tokens = classifier.kind == "all"
    return PoolerConfig(
        classifier.kind,
        size,
        tasks=("token_classify",) if of_tokens else ("classify",),
        heads={"classify": classifier.layers},
        labels=tuple(str(names.get(str(index), f"LABEL_{index}")) for index in range(count)),
        activation="none" if classifier.rewards else _class_activation(model_config, count),
        score="cross" if count == 1 and not of_tokens else None,
    )


def _as_reranker(size: int, model_config: Mapping[str, Any]) -> PoolerConfig:
    """Of a model that generates: classes are tokens that may follow the prompt."""
    tokens = model_config.get("classifier_from_token") or ("no", "yes")
    if not isinstance(tokens, (list, tuple)) or len(tokens) < 2 or not all(isinstance(name, str) for name in tokens):
        raise ConfigError(f"classifier_from_token is {tokens!r} but must be a list of two tokens or more")
    architecture = str((model_config.get("architectures") or [""])[0])
    template = QWEN3_RERANKER if architecture.startswith("Qwen3") and tuple(tokens) == ("no", "yes") else None
    return PoolerConfig(
        "last",
        size,
        tasks=("classify",),
        labels=tuple(tokens) if len(tokens) > 2 else (tokens[1],),
        activation="softmax" if len(tokens) > 2 else "sigmoid",
        label_tokens=tuple(tokens),
        score="cross" if len(tokens) == 2 else None,
        score_template=template,
    )


def _class_activation(model_config: Mapping[str, Any], count: int) -> Activation:
    """What makes probabilities of a classifier's values."""
    described = model_config.get("sentence_transformers")
    named = described.get("activation_fn") if isinstance(described, dict) else None
    named = str(named or model_config.get("sbert_ce_default_activation_function") or "").rpartition(".")[2]
    if named in ("Identity", "Sigmoid"):
        return "none" if named == "Identity" else "sigmoid"
    problem = model_config.get("problem_type")
    if problem == "regression":
        return "none"
    return "sigmoid" if count == 1 or problem == "multi_label_classification" else "softmax"


def _read_sentence_transformer(
    folder: Path, kind: PoolingKind, size: int, token_head: tuple[HeadLayer, ...], is_encoder: bool
) -> PoolerConfig:
    modules, settings = _read_modules(folder), _read_settings(folder)
    kinds = [module.kind for module in modules]
    common: dict[str, Any] = {
        "prompts": settings.prompts,
        "default_prompt": settings.default_prompt_name,
        "max_tokens": settings.max_seq_length,
    }
    if "SpladePooling" in kinds:
        if not token_head:
            raise ConfigError(f"{folder / _MODULES} has SpladePooling, but the model has no head for masked tokens")
        heads: Heads = {"sparse": token_head}
        return PoolerConfig("max", size, tasks=("sparse",), heads=heads, score=None, normalize=False, **common)
    pooling = next((module for module in modules if module.kind == "Pooling"), None)
    if pooling is not None:
        kind = _read_kind(_inside(folder, pooling.path) / "config.json", kind)
    dense = tuple(_read_dense(folder, module) for module in modules if module.kind == "Dense")
    size = dense[-1].out_size if dense else size
    if pooling is None and dense:  # a vector of each token, projected: multi-vector retrieval
        heads = {"token_embed": dense}
        common |= {"query_prefix": settings.query_prefix, "document_prefix": settings.document_prefix}
        common["skiplist"] = tuple(settings.skiplist_words)
        common["query_length"] = _query_length(settings, folder, is_encoder)
        common["attends_to_masks"] = settings.attend_to_expansion_tokens
        return PoolerConfig("all", size, tasks=("token_embed",), heads=heads, score="late", **common)
    heads = {"embed": dense} if dense else {}
    if _stored(folder, _SPARSE):
        heads["sparse"], common["tasks"] = (HeadLayer(_SPARSE, size, 1),), ("embed", "token_embed", "sparse")
    if _stored(folder, _COLBERT):
        heads["token_embed"], common["skips_first"] = (HeadLayer(_COLBERT, size, size),), True
    return PoolerConfig(kind, size, normalize="Normalize" in kinds, heads=heads, **common)


def _query_length(settings: _Settings, folder: Path, is_encoder: bool) -> int | None:
    """To how many tokens queries are filled up with mask tokens; None: they are not."""
    if not settings.do_query_expansion or settings.query_length is None:
        return None
    if not is_encoder and not settings.attend_to_expansion_tokens:
        logger.warning(
            "%s fills queries up to %d tokens with tokens that no token attends to (attend_to_expansion_tokens is"
            " false). Quire does that only with encoders, and this model is a decoder: queries are scored by their"
            " own tokens, whose vectors are the same",
            folder,
            settings.query_length,
        )
        return None
    return settings.query_length


def _stored(folder: Path, name: str) -> bool:
    """Whether the folder has this head of BGE-M3, which is published as a pickle."""
    if (folder / f"{name}.safetensors").is_file():
        return True
    if (folder / f"{name}.pt").is_file():
        logger.warning(
            "%s is a pickle, which could run code: it is not read. With %s.safetensors beside it, the model has this"
            " head too; docs/guides/embeddings.md says how to convert it",
            folder / f"{name}.pt",
            name,
        )
    return False


def _read_dense(folder: Path, module: _Module) -> HeadLayer:
    """A Dense module: a linear layer whose tensors stand in a file of its own."""
    path = _inside(folder, module.path) / "config.json"
    described = read_optional_json(path)
    named = str(described.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    activations: dict[str, HeadActivation | None] = {"Identity": None, "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu"}
    sizes = described.get("in_features"), described.get("out_features")
    if not all(type(size) is int and size > 0 for size in sizes):
        raise CheckpointError(f"{path} does not say in_features and out_features; download it again")
    if named not in activations:
        raise ConfigError(
            f"{path} has the activation {named!r}, which Quire does not have; it has {', '.join(activations)}"
        )
    if described.get("use_residual"):
        raise ConfigError(f"{path} adds a residual (use_residual), which Quire does not do")
    return HeadLayer(
        f"{module.path}.linear",
        *cast("tuple[int, int]", sizes),
        bias=bool(described.get("bias", True)),
        activation=activations[named],
    )


def module_files(source: ModelSource, pooler: PoolerConfig | None) -> dict[str, Path]:
    """Folders and files with tensors of their own, by what their tensors' names begin with."""
    heads = pooler.heads if pooler else {}
    layers = (layer for layers in heads.values() for layer in layers)
    names = (layer.source.removesuffix(".linear") for layer in layers if layer.source.endswith(".linear"))
    files = {name: _inside(source.path, name) for name in names}
    alone = (layer.source for layers in heads.values() for layer in layers if layer.source in (_SPARSE, _COLBERT))
    return {**files, **{name: source.path / f"{name}.safetensors" for name in alone}}


def _read_modules(folder: Path) -> list[_Module]:
    path = folder / _MODULES
    try:
        modules = msgspec.convert(decode_json(path.read_bytes()), list[_Module])
    except (ValueError, msgspec.ValidationError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}; download it again") from error
    unknown = [module.kind for module in modules if module.kind not in _KNOWN_MODULES]
    if unknown:
        raise ConfigError(
            f"{path} has a module {unknown[0]!r}, which Quire does not run; it runs {', '.join(_KNOWN_MODULES)}"
        )
    return modules


def _inside(folder: Path, path: str) -> Path:
    """A module's folder, which a file names and which has to be below the model's."""
    found = (folder / path).resolve()
    if not found.is_relative_to(folder.resolve()):
        raise CheckpointError(f"{folder / _MODULES} names the path {path!r}, which is outside of it; correct it")
    return found


def _read_kind(path: Path, otherwise: PoolingKind) -> PoolingKind:
    described = read_optional_json(path)
    if described.get("include_prompt") is False:
        raise ConfigError(
            f"{path} leaves the prompt out of the pooled tokens (include_prompt), which Quire does not do"
        )
    chosen = [name for name, value in described.items() if name.startswith("pooling_mode_") and value is True]
    if not chosen:
        named = described.get("pooling_mode")
        chosen = [f"pooling_mode_{named}", f"pooling_mode_{named}_tokens", f"pooling_mode_{named}_token"]
        known = [name for name in chosen if name in _MODES]
        if named is None:
            return otherwise
        chosen = known or chosen[:1]
    if len(chosen) > 1 or chosen[0] not in _MODES:
        raise ConfigError(
            f"{path} pools by {', '.join(chosen)}, which Quire does not do; it does {', '.join(_MODES)}, one of them"
        )
    return _MODES[chosen[0]]


def _read_settings(folder: Path) -> _Settings:
    found: dict[str, Any] = {}
    for name in ("config_sentence_transformers.json", "sentence_bert_config.json"):
        found |= {key: value for key, value in read_optional_json(folder / name).items() if value is not None}
    try:
        settings = msgspec.convert(found, _Settings)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"the files of sentence-transformers in {folder} cannot be used: {error}") from error
    if settings.default_prompt_name is not None and settings.default_prompt_name not in settings.prompts:
        raise CheckpointError(
            f"config_sentence_transformers.json in {folder} names the prompt {settings.default_prompt_name!r}, which"
            " it does not have; correct it"
        )
    return settings
