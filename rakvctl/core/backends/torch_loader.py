"""Finding and loading Hugging Face checkpoints and their tokenizers, for the torch backend."""

import json

from transformers import AutoTokenizer

from rakvctl.core.backends import torch_load
from rakvctl.core.backends.torch_hf import TorchBackend
from rakvctl.core.errors import ModelError
from rakvctl.core.models import ModelFiles, Notify, Role, find_model
from rakvctl.core.text import TextCodec


class TorchLoader:
    """Loads checkpoints onto one device, in one dtype."""

    # Kinds of attention.
    ways = ("auto", "eager")

    def __init__(self, device: str, dtype: str, num_threads: int | None) -> None:
        """As on the command line."""
        self._device = device
        self._dtype = dtype
        torch_load.set_num_threads(num_threads)

    def find(self, name: str, role: Role, notify: Notify) -> ModelFiles:
        """The checkpoint of that name, downloaded or converted if need be."""
        return find_model(name, role, notify)

    def load_codec(self, files: ModelFiles) -> TextCodec:
        """The tokenizer, and the tokens that end a sequence."""
        return load_codec(files)

    def load(self, files: ModelFiles, vocab_size: int, way: str = "auto", content_digest: str = "") -> TorchBackend:
        """The model."""
        return torch_load.load_backend(files, self._device, self._dtype, vocab_size, way, content_digest)


def load_codec(files: ModelFiles) -> TextCodec:
    """Load a checkpoint's tokenizer and the tokens that end its sequences. Raises ModelError where it has none."""
    try:
        with torch_load.quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(files.location, local_files_only=True, trust_remote_code=False)
        # Without any file some classes of transformers make up a tokenizer that knows next to nothing.
        if not any((files.location / name).is_file() for name in tokenizer.vocab_files_names.values()):
            raise FileNotFoundError("no vocabulary")
        return TextCodec(tokenizer, _end_token_ids(files, tokenizer.eos_token_id))
    except Exception as error:  # whatever transformers stumbles over in files that are not as they should be
        raise ModelError(
            f"cannot load the tokenizer of {files.name}", "the model needs its tokenizer and config files, undamaged"
        ) from error


def _end_token_ids(files: ModelFiles, tokenizer_end: int | None) -> frozenset[int]:
    """End tokens from the generation config, else from the model's config, else the tokenizer's."""
    for name in ("generation_config.json", "config.json"):
        path = files.location / name
        ends = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        if ends is not None:
            return frozenset(ends if isinstance(ends, list) else [ends])
    return frozenset() if tokenizer_end is None else frozenset([tokenizer_end])
