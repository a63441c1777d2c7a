"""Which experts tokens went to: the routers' own choices, whatever the batch; and the same computed again of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.config.engine import EngineConfig
from quire.layers.experts import Recording, Replay, Router
from quire.types.errors import ConfigError, RequestError
from quire.worker.direct import DirectModel
from tests.e2e.tiny import make_model
from tests.models.harness import load, run_chunks
from tests.models.zoo import EXPERT_KEYS

PROMPT = [5, 9, 5, 17, 30, 5, 9, 33, 41, 2, 90, 77]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("experts"), "qwen3_moe", **EXPERT_KEYS)


def routers_of(model: torch.nn.Module) -> list[Router]:
    return [module for module in model.modules() if isinstance(module, Router)]


def test_recorded_routing_is_what_the_routers_choose_and_can_be_replayed(model: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, return_routed_experts=True)
    plain = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    llm = LLM(str(model), skip_tokenizer_init=True, max_num_batched_tokens=8, max_num_seqs=4)
    prompts = [{"prompt_token_ids": PROMPT}, {"prompt_token_ids": PROMPT[::-1]}, {"prompt_token_ids": PROMPT}]
    unasked, other, asked = (output.outputs[0] for output in llm.generate(prompts, [plain, params, params]))
    again = llm.generate([prompts[0]], params)[0]  # its prefix is cached by now, and must not be used
    tokens = PROMPT + asked.token_ids[:-1]
    assert unasked.routed_experts is None
    assert asked.token_ids == unasked.token_ids
    assert asked.routed_experts is not None
    assert other.routed_experts is not None
    assert again.num_cached_tokens == 0
    np.testing.assert_array_equal(asked.routed_experts, again.outputs[0].routed_experts)
    assert (asked.routed_experts != other.routed_experts).any()

    fresh = load(model, 64)
    for router in routers_of(fresh):
        router.tape = Recording()
    expected = run_chunks(fresh, tokens, [len(tokens)])
    chosen = torch.stack([router.tape.ids[0] for router in routers_of(fresh)], dim=1)  # type: ignore[attr-defined]
    np.testing.assert_array_equal(asked.routed_experts, chosen[: len(tokens)].numpy().astype(np.int16))

    def replayed(ids: torch.Tensor) -> torch.Tensor:
        for layer, router in enumerate(routers_of(fresh)):
            router.tape = Replay(ids[:, layer], router.routing)
        return run_chunks(fresh, tokens, [5, 4, 8])

    torch.testing.assert_close(replayed(torch.from_numpy(asked.routed_experts)), expected, atol=1e-5, rtol=0)
    others = (torch.from_numpy(asked.routed_experts) + 1) % EXPERT_KEYS["num_experts"]
    assert not torch.allclose(replayed(others), expected, atol=1e-3)

    with torch.inference_mode():
        direct = DirectModel(EngineConfig.from_flat(model=str(model), skip_tokenizer_init=True))
        routed = asked.routed_experts
        own, same = direct.logits(tokens), direct.logits(tokens, routed)
        torch.testing.assert_close(same, own, atol=1e-4, rtol=0)
        changed = direct.logits(tokens, others.numpy())
        assert not torch.allclose(changed, own, atol=1e-3)
        assert torch.equal(direct.logits(tokens), own), "the next pass chooses itself"
        with pytest.raises(ConfigError, match=r"routed_experts is \[1, 4, 2\], but must be \[17, 4, 2\]"):
            direct.logits(tokens, routed[:1])


def test_a_model_without_experts_refuses(tmp_path: Path) -> None:
    llm = LLM(str(make_model(tmp_path, "llama", num_hidden_layers=1)), skip_tokenizer_init=True)
    with pytest.raises(RequestError, match="the model has no experts, or is cut"):
        llm.generate([{"prompt_token_ids": PROMPT}], SamplingParams(return_routed_experts=True))
