"""How a linear layer keeps its matrix and multiplies by it: the interface of quantization methods.

Layers slice what a checkpoint holds and hand over the rank's part; a method stores it in its own form. Neither knows
architectures or files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from quire.layers.fusion import PLAIN, Forms
from quire.layers.scheme import Scheme, Weight
from quire.layers.weights import empty_parameter
from quire.ops.base import Target
from quire.ops.fp8 import QuantizedActivations
from quire.ops.split_k import PartialSums
from quire.types.errors import ConfigError
from quire.utils.units import format_bytes

# `linear_shrinking` of ops/lora.py on a layer's own weight and bias.
Shrinking = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
# (x, expert_ids, weights) -> what a sparse MLP gives.
Joined = Callable[[Tensor, Tensor, Tensor], Tensor | PartialSums]
MatrixRole = Literal["linear", "head", "table", "router", "grouped"]


@dataclass(frozen=True)
class MatrixSpec:
    """The part of a layer's matrices that this rank holds: pieces [outputs, in_features], one above the other."""

    in_features: int
    pieces: tuple[int, ...]  # outputs of each piece; pieces may be stored in different schemes
    bias: bool
    target: Target
    path: str = ""  # of the layer in its model
    role: MatrixRole = "linear"
    count: int = 1  # how many such matrices there are: the experts of a grouped layer

    @property
    def out_features(self) -> int:
        return sum(self.pieces)


class MatrixMethod(nn.Module, ABC):
    """How the matrices of a layer are kept, and their bias. Filled by `load`, closed by `finish`, then used.

    What is allocated in the constructor lands on the current default device, which may be "meta" in planning.
    """

    def __init__(self, spec: MatrixSpec, *shape: int) -> None:
        """`shape`: of the bias."""
        super().__init__()
        self.spec = spec
        self.bias = empty_parameter(*shape, dtype=spec.target.dtype) if spec.bias else None

    def finish(self) -> None:
        """All pieces and biases are there; called once, before the first matmul. Few methods need it."""
        return None

    @abstractmethod
    def planned_bytes(self, schemes: Sequence[Scheme]) -> int:
        """Bytes that the matrices, without their bias, take when their pieces come in these schemes.

        Of several matrices they are the pieces of the first, then those of the second, and so on. Called before
        loading, on any device; raises ConfigError for a scheme that the method does not take.
        """

    @property
    def kept(self) -> str:
        """What its weights are in memory, for people."""
        return str(self.spec.target.dtype).removeprefix("torch.")

    @property
    def arithmetic(self) -> str:
        """How quantized weights are multiplied, for people; "": they are plain numbers."""
        return ""

    def quantizes(self, scheme: Scheme) -> bool:
        """Whether activations are rounded to 8 bits for weights of a scheme that asks for it."""
        return False

    @property
    def num_bytes(self) -> int:
        """Bytes held now, the bias included; to be overridden where not all storage is parameters and buffers."""
        return sum(tensor.nbytes for tensor in (*self.parameters(), *self.buffers()))


class LinearMethod(MatrixMethod):
    """One layer's matrix and bias, used by `multiply`."""

    accepts: Forms = PLAIN
    """The forms in which it takes activations besides a tensor: those into which it would bring them anyway."""

    def __init__(self, spec: MatrixSpec) -> None:
        super().__init__(spec, spec.out_features)

    @abstractmethod
    def load(self, piece: int, rows: Weight) -> None:
        """Take piece number `piece`, [spec.pieces[piece], in_features]: a tensor of any float type, or stored.

        Called once for each piece, in any order. `rows` may be a non-contiguous view and may alias a mapped file
        whose pages are released afterwards: keep a copy. With dummy weights it lies on the method's device.
        """

    def load_bias(self, start: int, values: Tensor) -> None:
        """Write the biases of outputs [start, start + len(values))."""
        assert self.bias is not None
        self.bias.data[start : start + values.shape[0]].copy_(values)

    @abstractmethod
    def multiply(self, x: Tensor) -> Tensor:
        """x [n, in_features] -> [n, out_features], in x's type, the bias added."""

    def multiply_quantized(self, x: QuantizedActivations) -> Tensor:
        """The same of activations that were quantized where they were computed."""
        return self.multiply(x.unpacked())

    def gated(self, activation: str) -> Callable[[Tensor], Tensor] | None:
        """`multiply` and a gated activation after it at once, where a kernel does both; see ops/gated_linear.py."""
        return None

    def split_k(self) -> Callable[[Tensor], Tensor | PartialSums] | None:
        """`multiply` for readers that add up split-K partial sums, where that is faster; see ops/split_k.py."""
        return None

    def shrinking(self) -> Shrinking | None:
        """`multiply` beside the shrinking of LoRA adapters, where one kernel does both; see ops/lora.py."""
        return None

    def workspace_bytes(self) -> int:
        """Most memory that a matmul takes beside its arguments and result."""
        return 0

    def decodes(self, scheme: Scheme) -> bool:
        """Whether quantized weights of this scheme become plain floats when they are loaded."""
        return not scheme.is_float


class TableMethod(LinearMethod):
    """An embedding table [tokens, hidden] of one piece: rows can also be looked up. A tied head multiplies by it."""

    @abstractmethod
    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [n], all within the table -> rows [n, hidden] in the target's type."""


Shared = tuple[LinearMethod, LinearMethod] | None  # both matrices of a shared expert


class GroupedMethod(MatrixMethod):
    """The matrices [out_features, in_features] of all experts of one layer, and their biases; see ops/grouped.py.

    Used by `gate_up` or by `down`, as the layer is one or the other.
    """

    def __init__(self, spec: MatrixSpec) -> None:
        super().__init__(spec, spec.count, spec.out_features)

    @property
    def backend(self) -> str:
        """Whose kernels it takes."""
        return "torch"

    @abstractmethod
    def load(self, expert: int, piece: int, rows: Weight) -> None:
        """Take one piece of one expert, [spec.pieces[piece], in_features]; as LinearMethod's."""

    def load_bias(self, expert: int, start: int, values: Tensor) -> None:
        """Write the biases of an expert's outputs [start, start + len(values))."""
        assert self.bias is not None
        self.bias.data[expert, start : start + values.shape[0]].copy_(values)

    @abstractmethod
    def gate_up(self, x: Tensor, expert_ids: Tensor, activation: str) -> Tensor:
        """x [n, in_features], expert_ids [n, k] int32 -> [n, k, out_features / 2]."""

    @abstractmethod
    def down(self, a: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """a [n, k, in_features], expert_ids [n, k], weights [n, k] float32 -> [n, out_features]."""

    def slots(self, a: Tensor, expert_ids: Tensor) -> Tensor:
        """a [n, k, in_features], expert_ids [n, k] int32 -> what each slot's expert gives, [n, k, out_features].

        Results of experts beyond the last are 0.
        """
        ones = torch.ones(expert_ids.numel(), 1, dtype=torch.float32, device=a.device)
        out = self.down(a.flatten(0, 1).unsqueeze(1), expert_ids.reshape(-1, 1), ones)
        return out.view(*expert_ids.shape, -1)

    def joined(self, down: GroupedMethod, activation: str, in_parts: bool, shared: Shared = None) -> Joined | None:
        """(x, expert_ids, weights) -> what `down.down` gives of this `gate_up`, where kernels do both at once.

        `in_parts`: the reader adds up the experts of each token. `shared`: both matrices of a shared expert, which
        the result includes.
        """
        return None

    def workspace_bytes(self, num_tokens: int, top_k: int) -> int:
        """Most memory that a matmul of `num_tokens` tokens takes beside its arguments and result."""
        features = self.spec.in_features + self.spec.out_features
        return num_tokens * top_k * features * self.spec.target.dtype.itemsize

    def tensors_of(self, expert: int) -> list[Tensor]:
        """All that is kept of one expert, as it lies in memory, to be copied over another's."""
        return [parameter.data[expert] for parameter in self.parameters()]


def kept_weights(model: nn.Module) -> str:
    """How much of a model's weights is kept as what and multiplied how, for people; the largest part first."""
    sizes: dict[str, int] = {}
    for module in model.modules():
        if isinstance(module, MatrixMethod):
            name = module.kept + (f" ({module.arithmetic})" if module.arithmetic else "")
            sizes[name] = sizes.get(name, 0) + module.num_bytes
    parts = sorted(sizes.items(), key=lambda part: -part[1])
    return ", ".join(f"{format_bytes(size)} as {name}" for name, size in parts)


class Quantization(ABC):
    """A way to keep a model's weights: it chooses a method for each layer. One instance serves all layers."""

    name: str
    any_dtype: bool = False
    """Whether "auto" means it, too, where the user names the type of activations."""
    rounds_activations: bool = False
    """Whether it can round what it multiplies to integers, as `Target.activations` may ask."""

    def on(self, target: Target) -> Quantization:
        """What does this on the target's platform."""
        return self

    def refuses(self, target: Target) -> str | None:
        """Why it cannot serve this target, with the fix; None if it can."""
        return None

    def activations(self, target: Target) -> str:
        """What "auto" activations are on this machine."""
        return str(target.dtype).removeprefix("torch.")

    @abstractmethod
    def method(self, spec: MatrixSpec, schemes: Sequence[Scheme]) -> LinearMethod:
        """How the matrix of one layer is kept, by its path, its role and the schemes in which its pieces come.

        For the role "table" (token embeddings, which a tied head shares) this is a TableMethod.
        """

    def grouped(self, spec: MatrixSpec, schemes: Sequence[Scheme]) -> GroupedMethod:
        """The same for the matrices of all experts of a layer, `schemes` in the order of their planned_bytes."""
        raise ConfigError(
            f"quantization is {self.name!r}, which cannot keep the experts of {spec.path}; leave --quantization out"
        )
