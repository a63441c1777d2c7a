"""Ways to run a step. The first that takes a step runs it; the last, eager execution, takes every step.

A way is a file with a class that is a Way and, as a class, a WayKind, and one line of WAYS.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend
from quire.attention.forms import AttentionBackends
from quire.models.base import Model
from quire.platform.base import Platform
from quire.runner.sampling.sampler import SamplingKind
from quire.runner.step import Arriving, Step
from quire.types.ledger import EngineSizes, LedgerLine
from quire.utils.registry import Registry

if TYPE_CHECKING:
    from quire.runner.eager import Eager
    from quire.runner.forward import StepProgram


class Way(Protocol):
    name: str
    """For people who look at steps."""

    @property
    def step_sizes(self) -> tuple[int, ...]:
        """Numbers of tokens that mixed steps are padded to, up to the largest of them; none: they are not."""

    def forward(self, step: Step) -> bool:
        """Start the forward pass of a step and leave what it samples from; False if this way cannot run it.

        Does not wait for the device. If any row samples, `sample` comes next, before another step.
        """

    def sample(self, step: Step) -> None:
        """Sample for the rows that do, append their tokens, and set `step.sampled`. Does not wait for the device."""

    def go_on(
        self, rows: list[int], hidden: Tensor | None, kind: SamplingKind, count: int
    ) -> tuple[Arriving, Tensor] | None:
        """`count` decode steps behind the last one, as one piece of work: [count, n or more, 2] of what they sample.

        hidden [n or more, hidden] is what the last tokens of `rows` were sampled from, and what is returned beside.
        None if this way cannot. Does not wait for the device.
        """

    def capture_next(self) -> bool:
        """Capture a kind of step that may come and is not captured yet; False if there is none."""


@dataclass(frozen=True)
class WayContext:
    """What a way is planned and made for."""

    platform: Platform
    backends: AttentionBackends
    model: Model  # without weights, while it is planned
    dtype: torch.dtype
    sizes: EngineSizes
    pools: bool = False  # nothing is sampled
    passes_on: bool = False  # nor here: the hidden states of all tokens go to the next stage of a pipeline
    receives: bool = False  # and those of its own tokens come from the stage before
    num_drafts: int = 0  # of a drafter: decode steps that usually follow one another

    @property
    def backend(self) -> AttentionBackend:
        """That of the model's own layers."""
        return self.backends.of(next((layer.keeps.form for layer in self.model.attention_layers()), None))

    @property
    def kept_width(self) -> int:
        """Of what steps leave of every token for who pools or drafts; 0: nothing."""
        drafter = self.model.drafter
        read = 1 if self.pools else 0 if drafter is None else drafter.num_hidden_read
        return read * self.sizes.hidden_size


class WayKind(Protocol):
    """How a way is planned and made: asked of its class."""

    def contributes(self, context: WayContext) -> Iterable[LedgerLine]:
        """What it keeps; nothing where it is not made."""

    def make(self, context: WayContext, program: StepProgram, eager: Eager, room: int) -> Way | None:
        """None where the platform, the backend or the model has no use for it.

        `room`: the most tokens that the KV blocks hold of one request. No row is in use yet.
        """


WAYS: Registry[WayKind] = Registry(
    "way to run steps",
    "quire.runner",
    {"kernel_list": "kernel_list:KernelList", "cuda_graphs": "cuda_graphs:CudaGraphs"},
)


def make_ways(context: WayContext, program: StepProgram, eager: Eager, room: int) -> Iterator[Way]:
    """Those that there are for this context, in the order in which they are asked; eager execution is the last."""
    made = (WAYS.get(name).make(context, program, eager, room) for name in WAYS)
    yield from (way for way in made if way is not None)
    yield eager
