"""Linear layers with weights packed for oneDNN, for float32 on an x86 CPU.

PyTorch's own float32 path reads a row-major weight matrix through general matrix routines, which for a handful of rows
are several times slower than reading the weights once. Packing reorders each matrix once, at load, into the blocked
layout that oneDNN computes with. Passes of one to nine positions, which is what decoding consists of, gain most.
And its kernels add up a row's products in one order whatever the number of rows, which PyTorch's own path does not: a
token's logits are the same, bit for bit, in a pass of any width. (See `invariant` for the other half of that.)
"""

import platform
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers.pytorch_utils import Conv1D

# The layout is chosen for this many rows. A large matrix has to come from memory anyway, and there fewer rows take as
# long or longer: on SmolLM2, 6 rows take 6 % less than 4. A small one, in the processor's caches, gains from having one
# row only.
_ROWS = 6
_LARGE_WEIGHTS = 2**18


class PackedLinear(nn.Module):
    """A linear layer that holds only the packed form of its weights."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Take weight [out_features, in_features] and bias [out_features]."""
        super().__init__()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
        self._bias = bias
        self._linear = torch.ops.mkldnn._linear_pointwise.default
        is_small = weight.numel() < _LARGE_WEIGHTS
        self._min_rows = 1 if is_small and self._adds_single_rows_alike(weight.shape[1]) else _ROWS

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

    def _adds_single_rows_alike(self, in_features: int) -> bool:
        """Whether a row alone gives the bits that it gives among others: for some shapes it has a kernel of its own."""
        rows = torch.randn(1, _ROWS, in_features, generator=torch.Generator().manual_seed(0))
        return torch.equal(self._map(rows)[:, :1], self._map(rows[:, :1]))


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
    linears = [name for name, module in model.named_modules() if type(module) in (nn.Linear, Conv1D)]
    for name in linears:
        parent = model.get_submodule(name.rpartition(".")[0])
        module = getattr(parent, name.rpartition(".")[2])
        # Conv1D, GPT-2's linear layer, keeps its weight as [in_features, out_features].
        weight = module.weight.detach() if isinstance(module, nn.Linear) else module.weight.detach().t().contiguous()
        bias = None if module.bias is None else module.bias.detach().clone()
        setattr(parent, name.rpartition(".")[2], PackedLinear(weight, bias))
