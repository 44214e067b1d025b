"""Linear layers with weights packed for oneDNN, for float32 on an x86 CPU.

PyTorch's own float32 path reads a row-major weight matrix through general matrix routines, which for a handful of rows
are several times slower than reading the weights once. Packing reorders each matrix once, at load, into the blocked
layout that oneDNN computes with. Passes of one to nine positions, which is what decoding consists of, gain most.
And its kernels add up a row's products in one order whatever the number of rows, which PyTorch's own path does not: a
token's logits are the same, bit for bit, in a pass of any width. (See `invariant` for the other half of that.)
"""

import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers.pytorch_utils import Conv1D

# The layout is chosen for so many rows. It makes no difference to the bits, and from two rows on none to the layout.
_ROWS = 6
# Fewer rows than this are filled up, where they would give other bits or, on some processors, take longer.
_FEWEST_ROWS = (1, 2, 4)
# What is timed has to come from memory, as weights do.
_TIMED_SHAPE, _TIMED_MATRICES = (1536, 512), 16
# Layers of one parent that read the same input: as one matrix they take less than one by one.
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class PackedLinear(nn.Module):
    """A linear layer that holds only the packed form of its weights."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, fewest_rows: Sequence[int] = ()) -> None:
        """Take weight [out_features, in_features] and bias [out_features].

        `fewest_rows`: how few rows may go in as they are, if their bits turn out to be the same.
        """
        super().__init__()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
        self._bias = bias
        self._linear = torch.ops.mkldnn._linear_pointwise.default
        in_features = weight.shape[1]
        self._min_rows = next((rows for rows in fewest_rows if self._adds_alike(rows, in_features)), _ROWS)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Map [..., positions, in_features] to [..., positions, out_features]."""
        *outer, num_rows, _ = states.shape
        if num_rows >= self._min_rows or num_rows == 0:
            return self._map(states)
        copies = states[..., :1, :].expand(*outer, self._min_rows - num_rows, -1)
        return self._map(torch.cat((states, copies), dim=-2))[..., :num_rows, :]

    def _map(self, states: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self._linear(states, self._weight, self._bias, "none", [], "")
        return output

    def _adds_alike(self, num_rows: int, in_features: int) -> bool:
        """Whether so few rows give the bits that they give among others: for some shapes they have another kernel."""
        rows = torch.randn(1, _ROWS, in_features, generator=torch.Generator().manual_seed(0))
        return torch.equal(self._map(rows)[:, :num_rows], self._map(rows[:, :num_rows]))


class _Together:
    """Layers of the same input as one: the first that is asked computes for all."""

    def __init__(self, layer: PackedLinear, sizes: Sequence[int]) -> None:
        self._layer = layer
        self._sizes = tuple(sizes)
        self._states: torch.Tensor | None = None
        self._outputs: list[torch.Tensor | None] = []

    def part(self, states: torch.Tensor, index: int) -> torch.Tensor:
        """Output number `index` for an input; each is handed out once, and nothing is kept after the last."""
        if states is not self._states or self._outputs[index] is None:
            self._states, self._outputs = states, list(self._layer(states).split(self._sizes, dim=-1))
        output, self._outputs[index] = self._outputs[index], None
        if not any(output is not None for output in self._outputs):
            self._states = None
        assert output is not None
        return output


class _Part(nn.Module):
    """One of several layers that are computed together."""

    def __init__(self, together: _Together, index: int) -> None:
        super().__init__()
        self._together = together
        self._index = index

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Map [..., positions, in_features] to [..., positions, out_features]."""
        return self._together.part(states, self._index)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packing is possible here: float32, an x86 CPU, a torch built with oneDNN and these two operators."""
    return (
        device.type == "cpu"
        and dtype == torch.float32
        and platform.machine().lower() in {"x86_64", "amd64"}
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def detach_from_checkpoint(model: nn.Module, folder: Path) -> None:
    """Let go of the loaded checkpoint file, of which a packed model needs only embedding and norms.

    Weights as loaded are windows into a memory map of the whole file, and all of it stays resident while one of them
    lives. An embedding gets a new map of its own, of which only the rows in use become resident; the rest is copied.
    """
    embeddings = {name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    for name, parameter in model.named_parameters():
        stored = _stored_tensor(folder, name) if name.rpartition(".")[0] in embeddings else None
        same = stored is not None and stored.shape == parameter.shape and stored.dtype == parameter.dtype
        parameter.data = stored if same and stored is not None else parameter.data.clone()


def _stored_tensor(folder: Path, name: str) -> torch.Tensor | None:
    """A weight of a checkpoint in one safetensors file, mapped anew; None where it is stored in another way."""
    path = folder / "model.safetensors"
    if not path.is_file():
        return None
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name) if name in file.keys() else None  # noqa: SIM118 - not a dict


@torch.inference_mode()
def pack_linears(model: nn.Module) -> None:
    """Replace the linear layers of a model in place, one after another, so that only one is ever held twice.

    The output layer stays double where it shares its matrix with the embedding, which needs the rows as they are.
    """
    fewest_rows = _FEWEST_ROWS if _few_rows_are_faster() else ()
    for parent in list(model.modules()):
        for names in _SIBLINGS:
            layers = [getattr(parent, name, None) for name in names]
            if _can_go_together(layers):
                _pack_together(parent, names, fewest_rows)
        for name, layer in list(parent.named_children()):
            if type(layer) in (nn.Linear, Conv1D):
                setattr(parent, name, PackedLinear(*_weight_and_bias(layer), fewest_rows))


def _few_rows_are_faster() -> bool:
    """Whether this processor takes less time for two rows than for as many as the layout was chosen for."""
    layers = [PackedLinear(torch.ones(_TIMED_SHAPE), None) for _ in range(_TIMED_MATRICES)]
    few, many = (torch.ones(1, rows, _TIMED_SHAPE[1]) for rows in (2, _ROWS))

    def seconds(states: torch.Tensor) -> float:
        started = time.perf_counter()
        for layer in layers:
            layer._map(states)
        return time.perf_counter() - started

    times = [(seconds(few), seconds(many)) for _ in range(6)][1:]
    return statistics.median(few for few, _ in times) < statistics.median(many for _, many in times)


def _weight_and_bias(layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Copies that let go of the checkpoint, as [out_features, in_features] and [out_features]."""
    weight, bias = layer.weight.detach(), layer.bias  # type: ignore[operator]
    # Conv1D, GPT-2's linear layer, keeps its weight as [in_features, out_features].
    weight = weight.t().contiguous() if isinstance(layer, Conv1D) else weight
    return weight, None if bias is None else bias.detach().clone()  # type: ignore[operator]


def _can_go_together(layers: Sequence[nn.Module | None]) -> bool:
    linears = [layer for layer in layers if type(layer) is nn.Linear]
    kinds = {(layer.in_features, layer.bias is None) for layer in linears}
    return len(linears) == len(layers) and len(kinds) == 1


def _pack_together(parent: nn.Module, names: Sequence[str], fewest_rows: Sequence[int]) -> None:
    parts = [_weight_and_bias(getattr(parent, name)) for name in names]
    weights, biases = [weight for weight, _ in parts], [bias for _, bias in parts if bias is not None]
    layer = PackedLinear(torch.cat(weights), torch.cat(biases) if biases else None, fewest_rows)
    together = _Together(layer, [len(weight) for weight in weights])
    for index, name in enumerate(names):
        setattr(parent, name, _Part(together, index))
