"""Seeded dummy weights: fills a model's parameters without any checkpoint, for tests, benchmarks and sizing."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from quire.layers.fusion import settle
from quire.layers.weights import weighted_layers
from quire.loader.mapper import allocate

AMPLITUDE = 1e-3


@torch.no_grad()
def fill_dummy(
    model: nn.Module, seed: int = 0, device: torch.device | None = None, amplitude: float = AMPLITUDE
) -> None:
    """Load made-up weights, each from the seed and its own name, so that order and neighbours do not matter.

    Values are uniform in [-amplitude, amplitude]; the weights of norms lie that close to 1. The numbers are drawn
    as float32 on the model's `device` (default: the host): there, billions of them would take minutes.
    """
    device = device or torch.device(torch.get_default_device())
    allocate(model)
    for path, layer in weighted_layers(model):
        for name in layer.weight_names():
            shape = layer.whole_shape(name)
            digest = hashlib.sha256(f"{seed}:{path}.{name}".encode()).digest()
            generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little", signed=True))
            values = torch.empty(shape, device=device).uniform_(-amplitude, amplitude, generator=generator)
            if len(shape) == 1 and "norm" in path:
                values += 1
            layer.load(name, None, values)
        layer.finish()
    settle(model)
