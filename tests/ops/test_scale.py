from __future__ import annotations

import pytest
import torch

from quire.ops.scale import rounded, scale


def test_every_element_is_multiplied() -> None:
    x = torch.tensor([[1.0, -2.0], [0.0, torch.inf]])
    assert torch.equal(scale(x, 0.5), torch.tensor([[0.5, -1.0], [0.0, torch.inf]]))
    assert x[0, 0] == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [1.0, 48.0, 2304**0.5, 640**0.5, 0.22, -12.5, 33.94, 65.75, 0.0])
def test_a_number_is_rounded_as_a_tensor_rounds_it(dtype: torch.dtype, value: float) -> None:
    assert rounded(value, dtype) == torch.tensor(value, dtype=dtype).item()
