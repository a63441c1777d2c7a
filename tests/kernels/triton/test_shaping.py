"""Bans, biases and penalties by kernels, at the edges; with the sampler: tests/runner/sampling/test_triton.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.device import DEVICE
from tests.kernels.triton.paged import needs_triton

pytestmark = needs_triton
ALWAYS = 2**31 - 1


def bits(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32))


BAN = bits(float("-inf"))


class Rows:
    """Row 1 has the prompt 1, 2, 3 and the outputs 4, 5, 4; row 0 has no tokens; row 2 has a placeholder in it."""

    def __init__(self) -> None:
        self.token_ids = torch.full((3, 3000), 7, dtype=torch.int32, device=DEVICE)
        self.token_ids[1, :6] = torch.tensor([1, 2, 3, 4, 5, 4], dtype=torch.int32)
        self.token_ids[2, :3] = torch.tensor([-1, 9999, 2], dtype=torch.int32)
        self.num_tokens = torch.tensor([0, 6, 3], device=DEVICE)
        self.num_prompt = torch.tensor([0, 3, 3], device=DEVICE)

    @property
    def known(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.token_ids, self.num_tokens, self.num_prompt

    def edit(self, logits: Tensor, rows: list[int], edits: dict[int, list[list[int]]]) -> Tensor:
        from quire.kernels.triton.shaping import edit_logits

        table = torch.full((300, 6), -1, dtype=torch.int32, device=DEVICE)
        starts = torch.tensor([0, 100, 200], dtype=torch.int32, device=DEVICE)
        counts = torch.zeros(3, dtype=torch.int32, device=DEVICE)
        for row, lines in edits.items():
            counts[row] = len(lines)
            for place, line in enumerate(lines):
                table[100 * row + place, : len(line)] = torch.tensor(line, dtype=torch.int32)
        changed = logits.to(DEVICE).clone()
        edit_logits(changed, torch.tensor(rows, device=DEVICE), table, starts, counts, *self.known)
        return changed.cpu()

    def penalize(self, logits: Tensor, rows: list[int], penalties: dict[int, tuple[float, float, float]]) -> Tensor:
        from quire.kernels.triton.shaping import penalize

        table = torch.tensor([penalties.get(row, (0.0, 0.0, 1.0)) for row in range(3)], device=DEVICE).T.contiguous()
        changed = logits.to(DEVICE).clone()
        penalize(changed, torch.tensor(rows, device=DEVICE), table, *self.known)
        return changed.cpu()


def test_bans_and_biases_of_one_token() -> None:
    """A ban wins over a bias wherever it stands in the list, also beyond the first entries."""
    lines = [
        [5, bits(3.0), ALWAYS, 0],
        [6, BAN, ALWAYS, 0],
        *[[token, bits(1.0), ALWAYS, 0] for token in range(10, 80)],
    ]
    lines += [[5, BAN, ALWAYS, 0], [6, bits(2.0), ALWAYS, 0], [9, bits(0.5), ALWAYS, 0]]
    changed = Rows().edit(torch.zeros(2, 90), [0, 1], {1: lines})
    assert changed[0].tolist() == [0.0] * 90, "another row's edits are not its own"
    expected = torch.zeros(90)
    expected[10:80] = 1.0
    expected[9] = 0.5
    expected[[5, 6]] = -torch.inf
    assert torch.equal(changed[1], expected)


@pytest.mark.parametrize(
    ("line", "is_banned"),
    [
        ([8, BAN, 4, 0], True),  # until 4 outputs are there; 3 are
        ([8, BAN, 3, 0], False),
        ([8, BAN, ALWAYS, 1, 4], True),  # after 4
        ([8, BAN, ALWAYS, 2, 4, 5], True),  # after 5, 4
        ([8, BAN, ALWAYS, 2, 5, 4], False),
        ([8, BAN, ALWAYS, 4, 4, -1], False),  # needs more outputs than there are
    ],
)
def test_when_an_edit_counts(line: list[int], is_banned: bool) -> None:
    changed = Rows().edit(torch.zeros(1, 20), [1], {1: [line]})
    assert (float(changed[0, 8]) == -torch.inf) == is_banned


def test_what_is_banned_stays_banned() -> None:
    logits = torch.zeros(1, 20)
    logits[0, 4] = -torch.inf
    rows = Rows()
    assert float(rows.edit(logits, [1], {1: [[4, bits(5.0), ALWAYS, 0]]})[0, 4]) == -torch.inf
    assert float(rows.penalize(logits, [1], {1: (-1.0, -1.0, 1e-30)})[0, 4]) == -torch.inf


def test_penalties_by_hand() -> None:
    logits = torch.full((3, 5000), 2.0)
    logits[:, 2] = -2.0
    changed = Rows().penalize(logits, [2, 1, 0], {1: (0.5, 0.25, 2.0), 2: (0.0, 0.0, 4.0)})
    other, penalized, plain = changed
    assert torch.equal(plain, logits[0])
    expected = logits[0].clone()
    expected[[1, 3]] = 1.0
    expected[2] = -4.0
    expected[4] = 1.0 - 2 * 0.25 - 0.5
    expected[5] = 1.0 - 0.25 - 0.5
    assert torch.equal(penalized, expected)
    expected = logits[0].clone()
    expected[2] = -8.0
    assert torch.equal(other, expected), "what is no token of the vocabulary is not counted"


def test_a_long_row_is_counted_whole() -> None:
    rows = Rows()
    rows.num_tokens[1], rows.num_prompt[1] = 2500, 1
    changed = rows.penalize(torch.zeros(1, 50), [1], {1: (0.0, 1.0, 1.0)})
    assert float(changed[0, 7]) == -(2500 - 6)
