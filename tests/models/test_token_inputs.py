"""Rotations and embeddings that do not follow a token's index: images in prompts, as Qwen2-VL's text model has them.

The model is written here: Quire reads no images yet. Its slots still follow the index, and its steps run eagerly.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding, Qwen2VLTextModel

from quire.layers.rope.embedding import SectionedRotaryEmbedding, rotary_embedding
from quire.layers.rope.parameters import rope_parameters
from quire.models.qwen2 import Qwen2
from quire.models.registry import ARCHITECTURES
from quire.models.token_inputs import PLAIN_INPUTS, TokenInputs
from quire.ops.base import Target
from quire.ops.encoder import rows_of_tokens
from quire.ops.rope import apply_rope
from quire.ops.select import embed_from
from quire.runner.eager import Eager
from quire.runner.prompt_embeds import PromptEmbedInputs
from quire.types.errors import ModelError
from quire.types.sampling import SamplingParams
from quire.types.step import RowStart
from tests.e2e.tiny import SIZES, Answer, Driver, make_engine
from tests.kernels.cpu.isa import needs_library
from tests.runner.engines import runner_of

IMAGE = 7  # the token that stands for a patch
WIDTH = 4  # of an image, in patches
ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
ENCODED = torch.randn(40, SIZES["hidden_size"], generator=torch.Generator().manual_seed(5))  # patches of all images


def positions_of(token_ids: list[int]) -> tuple[Tensor, int]:
    """[3, n] positions of a prompt, and by how much those of later tokens differ from their index."""
    found: list[tuple[int, int, int]] = []
    after, first = 0, None  # the next position of text; where the image began
    for index, token in enumerate(token_ids):
        if token != IMAGE:
            found.append((after, after, after))
            after, first = after + 1, None
            continue
        first = index if first is None else first
        height, column = divmod(index - first, WIDTH)
        start = found[first - 1][0] + 1 if first else 0
        found.append((start, start + height, start + column))
        after = max(after, *(position + 1 for position in found[-1]))
    return torch.tensor(found).T, after - len(token_ids)


class ImageInputs(TokenInputs):
    captures = False  # torch's own ops, some of which make lists of other lengths

    def __init__(self, embed: Callable[[Tensor], Tensor], max_rows: int, max_len: int) -> None:
        self._embed = embed
        self._positions = torch.zeros(3, max_rows + 1, max_len, dtype=torch.int64)
        self._sources = torch.full((max_rows + 1, max_len), -1)
        self._deltas, self._lengths = torch.zeros(2, max_rows + 1, dtype=torch.int64)
        self.removed: list[int] = []

    def add_request(self, start: RowStart) -> None:
        prompt = start.token_ids[: start.num_prompt_tokens]
        positions, self._deltas[start.row] = positions_of(prompt)
        self._positions[:, start.row, : len(prompt)] = positions
        is_image = torch.tensor(prompt) == IMAGE
        self._sources[start.row] = -1
        self._sources[start.row, : len(prompt)][is_image] = torch.arange(int(is_image.sum()))
        self._lengths[start.row] = len(prompt)

    def remove_request(self, row: int) -> None:
        self.removed.append(row)

    def rotary_positions(self, index: Tensor, rows: Tensor, query_starts: Tensor) -> Tensor:
        row = rows_of_tokens(rows, query_starts, len(index))
        return torch.where(index < self._lengths[row], self._positions[:, row, index], index + self._deltas[row])

    def embeds(self, input_ids: Tensor, index: Tensor, rows: Tensor, query_starts: Tensor) -> Tensor:
        row = rows_of_tokens(rows, query_starts, len(index))
        return embed_from(self._embed(input_ids), ENCODED, self._sources[row, index])


class Qwen2VLText(Qwen2):
    def token_inputs(self, max_rows: int, max_model_len: int) -> TokenInputs:
        return ImageInputs(self.model.embed, max_rows, max_model_len)


class TextOnly(Qwen2):
    """The same weights, with rotations that follow the index."""


@pytest.fixture(autouse=True)
def registered(contexts: ExitStack) -> None:
    contexts.enter_context(ARCHITECTURES.with_entries({}))
    ARCHITECTURES.register("Qwen2VLText", Qwen2VLText)
    ARCHITECTURES.register("TextOnly", TextOnly)


@pytest.fixture(scope="module")
def theirs() -> Qwen2VLTextModel:
    torch.manual_seed(0)
    return Qwen2VLTextModel(Qwen2VLTextConfig(**SIZES, rope_parameters=ROPE)).eval()


def save(theirs: Qwen2VLTextModel, folder: Path, architecture: str) -> Path:
    weights = {f"model.{name}": tensor.contiguous() for name, tensor in theirs.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    config: dict[str, Any] = {
        **SIZES,
        "architectures": [architecture],
        "rope_parameters": ROPE,
        "rms_norm_eps": theirs.config.rms_norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@torch.no_grad()
def expected(theirs: Qwen2VLTextModel, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probabilities, each by a pass over the whole sequence."""
    table = theirs.embed_tokens.weight
    tokens, logprobs = list(prompt), []
    places, delta = positions_of(prompt)
    for _ in range(count):
        later = torch.arange(len(prompt), len(tokens)) + delta
        embeds = table[torch.tensor(tokens)]
        is_image = torch.tensor(prompt) == IMAGE
        embeds[: len(prompt)][is_image] = ENCODED[: int(is_image.sum())]
        positions = torch.cat([places, later.expand(3, -1)], dim=1)[:, None]
        hidden = theirs(inputs_embeds=embeds[None], position_ids=positions).last_hidden_state
        line = (hidden[0, -1] @ table.T).log_softmax(-1)
        tokens.append(int(line.argmax()))
        logprobs.append(float(line.max()))
    return tokens[len(prompt) :], logprobs


PROMPTS = [
    [3, 9, *[IMAGE] * 12, 11, 5],
    [20, 21, 22],
    [IMAGE] * 8 + [30] + [IMAGE] * 20 + [31, 32],
]


def answers(folder: Path, **settings: Any) -> tuple[list[Answer], ImageInputs]:
    core = make_engine(folder, max_model_len=128, enable_prefix_caching=False, **settings)
    assert [type(way) for way in runner_of(core).ways] == [Eager], "what is not captured runs eagerly"
    driver = Driver(core)
    for index, prompt in enumerate(PROMPTS):
        driver.add(str(index), prompt, SamplingParams(temperature=0.0, max_tokens=6, logprobs=0, ignore_eos=True))
        driver.step()
    wrapped = runner_of(core).inputs
    assert isinstance(wrapped, PromptEmbedInputs)
    inputs = wrapped.inner
    assert isinstance(inputs, ImageInputs)
    return list(driver.finish().values()), inputs


@pytest.mark.parametrize("backend", ["torch_ref", pytest.param("cpu_native", marks=needs_library)])
def test_tokens_are_those_of_transformers(theirs: Qwen2VLTextModel, tmp_path: Path, backend: str) -> None:
    folder = save(theirs, tmp_path, "Qwen2VLText")
    settings = {"attention_backend": backend, "kv_cache_dtype": "float32"}
    found, inputs = answers(folder, **settings, max_num_batched_tokens=64)
    for answer, prompt in zip(found, PROMPTS, strict=True):
        tokens, logprobs = expected(theirs, prompt, 6)
        assert answer.token_ids == tokens
        assert [entry.logprobs[0] for entry in answer.logprobs] == pytest.approx(logprobs, abs=1e-3)
    assert len(inputs.removed) >= len(PROMPTS) - 1
    chunked, _ = answers(folder, **settings, max_num_batched_tokens=5, max_num_seqs=3)
    assert [answer.content() for answer in chunked] == [answer.content() for answer in found]


def test_text_alone_needs_none_of_it(theirs: Qwen2VLTextModel, tmp_path: Path) -> None:
    """And with images, a model whose rotations and embeddings are plain says something else."""
    core = make_engine(save(theirs, tmp_path, "TextOnly"), max_model_len=128)
    driver = Driver(core)
    for index, prompt in enumerate(PROMPTS):
        driver.add(str(index), prompt, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    found = driver.finish()
    same = [found[str(i)].token_ids == expected(theirs, prompt, 6)[0] for i, prompt in enumerate(PROMPTS)]
    assert same == [False, True, False]


def test_positions_within_an_image() -> None:
    places, delta = positions_of(PROMPTS[0])
    assert places[:, 1:7].tolist() == [[1, 2, 2, 2, 2, 2], [1, 2, 2, 2, 2, 3], [1, 2, 3, 4, 5, 2]]
    assert (places[:, -1].tolist(), delta) == ([7, 7, 7], -8)


def test_the_rotation_of_transformers(theirs: Qwen2VLTextModel) -> None:
    rope = rope_parameters({"max_position_embeddings": 512, "rope_parameters": ROPE}, 16)
    ours = rotary_embedding(rope, 100, Target())
    assert isinstance(ours, SectionedRotaryEmbedding)
    reference = Qwen2VLRotaryEmbedding(theirs.config)
    positions = torch.randint(0, 100, (3, 40), generator=torch.Generator().manual_seed(0))
    x = torch.randn(40, 2, 16, generator=torch.Generator().manual_seed(1))
    cos, sin = reference(x, positions[:, None])
    half = torch.cat((-x[..., 8:], x[..., :8]), dim=-1)
    torch.testing.assert_close(
        apply_rope(x, *ours(positions)), x * cos[0][:, None] + half * sin[0][:, None], atol=1e-5, rtol=1e-5
    )
    same = positions[0].expand(3, -1)
    assert all(map(torch.equal, ours(same), ours(positions[0]))), "text alone has one position"


def test_plain_positions_are_the_index_itself() -> None:
    index, rows, starts = torch.arange(3), torch.tensor([4]), torch.tensor([0, 3], dtype=torch.int32)
    assert PLAIN_INPUTS.rotary_positions(index, rows, starts) is index
    assert PLAIN_INPUTS.embeds(index, index, rows, starts) is None
    assert PLAIN_INPUTS.captures


def test_rows_of_tokens() -> None:
    starts = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    assert rows_of_tokens(torch.tensor([4, 9, 6]), starts, 7).tolist() == [4, 4, 6, 6, 6, 6, 6]


def test_an_older_config_names_the_type_by_its_sections() -> None:
    scaling = {"type": "mrope", "mrope_section": [2, 3, 3]}
    config = {"max_position_embeddings": 512, "rope_theta": 1e4, "rope_scaling": scaling}
    rope = rope_parameters(config, 16)
    assert (rope.rope_type, rope.sections) == ("default", (2, 3, 3))
    with pytest.raises(ModelError, match=r"mrope_section is \[2, 3, 3\], which is 8 frequencies, but heads have 16"):
        rope_parameters(config, 32)
