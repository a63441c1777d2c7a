"""Ways to run a step. The first that takes a step runs it; the last, eager execution, takes every step."""

from __future__ import annotations

from typing import Protocol

from quire.runner.step import Step


class Way(Protocol):
    @property
    def step_sizes(self) -> tuple[int, ...]:
        """Numbers of tokens that mixed steps are padded to, up to the largest of them; none: they are not."""

    def forward(self, step: Step) -> bool:
        """Start the forward pass of a step and leave what it samples from; False if this way cannot run it.

        Does not wait for the device. If any row samples, `sample` comes next, before another step.
        """

    def sample(self, step: Step) -> None:
        """Sample for the rows that do, append their tokens, and set `step.sampled`. Does not wait for the device."""

    def capture_next(self) -> bool:
        """Capture a kind of step that may come and is not captured yet; False if there is none."""
