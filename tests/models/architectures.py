"""Which of the registered architectures generate; encoders, which pool, are tested in tests/e2e/test_encoders.py."""

from __future__ import annotations

from quire.models.base import CausalLM
from quire.models.registry import ARCHITECTURES

GENERATORS = [name for name in ARCHITECTURES if issubclass(ARCHITECTURES.get(name), CausalLM)]
