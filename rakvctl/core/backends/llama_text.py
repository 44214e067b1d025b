"""The tokenizer and the chat template inside a GGUF file, by llama.cpp, under the names of transformers' tokenizers."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llama_cpp import llama_cpp as api
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from rakvctl.core.backends.llama_model import LlamaModel
from rakvctl.core.text import Message, TextCodec


@dataclass(frozen=True, slots=True)
class _Encoded:
    input_ids: list[int]


class GgufTokenizer:
    """What `TextCodec` needs of a tokenizer."""

    def __init__(self, model: LlamaModel) -> None:
        self._model = model  # keeps the vocabulary alive
        self._vocab = model.vocab
        self.chat_template = model.chat_template

    def get_vocab(self) -> dict[str, int]:
        """Every token and its id, but for those that only pad the vocabulary."""
        return {
            self._text(token): token
            for token in range(self._model.vocab_size)
            if not api.llama_vocab_get_attr(self._vocab, token) & api.LLAMA_TOKEN_ATTR_UNUSED
        }

    def end_token_ids(self) -> frozenset[int]:
        """The tokens that end a text or a turn."""
        return frozenset(token for token in range(self._model.vocab_size) if api.llama_vocab_is_eog(self._vocab, token))

    def __call__(self, text: str, add_special_tokens: bool, verbose: bool) -> _Encoded:
        """The tokens of a text; special ones that are written out in it are such."""
        content = text.encode("utf-8")
        room = len(content) + 8  # no token is shorter than a byte, but for those that are added
        tokens = (api.llama_token * room)()
        count = api.llama_tokenize(self._vocab, content, len(content), tokens, room, add_special_tokens, True)
        if count < 0:
            tokens = (api.llama_token * -count)()
            count = api.llama_tokenize(self._vocab, content, len(content), tokens, -count, add_special_tokens, True)
        return _Encoded(list(tokens[:count]))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        """The text of tokens; bytes that are no character become one that says so."""
        tokens = (api.llama_token * len(token_ids))(*token_ids)
        room = 16 * len(token_ids) + 16
        while True:
            text = ctypes.create_string_buffer(room)
            count = api.llama_detokenize(
                self._vocab, tokens, len(token_ids), text, room, False, not skip_special_tokens
            )
            if count >= 0:
                return text.raw[:count].decode("utf-8", "replace")
            room = -count

    def apply_chat_template(self, messages: Sequence[Message], tokenize: bool, add_generation_prompt: bool) -> str:
        """A chat as the text that the model knows."""
        template = Jinja2ChatFormatter(
            self.chat_template or "",
            eos_token=self._text(api.llama_vocab_eos(self._vocab)),
            bos_token=self._text(api.llama_vocab_bos(self._vocab)),
            add_generation_prompt=add_generation_prompt,
        )
        typed: Any = list(messages)
        return str(template(messages=typed).prompt)

    def _text(self, token: int) -> str:
        """A token as the file writes it; nothing where the model has no such token."""
        return api.llama_vocab_get_text(self._vocab, token).decode("utf-8", "replace") if token >= 0 else ""


def load_codec(model: LlamaModel) -> TextCodec:
    """The file's own tokenizer."""
    tokenizer = GgufTokenizer(model)
    return TextCodec(tokenizer, tokenizer.end_token_ids())
