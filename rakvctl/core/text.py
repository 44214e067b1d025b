"""Between text and tokens: encoding prompts and chats, and turning emitted tokens back into text as they come."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rakvctl.core.detokenizer import Detokenizer
from rakvctl.core.errors import RequestError

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class TextCodec:
    """A Hugging Face tokenizer as the rest of the core sees it. `end_token_ids` end a sequence."""

    tokenizer: Any
    end_token_ids: frozenset[int]

    @property
    def has_chat_template(self) -> bool:
        """Whether the model was trained on chats of a known form."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id; a model may have more rows than that, as padding."""
        return max(self.token_map().values()) + 1

    def token_map(self) -> dict[str, int]:
        """Every token and its id, added ones included."""
        vocab: dict[str, int] = self.tokenizer.get_vocab()
        return vocab

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of plain text, with the special tokens that the model expects around it.

        One that the text begins with, as `<s>` written out, is not added again.
        """
        token_ids = self._tokenize(text, add_special_tokens=True)
        if token_ids[:1] == token_ids[1:2]:
            plain = self._tokenize(text, add_special_tokens=False)
            if len(plain) < len(token_ids) and token_ids[1 : 1 + len(plain)] == plain:
                return token_ids[1:]
        return token_ids

    def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of a chat, up to where the assistant's answer begins.

        Raises RequestError where the model has no chat template or its template refuses these messages.
        """
        if not self.has_chat_template:
            raise RequestError("the model has no chat template", "give a plain `prompt`, or --raw, or a chat model")
        try:
            text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program of the model's makers, and may fail in any way
            raise RequestError(f"the chat template refuses these messages: {error}", "check roles and order") from error
        return self._tokenize(text, add_special_tokens=False)

    def is_chat(self, asked: bool | None) -> bool:
        """Whether a text goes through the chat template: as asked for, else where the model has one."""
        return self.has_chat_template if asked is None else asked

    def encode_prompt(self, text: str, chat: bool | None = None) -> tuple[int, ...]:
        """Tokens of a user's text, through the chat template or not; None: where the model has one."""
        if not self.is_chat(chat):
            return self.encode(text)
        if not text:
            raise RequestError("the prompt is empty", "give at least one token of text")
        return self.encode_chat(({"role": "user", "content": text},))

    def _tokenize(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError("the prompt is not valid UTF-8", "give it as Unicode text") from error
        # Not verbose: a warning of the tokenizer about long prompts would go to the terminal.
        token_ids = self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False).input_ids
        if not token_ids:
            raise RequestError("the prompt is empty", "give at least one token of text")
        return tuple(token_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


class TextStream:
    """The text of one completion as it grows, token by token; ends at an end token or a stop string.

    Text is handed to `on_text` as soon as it is final: not while a character is incomplete, nor while the text could
    still turn out to be the beginning of a stop string. The stop string itself is never part of the text.
    """

    def __init__(
        self, codec: TextCodec, stop: Sequence[str], on_text: Callable[[str], None], *, context: Sequence[int] = ()
    ) -> None:
        """`context`: token ids of the text that the completion continues; none where it is a text of its own."""
        self.text = ""
        self.stopped = False
        self._cut = False
        self._end_token_ids = codec.end_token_ids
        self._stop = tuple(stop)
        self._on_text = on_text
        self._detokenizer = Detokenizer(codec.decode, context)
        self._num_handed_out = 0

    def push(self, token_id: int) -> bool:
        """Take the next emitted token; say whether the text ends with it."""
        if token_id in self._end_token_ids:
            self.stopped = True
            return True
        self._extend(self._detokenizer.push(token_id))
        return self.stopped

    def close(self) -> str:
        """Hand out what was held back, an incomplete character included; return the whole text."""
        if not self._cut:
            self._extend(self._detokenizer.flush())
        self._hand_out(len(self.text))
        return self.text

    def _extend(self, piece: str) -> None:
        """Append a piece, and look for stop strings that end in it."""
        searched = len(self.text)
        self.text += piece
        ends = [self.text.find(stop, max(0, searched - len(stop) + 1)) for stop in self._stop]
        found = [end for end in ends if end >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = self._cut = True
        self._hand_out(len(self.text) - self._num_undecided())

    def _num_undecided(self) -> int:
        """Length of the longest end of the text that begins some stop string."""
        if self.stopped or not self._stop:
            return 0
        longest = min(len(self.text), max(map(len, self._stop)) - 1)
        tails = (self.text[-length:] for length in range(longest, 0, -1))
        return next((len(tail) for tail in tails if any(stop.startswith(tail) for stop in self._stop)), 0)

    def _hand_out(self, end: int) -> None:
        if end > self._num_handed_out:
            self._on_text(self.text[self._num_handed_out : end])
            self._num_handed_out = end
