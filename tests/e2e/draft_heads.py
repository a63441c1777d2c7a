"""Tiny random heads in the layouts in which heads are published, and the same heads in plain torch.

A reference says what a head drafts behind a sequence: it computes every pair anew, over hidden states that
transformers gives, and keeps no cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as deepseek32
from transformers.models.glm4_moe import modeling_glm4_moe as glm
from transformers.models.glm4_moe_lite import modeling_glm4_moe_lite as lite
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as dsa
from transformers.models.llama import modeling_llama as llama
from transformers.models.longcat_flash import modeling_longcat_flash as longcat
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen35
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen35_moe
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from quire.models.config import DecoderConfig
from quire.models.drafters.mtp import Mtp
from quire.models.drafters.registry import MTP_MODULES
from quire.models.qwen2 import Qwen3
from quire.models.registry import ARCHITECTURES
from tests.e2e.tiny import EXPERTS, LATENT, RECURRENT, SIZES, VOCAB, make_model

HIDDEN = SIZES["hidden_size"]
DRAFT_VOCAB = 120
TAPS = (1, 2, 3)
Draft = Callable[[list[int], int], list[int]]  # known tokens, number of drafts -> drafts


def random_weights(module: nn.Module, seed: int = 7) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, weight in module.named_parameters():
        spread = torch.empty_like(weight).uniform_(-0.3, 0.3, generator=generator)
        weight.data.copy_(spread + 1 if weight.dim() == 1 and "norm" in name else spread)


def save_head(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    save_file(
        {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Target:
    """A target as transformers runs it."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float().eval()
        self.config = self.model.config
        self.config._attn_implementation = "eager"

    @torch.inference_mode()
    def hidden(self, tokens: list[int]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """After the final norm, and what each layer reads: [n, hidden]."""
        given = self.model.model(torch.tensor([tokens]), output_hidden_states=True)
        return given.last_hidden_state[0], tuple(part[0] for part in given.hidden_states)

    def embed(self, tokens: list[int]) -> Tensor:
        found: Tensor = self.model.model.embed_tokens(torch.tensor(tokens))
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.model.lm_head(hidden)
        return found


def causal(layer: nn.Module, rotary: nn.Module, hidden: Tensor, window: int = 1 << 30) -> Tensor:
    """A decoder layer of transformers over a whole sequence [n, hidden]."""
    count = hidden.shape[0]
    positions = torch.arange(count)[None]
    distance = positions.T - positions
    mask = torch.zeros(count, count).masked_fill((distance < 0) | (distance >= window), -torch.inf)[None, None]
    place = rotary(hidden[None], positions)
    out = layer(hidden[None], attention_mask=mask, position_ids=positions, position_embeddings=place)
    found: Tensor = (out[0] if isinstance(out, tuple) else out)[0]
    return found


def drafts_of(
    target: Target,
    step: Callable[[Tensor, Tensor], Tensor],
    logits: Callable[[Tensor], Tensor],
    first: Callable[[Tensor, tuple[Tensor, ...]], Tensor] = lambda last, layers: last,
) -> Draft:
    """What a head drafts: step(embeddings, hidden states) of all pairs gives its own hidden states."""

    @torch.inference_mode()
    def draft(known: list[int], count: int) -> list[int]:
        hidden, tokens = first(*target.hidden(known))[:-1], list(known)
        for _ in range(count):
            own = step(target.embed(tokens[1:]), hidden)
            tokens.append(int(logits(own[-1:]).argmax()))
            hidden = torch.cat((hidden, own[-1:]))
        return tokens[len(known) :]

    return draft


def one_layer(sizes: dict[str, Any]) -> Any:
    return AutoConfig.for_model("llama", **{**sizes, "num_hidden_layers": 1, "attn_implementation": "eager"})


def eagle(folder: Path, target: Target, *, bias: bool = True, **sizes: Any) -> tuple[Path, Draft]:
    """Its config does not say whether `fc` has a bias."""
    sizes = {**SIZES, **sizes}
    config = one_layer(sizes)
    layer, fc, rotary = (
        llama.LlamaDecoderLayer(config, 0),
        nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias),
        llama.LlamaRotaryEmbedding(config),
    )
    layer.input_layernorm = nn.Identity()
    random_weights(layer)
    random_weights(fc, 8)
    tensors = {f"layers.0.{name}": weight for name, weight in layer.state_dict().items()}
    tensors |= {f"fc.{name}": weight for name, weight in fc.state_dict().items()}
    tensors |= {"embed_tokens.weight": target.model.model.embed_tokens.weight}
    saved = save_head(folder, tensors, {**sizes, "num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]})
    draft = drafts_of(target, lambda e, h: causal(layer, rotary, fc(torch.cat((e, h), -1))), target.logits)
    return saved, draft


class Eagle3Layer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn = llama.LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(self.self_attn, name)
            setattr(self.self_attn, name, nn.Linear(2 * config.hidden_size, old.out_features, bias=False))
        self.mlp = llama.LlamaMLP(config)
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            setattr(self, name, llama.LlamaRMSNorm(config.hidden_size, config.rms_norm_eps))

    def forward(self, pairs: Tensor, **place: Any) -> Tensor:
        embeds, hidden = pairs.chunk(2, -1)
        both = torch.cat((self.input_layernorm(embeds), self.hidden_norm(hidden)), -1)
        hidden = hidden + self.self_attn(both, **place)[0]
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def eagle3(folder: Path, target: Target, taps: tuple[int, ...] = TAPS, **sizes: Any) -> tuple[Path, Draft]:
    sizes = {**SIZES, **sizes}
    config = one_layer(sizes)
    layer, rotary = Eagle3Layer(config), llama.LlamaRotaryEmbedding(config)
    hidden_size = config.hidden_size
    fc, norm = (
        nn.Linear(3 * hidden_size, hidden_size, bias=False),
        llama.LlamaRMSNorm(hidden_size, config.rms_norm_eps),
    )
    head = nn.Linear(hidden_size, DRAFT_VOCAB, bias=False)
    for seed, module in enumerate((layer, fc, norm, head)):
        random_weights(module, seed)
    kept = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))[:DRAFT_VOCAB].sort().values
    tensors: dict[str, Tensor] = {f"midlayer.{name}": weight for name, weight in layer.state_dict().items()}
    tensors |= {"fc.weight": fc.weight, "norm.weight": norm.weight, "lm_head.weight": head.weight}
    tensors |= {"d2t": kept - torch.arange(DRAFT_VOCAB), "t2d": torch.isin(torch.arange(VOCAB), kept)}
    shape = {"draft_vocab_size": DRAFT_VOCAB, "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(taps)}}
    saved = save_head(
        folder, tensors, {**sizes, **shape, "num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3"]}
    )

    def first(last: Tensor, layers: tuple[Tensor, ...]) -> Tensor:
        mixed: Tensor = fc(torch.cat([layers[index] for index in taps], -1))
        return mixed

    def logits(hidden: Tensor) -> Tensor:
        return torch.full((1, VOCAB), -torch.inf).index_copy_(1, kept, head(norm(hidden)))

    return saved, drafts_of(target, lambda e, h: causal(layer, rotary, torch.cat((e, h), -1)), logits, first)


def medusa(folder: Path, target: Target, *, converted: bool = False) -> tuple[Path, Draft]:
    """In the layout of its authors, or in that of vLLM."""
    blocks = [nn.Linear(HIDDEN, HIDDEN) for _ in range(3)]
    heads = [nn.Linear(HIDDEN, VOCAB, bias=False) for _ in range(3)]
    for seed, module in enumerate((*blocks, *heads)):
        random_weights(module, seed)
    tensors: dict[str, Tensor] = {}
    for index, (block, head) in enumerate(zip(blocks, heads, strict=True)):
        place = (
            (f"blocks.{index}.layers.0", f"lm_heads.{index}") if converted else (f"{index}.0.linear", f"{index}.1")
        )
        tensors |= {
            f"{place[0]}.weight": block.weight,
            f"{place[0]}.bias": block.bias,
            f"{place[1]}.weight": head.weight,
        }
    config: dict[str, Any] = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/base"}
    if converted:
        config = {"num_heads": 3, "num_hidden_layers": 1, "medusa_fc_bias": True, "architectures": ["MedusaModel"]}
        config |= {"hidden_size": HIDDEN, "vocab_size": VOCAB}
    saved = save_head(folder, tensors, config)

    @torch.inference_mode()
    def draft(known: list[int], count: int) -> list[int]:
        hidden = target.hidden(known)[0][-2]
        pairs = list(zip(blocks, heads, strict=True))[:count]
        return [int(head(hidden + nn.functional.silu(block(hidden))).argmax()) for block, head in pairs]

    return saved, draft


def mtp_deepseek(folder: Path) -> tuple[Path, Draft]:
    sizes = {**LATENT, "head_dim": 8, "num_nextn_predict_layers": 1}
    kinds = deepseek.DeepseekV3DecoderLayer, deepseek.DeepseekV3RotaryEmbedding, deepseek.DeepseekV3RMSNorm
    return mtp_behind(make_model(folder, "deepseek_v3", **sizes), *kinds)


def mtp_glm_lite(folder: Path) -> tuple[Path, Draft]:
    sizes = {**LATENT, "head_dim": 8, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1}
    kinds = lite.Glm4MoeLiteDecoderLayer, lite.Glm4MoeLiteRotaryEmbedding, lite.Glm4MoeLiteRMSNorm
    return mtp_behind(make_model(folder, "glm4_moe_lite", **sizes), *kinds)


# So many heads of the index that hardly any scores are equal, of which transformers takes any.
SPARSE = {**LATENT, "head_dim": 8, "index_topk": 12, "index_head_dim": 16, "index_n_heads": 16}


def mtp_deepseek32(folder: Path) -> tuple[Path, Draft]:
    kinds = deepseek32.DeepseekV32DecoderLayer, deepseek32.DeepseekV32RotaryEmbedding, deepseek32.DeepseekV32RMSNorm
    return mtp_behind(make_model(folder, "deepseek_v32", **SPARSE), *kinds)


def mtp_dsa(folder: Path) -> tuple[Path, Draft]:
    kinds = dsa.GlmMoeDsaDecoderLayer, dsa.GlmMoeDsaRotaryEmbedding, dsa.GlmMoeDsaRMSNorm
    return mtp_behind(make_model(folder, "glm_moe_dsa", **SPARSE), *kinds)


LONGCAT: dict[str, Any] = {
    **{
        key: LATENT[key]
        for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    },
    **{"num_key_value_heads": 4, "head_dim": 8, "qk_head_dim": 24, "n_routed_experts": 8, "moe_topk": 3},
    **{"zero_expert_num": 0, "expert_ffn_hidden_size": 32, "ffn_hidden_size": 96, "num_layers": 2},
}


class LongcatDraftLayer(nn.Module):
    """No code of transformers has it: one attention and one MLP of LongCat-Flash."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn, self.mlp = longcat.LongcatFlashMLA(config, 0), longcat.LongcatFlashMLP(config)
        for name in ("input_layernorm", "post_attention_layernorm"):
            setattr(self, name, longcat.LongcatFlashRMSNorm(config.hidden_size, config.rms_norm_eps))

    def forward(self, hidden: Tensor, **place: Any) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), **place)[0]
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def mtp_longcat(folder: Path) -> tuple[Path, Draft]:
    """With the names of meituan-longcat/LongCat-Flash-Chat."""
    target = Target(make_model(folder, "longcat_flash", **LONGCAT))
    layer, rotary = LongcatDraftLayer(target.config), longcat.LongcatFlashRotaryEmbedding(target.config)
    enorm, hnorm, norm = (longcat.LongcatFlashRMSNorm(HIDDEN, target.config.rms_norm_eps) for _ in range(3))
    project = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
    for seed, module in enumerate((layer, enorm, hnorm, norm, project)):
        random_weights(module, seed)
    first = "model.mtp.layers.0"
    own = {
        f"{first}.{'transformer_layer.' if name.startswith('mlp') else ''}{name}": weight
        for name, weight in layer.state_dict().items()
    }
    own |= {f"{first}.enorm.m.weight": enorm.weight, f"{first}.hnorm.m.weight": hnorm.weight}
    own |= {f"{first}.eh_proj.weight": project.weight, "model.mtp.norm.weight": norm.weight}
    own |= {"model.mtp.embed_tokens.weight": target.model.model.embed_tokens.weight}
    add_tensors(folder, own)
    draft = drafts_of(
        target,
        lambda e, h: causal(layer, rotary, project(torch.cat((enorm(e), hnorm(h)), -1))),
        lambda hidden: target.logits(norm(hidden)),
    )
    return folder, draft


def mtp_glm(folder: Path) -> tuple[Path, Draft]:
    names = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "first_k_dense_replace")
    sizes = {**{name: LATENT[name] for name in names}, "n_group": 1, "topk_group": 1, "use_qk_norm": True}
    kinds = glm.Glm4MoeDecoderLayer, glm.Glm4MoeRotaryEmbedding, glm.Glm4MoeRMSNorm
    return mtp_behind(make_model(folder, "glm4_moe", **sizes), *kinds)


WINDOW = 8


class DraftedQwen3(Qwen3):
    has_draft_layer = True


class WindowedMtp(Mtp):
    """No published module drafts for layers with windows: this one is of a Qwen3, in DeepSeek's layout."""

    @classmethod
    def layer_config(cls, config: dict[str, Any]) -> DecoderConfig:
        return super().layer_config({**config, "max_window_layers": 0})


def mtp_windows(folder: Path) -> tuple[Path, Draft]:
    """Layers of the target, and that of the module, see a window; for `windowed_mtp`."""
    sizes = {
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 2,
        "tie_word_embeddings": False,
    }
    kinds = qwen3.Qwen3DecoderLayer, qwen3.Qwen3RotaryEmbedding, qwen3.Qwen3RMSNorm
    return mtp_behind(make_model(folder, "qwen3", **sizes), *kinds, window=WINDOW)


@contextmanager
def windowed_mtp() -> Iterator[None]:
    name = "Qwen3ForCausalLM"
    with ARCHITECTURES.with_entries({name: DraftedQwen3}), MTP_MODULES.with_entries({name: WindowedMtp}):
        yield


def mtp_behind(
    folder: Path,
    layer_kind: type[nn.Module],
    rotary_kind: type[nn.Module],
    norm_kind: type[nn.Module],
    window: int = 1 << 30,
) -> tuple[Path, Draft]:
    """A target whose checkpoint has one layer more."""
    target = Target(folder)
    layer, rotary = layer_kind(target.config, 1), rotary_kind(target.config)
    enorm, hnorm, norm = (norm_kind(HIDDEN, target.config.rms_norm_eps) for _ in range(3))
    project = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
    for seed, module in enumerate((layer, enorm, hnorm, norm, project)):
        random_weights(module, seed)
        for name, buffer in module.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.1, 0.1, generator=torch.Generator().manual_seed(3))
    prefix = f"model.layers.{SIZES['num_hidden_layers']}"
    own = {f"{prefix}.{name}": weight for name, weight in split_experts(layer.state_dict()).items()}
    for name, part in {"enorm": enorm, "hnorm": hnorm, "shared_head.norm": norm, "eh_proj": project}.items():
        own[f"{prefix}.{name}.weight"] = part.weight
    own |= {f"{prefix}.embed_tokens.weight": target.model.model.embed_tokens.weight}
    own |= {f"{prefix}.shared_head.head.weight": target.model.lm_head.weight}
    add_tensors(folder, own)
    draft = drafts_of(
        target,
        lambda e, h: causal(layer, rotary, project(torch.cat((enorm(e), hnorm(h)), -1)), window),
        lambda hidden: target.logits(norm(hidden)),
    )
    return folder, draft


def mtp_qwen(folder: Path) -> tuple[Path, Draft]:
    sizes = {**RECURRENT, **EXPERTS, "shared_expert_intermediate_size": 32}
    kinds = qwen.Qwen3NextDecoderLayer, qwen.Qwen3NextRotaryEmbedding, qwen.Qwen3NextRMSNorm
    return mtp_under(make_model(folder, "qwen3_next", **sizes), *kinds)


def mtp_qwen35(folder: Path) -> tuple[Path, Draft]:
    kinds = qwen35.Qwen3_5DecoderLayer, qwen35.Qwen3_5TextRotaryEmbedding, qwen35.Qwen3_5RMSNorm
    return mtp_under(make_model(folder, "qwen3_5_text", **RECURRENT), *kinds)


def mtp_qwen35_moe(folder: Path) -> tuple[Path, Draft]:
    sizes = {**RECURRENT, **EXPERTS, "shared_expert_intermediate_size": 32}
    kinds = (
        qwen35_moe.Qwen3_5MoeDecoderLayer,
        qwen35_moe.Qwen3_5MoeTextRotaryEmbedding,
        qwen35_moe.Qwen3_5MoeRMSNorm,
    )
    return mtp_under(make_model(folder, "qwen3_5_moe_text", **sizes), *kinds)


def mtp_under(
    folder: Path, layer_kind: type[nn.Module], rotary_kind: type[nn.Module], norm_kind: type[nn.Module]
) -> tuple[Path, Draft]:
    """A target whose checkpoint has a module of its own under `mtp.`."""
    target = Target(folder)
    config = AutoConfig.from_pretrained(folder)
    config.layer_types, config.num_hidden_layers, config._attn_implementation = ["full_attention"], 1, "eager"
    layer, rotary = layer_kind(config, 0), rotary_kind(config)
    names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    norms = {name: norm_kind(HIDDEN, config.rms_norm_eps) for name in names}
    project = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
    for seed, module in enumerate((layer, *norms.values(), project)):
        random_weights(module, seed)
    own = {f"mtp.layers.0.{name}": weight for name, weight in split_experts(layer.state_dict()).items()}
    own |= {f"mtp.{name}.weight": part.weight for name, part in {**norms, "fc": project}.items()}
    add_tensors(folder, own)
    embedded, hidden_norm, norm = norms.values()
    draft = drafts_of(
        target,
        lambda e, h: norm(causal(layer, rotary, project(torch.cat((embedded(e), hidden_norm(h)), -1)))),
        target.logits,
    )
    return folder, draft


def split_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As checkpoints hold experts: a matrix of each."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        path, _, kind = name.rpartition(".experts.")
        for index, part in enumerate(tensor if path and tensor.dim() == 3 else ()):
            if kind.startswith("gate_up_proj"):
                gate, up = part.chunk(2)
                found[f"{path}.experts.{index}.gate_proj.weight"] = gate
                found[f"{path}.experts.{index}.up_proj.weight"] = up
            else:
                found[f"{path}.experts.{index}.down_proj.weight"] = part
        if not (path and tensor.dim() == 3):
            found[name] = tensor
    return found


def add_tensors(folder: Path, more: dict[str, Tensor]) -> None:
    (path,) = folder.glob("*.safetensors")
    both = {**load_file(path), **{name: tensor.detach().clone().contiguous() for name, tensor in more.items()}}
    save_file(both, path, metadata={"format": "pt"})
