"""Incremental detokenization: the text of tokens as they come, as if prompt and completion were decoded together."""

from collections.abc import Callable, Sequence

# What an incomplete UTF-8 sequence decodes to.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# An incomplete character has at most this many bytes, so at most this many tokens.
_MAX_INCOMPLETE_TOKENS = 3
_MAX_CONTEXT_TOKENS = 32

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Text out of tokens, piece by piece: each piece is final, and their sum is the text after `context`.

    Knows nothing of the tokenizer but `decode`, which leaves special tokens out. Each step decodes a few tokens only:
    those that are not text yet, behind the last ones that are (`_before`), because what a token decodes to depends on
    whether it is the first one and on its neighbours.
    """

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        """`context`: token ids of the text that goes on; empty where a new text begins."""
        self._decode = decode
        self._pending: list[int] = []
        self._pending_text = ""
        self._num_handed_out = 0  # characters of the pending text
        self._set_before(_tail(decode, context))

    def push(self, token_id: int) -> str:
        """The text that is final with this token; empty while a character is incomplete."""
        tokens = [*self._pending, token_id]
        text = self._text_of(tokens)
        if text == self._pending_text and not _is_visible(self._decode, [token_id]):
            return ""
        self._pending, self._pending_text = tokens, text
        start = next((start for start in range(len(tokens)) if self._is_complete_from(start)), None)
        if start is not None:
            return self._take(start)
        return self._shorten() if len(tokens) > _MAX_INCOMPLETE_TOKENS else ""

    def flush(self) -> str:
        """The text of what is left: an incomplete character at the very end is U+FFFD, as the tokenizer decodes it."""
        text = self._pending_text[self._num_handed_out :]
        self._forget()
        return text

    def _take(self, start: int) -> str:
        """All that is pending, as the text up to token `start` and the text from there on, which is complete."""
        text, tail = self._pending_text, self._pending[start:]
        if start > 0:
            text = self._text_of(self._pending[:start])
            if not self._before:  # the tail is not first: it keeps its space
                self._set_before(tail)
            text += self._text_of(tail)
        text = text[self._num_handed_out :]
        self._forget()
        self._set_before(tail)
        return text

    def _forget(self) -> None:
        self._pending, self._pending_text, self._num_handed_out = [], "", 0

    def _shorten(self) -> str:
        """The text that is final, of which the tokens are pending no longer where an incomplete character has none."""
        tokens, text = self._pending, self._pending_text
        first = len(tokens) - _MAX_INCOMPLETE_TOKENS
        for cut in range(first, len(tokens)):
            head, tail = self._text_of(tokens[:cut]), self._text_of(tokens[cut:])
            # A cut through a character or through its bytes would add U+FFFD to the text.
            if (head + tail).count(REPLACEMENT) == text.count(REPLACEMENT):
                if head + tail != text:  # the tail's first space depends on the head
                    self._set_before(tokens[:cut])
                num_final = len(head)
                break
        else:
            # Tokens of bytes that begin in one character and end in the next: only the last one is incomplete.
            cut, num_final = first, len(text) - 1
        handed_out, self._pending = self._num_handed_out, tokens[cut:]
        self._pending_text = self._text_of(self._pending)
        num_left = len(text) - max(handed_out, num_final)
        self._num_handed_out = len(self._pending_text) - num_left
        return text[handed_out:num_final]

    def _is_complete_from(self, start: int) -> bool:
        """Whether what is pending ends with a whole character, decoded from token `start` on."""
        head, tail = self._pending[:start], self._pending[start:]
        # Byte tokens decode to nothing but U+FFFD where one of them is wrong, though a character may stand behind it.
        if head and self._text_of(head) + REPLACEMENT * len(tail) != self._pending_text:
            return False
        text = self._text_of(tail)
        # Invalid byte tokens are one U+FFFD each: fewer with one more token are the bytes of U+FFFD itself.
        return not text.endswith(REPLACEMENT) or len(text) < len(self._text_of(tail[:-1]))

    def _text_of(self, tokens: Sequence[int]) -> str:
        """What tokens add to the text."""
        if not tokens:
            return ""
        text = self._decode([*self._before, *tokens])
        if text.startswith(self._before_text):
            return text[len(self._before_text) :]
        # An invalid byte token changed how the valid ones before it decode; those are text already.
        return self._decode(tokens)

    def _set_before(self, tokens: Sequence[int]) -> None:
        self._before = list(tokens)
        self._before_text = self._decode(tokens) if tokens else ""


def _tail(decode: Decode, context: Sequence[int]) -> Sequence[int]:
    """A short end of the context that begins with a whole character and is not only special tokens, if there is one."""
    length = 1
    while length <= min(len(context), _MAX_CONTEXT_TOKENS):
        tail = context[-length:]
        if _is_visible(decode, tail) and not decode(tail).startswith(REPLACEMENT):
            return tail
        length += 1
    tail = context[-_MAX_CONTEXT_TOKENS:]
    return tail if _is_visible(decode, tail) else ()


def _is_visible(decode: Decode, tokens: Sequence[int]) -> bool:
    """Whether tokens have text; twice, as the first token's space may be dropped."""
    return bool(tokens) and decode([*tokens, *tokens]) != ""
