"""Text of tokens as they come: the same as decoding prompt and completion at once, and each piece is final."""

import codecs
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rakvctl.core.text import TextCodec, TextStream
from rakvctl.core.types import Request, SamplingParams
from rakvctl.fleet.events import Task
from tests.fakes import FakeRuntime
from tests.profiles import toy_profile
from tests.serving import Pair
from tests.tokenizers_by_kind import BEGIN, KINDS, SPECIAL, codec_of, ids

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
EURO = ("<0xE2>", "<0x82>", "<0xAC>")
SPACED = "\u2581"


def stream(
    codec: TextCodec, token_ids: Sequence[int], context: Sequence[int] = (), stop: tuple[str, ...] = ()
) -> tuple[str, list[str]]:
    """The whole text, and what each token and then the end handed out."""
    pieces: list[str] = []
    text = TextStream(codec, stop, pieces.append, context=context)
    steps = []
    for token_id in token_ids:
        ended = text.push(token_id)
        steps.append("".join(pieces))
        pieces.clear()
        if ended:
            break
    whole = text.close()
    steps.append("".join(pieces))
    assert "".join(steps) == whole, "what was handed out is not the text"
    return whole, steps


def at_once(codec: TextCodec, token_ids: Sequence[int], context: Sequence[int]) -> str:
    """Decode context and tokens together; the part after the context."""
    before = codec.decode(context) if context else ""
    whole = codec.decode([*context, *token_ids])
    assert whole.startswith(before)
    return whole[len(before) :]


def sentencepiece_text(kind: str, token_ids: Sequence[int], context: Sequence[int]) -> str:
    """As SentencePiece itself decodes: an invalid byte spoils no valid one beside it."""
    names = {number: token for token, number in codec_of(kind).token_map().items()}
    special = set(ids(kind, "<s>", "</s>", SPECIAL, "<unk>")) - set(ids(kind, "<unk>"))

    def text(numbers: Sequence[int]) -> str:
        raw = b""
        for token in (names[number] for number in numbers if number not in special):
            is_byte = token.startswith("<0x")
            raw += bytes([int(token[3:5], 16)]) if is_byte else token.replace(SPACED, " ").encode()
        decoded = raw.decode("utf-8", "replace")
        return decoded.removeprefix(" ") if kind == "sentencepiece" else decoded

    return text([*context, *token_ids])[len(text(context)) :]


def complete(text: str) -> str:
    return text.replace(REPLACEMENT, "")


def contexts(kind: str) -> st.SearchStrategy[list[int]]:
    """Ends of prompts: a word, a word before special tokens, nothing."""
    word = {"word-ends": "dog</w>"}.get(kind, "dog")
    return st.sampled_from([[], ids(kind, word), ids(kind, BEGIN, word), ids(kind, word, SPECIAL, SPECIAL)])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_add_up_to_what_prompt_and_tokens_decode_to_at_once(kind: str, data: st.DataObject) -> None:
    """Any tokens: words, special ones, halves of characters, U+FFFD itself."""
    codec = codec_of(kind)
    token_ids = data.draw(st.lists(st.integers(1, codec.vocab_size - 1), max_size=12))
    context = data.draw(contexts(kind))
    whole, _ = stream(codec, token_ids, context)
    if kind in ("sentencepiece", "gemma"):
        assert complete(whole) == complete(sentencepiece_text(kind, token_ids, context))
    elif kind == "byte-level":
        assert complete(whole) == complete(at_once(codec, token_ids, context))
    else:
        assert whole == at_once(codec, token_ids, context)


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "gemma"])
@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet="a é€😀\ufffd\n", min_size=1, max_size=8), data=st.data())
def test_a_text_in_bytes_cut_anywhere_keeps_its_complete_characters(kind: str, text: str, data: st.DataObject) -> None:
    """Whatever is handed out before the end is a beginning of the text: U+FFFD stands where one was, and at a cut."""
    codec = codec_of(kind)
    context = ids(kind, "dog")
    raw = text.encode()
    names = [f"<0x{byte:02X}>" for byte in raw]
    token_ids = ids(kind, *names) if kind != "byte-level" else list(codec.encode(text))
    cut = data.draw(st.integers(0, len(token_ids)))
    whole, steps = stream(codec, token_ids[:cut], context)
    decoder = codecs.getincrementaldecoder("utf-8")()
    expected = decoder.decode(raw[:cut])
    incomplete = decoder.getstate()[0]
    assert text.startswith("".join(steps[:-1]))
    assert whole.startswith(expected)
    assert set(whole[len(expected) :]) == ({REPLACEMENT} if incomplete else set())


@pytest.mark.parametrize("kind", KINDS)
def test_a_special_token_between_words_costs_no_space(kind: str) -> None:
    first, second = {
        "byte-level": ("dog", "\u0120the"),
        "word-piece": ("dog", "the"),
        "word-ends": ("dog</w>", "the</w>"),
    }.get(kind, (f"{SPACED}dog", f"{SPACED}the"))
    token_ids = ids(kind, first, SPECIAL, BEGIN, second)
    assert stream(codec_of(kind), token_ids)[0].strip() == "dog the"
    assert stream(codec_of(kind), token_ids, ids(kind, "s"))[0].endswith("dog the")


@pytest.mark.parametrize("kind", ["sentencepiece", "gemma", "unigram"])
def test_the_space_between_prompt_and_completion_belongs_to_the_completion(kind: str) -> None:
    context = ids(kind, BEGIN, f"{SPACED}the", f"{SPACED}quick")
    assert stream(codec_of(kind), ids(kind, f"{SPACED}dog", "s"), context) == (" dogs", [" dog", "s", ""])


@pytest.mark.parametrize("kind", ["sentencepiece", "unigram"])
def test_a_text_of_its_own_begins_without_the_space_that_marks_a_word(kind: str) -> None:
    token_ids = ids(kind, f"{SPACED}dog", f"{SPACED}the")
    assert stream(codec_of(kind), token_ids)[0] == "dog the"
    assert stream(codec_of(kind), token_ids, ids(kind, BEGIN))[0] == "dog the"


def test_parts_of_words_go_on_without_their_mark() -> None:
    whole, steps = stream(
        codec_of("word-piece"), ids("word-piece", "##ing", "the", "##s", "."), ids("word-piece", "dog")
    )
    assert (whole, steps) == ("ing thes.", ["ing", " the", "s", ".", ""])


@pytest.mark.parametrize("kind", ["sentencepiece", "gemma"])
def test_a_character_in_bytes_waits_for_its_last_byte(kind: str) -> None:
    _, steps = stream(codec_of(kind), ids(kind, "dog", *EURO, "s"), ids(kind, "the"))
    assert steps == ["dog", "", "", "\u20ac", "s", ""]


@pytest.mark.parametrize("kind", ["sentencepiece", "gemma"])
@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ((*EURO, "<0xE2>", "s"), "\u20ac?s"),
        ((*EURO, "<0xE2>", *EURO), "\u20ac?\u20ac"),
        (("<0xE2>", "<0x41>"), "?A"),
        (("<0x0A>", "<0xE2>", "s"), "\n?s"),
        ((*EURO, "<0xE2>", "<0x82>"), "\u20ac??"),
    ],
)
def test_an_invalid_byte_changes_no_character_before_or_after_it(
    kind: str, tokens: tuple[str, ...], expected: str
) -> None:
    """The tokenizer decodes a run of byte tokens to nothing but U+FFFD where one of them is wrong."""
    whole, _ = stream(codec_of(kind), ids(kind, *tokens), ids(kind, "the"))
    assert whole == expected.replace("?", REPLACEMENT)


@pytest.mark.parametrize("kind", ["sentencepiece", "gemma", "byte-level"])
def test_a_stop_inside_a_character_leaves_nothing_of_it(kind: str) -> None:
    tokens = [*("d", "o"), *EURO] if kind != "byte-level" else []
    token_ids = ids(kind, *tokens) if tokens else list(codec_of(kind).encode("do\u20ac"))
    assert stream(codec_of(kind), token_ids, ids(kind, "dog"), ("o\u20ac",))[0] == "d"


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_decodes_a_few_tokens_whatever_was_pushed_before(kind: str) -> None:
    """Special tokens without end, half a character again and again, U+FFFD itself, and a long prompt."""
    codec = codec_of(kind)
    decoded: list[int] = []

    class Counting(TextCodec):
        def decode(self, token_ids: Sequence[int]) -> str:
            decoded.append(len(token_ids))
            return TextCodec.decode(self, token_ids)

    half = {"byte-level": "\u00f0", "sentencepiece": "<0xE2>", "gemma": "<0xE2>"}.get(kind, REPLACEMENT)
    for repeated in (SPECIAL, half):
        for context in ([], ids(kind, "s") * 500, ids(kind, SPECIAL) * 500):
            decoded.clear()
            stream(Counting(codec.tokenizer, frozenset()), ids(kind, repeated) * 200, context)
            # What finding the end of the context takes is once for a completion.
            assert sum(decoded) < 200 * 60 + 4000
            assert max(decoded[-200:]) <= 72


class TwoWords:
    """A SentencePiece tokenizer's codec, of whose tokens a toy model knows 32."""

    def __init__(self) -> None:
        words = ids("sentencepiece", *(f"{SPACED}{word}" for word in ("the", "dog", "quick", "ing", "s")))
        self._ids = [words[number % len(words)] for number in range(32)]

    def get_vocab(self) -> dict[str, int]:
        return {f"token {number}": number for number in range(32)}

    def decode(self, token_ids: Sequence[int], **_: object) -> str:
        return codec_of("sentencepiece").decode([self._ids[token_id] for token_id in token_ids])


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_completion_goes_on_behind_its_prompt_and_an_answer_begins_anew(is_chat: bool) -> None:
    codec = TextCodec(TwoWords(), frozenset())
    toys = FakeRuntime()
    runtime = Pair(codec, toys.target, toys.draft).runtime("ar", toys.store, toy_profile())
    request = Request((1, 2, 3), SamplingParams(max_new_tokens=4), is_chat=is_chat)
    pieces: list[str] = []
    completion = runtime.run(request, pieces.append)
    expected = codec.decode(completion.token_ids)
    assert not expected.startswith(" ")
    assert "".join(pieces) == completion.text == (expected if is_chat else f" {expected}")


def test_workers_of_a_fleet_know_an_answer_from_a_continuation() -> None:
    for is_chat in (False, True):
        request = Request((1, 2), SamplingParams(seed=1), is_chat)
        ids_of_task = np.asarray(request.prompt_token_ids, dtype=np.int32)
        assert Task(0, "id", ids_of_task, request.sampling, None, request.is_chat).request == request


def test_tokens_that_end_inside_the_next_character_lose_none() -> None:
    """As byte-level vocabularies have them for Japanese, one behind the other."""
    token_ids = ids("byte-level", "\u00f0\u0141", "\u013a\u0122", *("\u00f0\u0141", "\u013a\u0122") * 3)
    straddling = ids("byte-level", "\u00c2", *("\u00a9\u00f0", "\u0141", "\u013a", "\u0122\u00c2") * 6)
    codec = codec_of("byte-level")
    assert stream(codec, token_ids)[0] == "\U0001f600" * 4
    whole, steps = stream(codec, straddling)
    assert whole == codec.decode(straddling)
    assert len([piece for piece in steps if piece]) > 6
