"""Writes a pair of random models with the shapes of GPT-2 and DistilGPT-2: what a pass costs depends on shapes alone.

    python -m tests.gpt2_pair DIRECTORY [medium]

makes DIRECTORY/target and DIRECTORY/draft; with `medium`, GPT-2 Medium and GPT-2. The tokenizer is that of `tiny`; the
vocabulary is padded to GPT-2's with rows of zeros, which never win.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GPT2Config

from rakvctl.core.backends.torch_loader import load_codec
from rakvctl.core.models import find_model

# Layers, width, heads.
SHAPES = {"distilgpt2": (6, 768, 12), "gpt2": (12, 768, 12), "gpt2-medium": (24, 1024, 16)}


def write(directory: Path, shape: str) -> None:
    """Write one model, its weights drawn from a fixed seed."""
    layers, width, heads = SHAPES[shape]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(GPT2Config(n_layer=layers, n_embd=width, n_head=heads))
    codec = load_codec(find_model("tiny", "target", print))
    with torch.no_grad():
        model.get_output_embeddings().weight[codec.vocab_size :] = 0.0
    model.save_pretrained(directory)
    codec.tokenizer.save_pretrained(directory)


def main() -> None:
    """Write both models."""
    directory = Path(sys.argv[1])
    target, draft = ("gpt2-medium", "gpt2") if sys.argv[2:] == ["medium"] else ("gpt2", "distilgpt2")
    write(directory / "target", target)
    write(directory / "draft", draft)


if __name__ == "__main__":
    main()
