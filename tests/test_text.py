"""Text out of tokens as they come: nothing lost, nothing early, stop strings wherever they end."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from rakvctl.core.errors import RequestError
from rakvctl.core.text import TextCodec, TextStream
from tests.fakes import LetterTokenizer

END = 0


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    """Byte-level BPE with hardly a merge: most characters beyond ASCII take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=270, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat"], trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", clean_up_tokenization_spaces=False)
    return TextCodec(wrapped, frozenset([END]))


def stream(codec: TextCodec, token_ids: list[int], stop: tuple[str, ...] = ()) -> tuple[TextStream, list[str], int]:
    """Push tokens until the stream says it ends; the stream, the pieces, how many tokens it took."""
    pieces: list[str] = []
    text = TextStream(codec, stop, pieces.append)
    taken = next((count for count, token_id in enumerate(token_ids, start=1) if text.push(token_id)), len(token_ids))
    text.close()
    return text, pieces, taken


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30))
def test_pieces_add_up_to_the_text_for_any_text(codec: TextCodec, text: str) -> None:
    if text:
        streamed, pieces, _ = stream(codec, list(codec.encode(text)))
        assert "".join(pieces) == streamed.text == text


@settings(max_examples=200, deadline=None)
@given(token_ids=st.lists(st.integers(1, 269), max_size=30))
def test_pieces_add_up_to_the_decoded_text_for_any_tokens(codec: TextCodec, token_ids: list[int]) -> None:
    """Broken UTF-8 too: what never becomes a character comes out as the tokenizer decodes it."""
    streamed, pieces, _ = stream(codec, token_ids)
    assert "".join(pieces) == streamed.text
    assert streamed.text.replace("\N{REPLACEMENT CHARACTER}", "") == codec.decode(token_ids).replace(
        "\N{REPLACEMENT CHARACTER}", ""
    )


def test_a_character_is_handed_out_only_when_it_is_complete(codec: TextCodec) -> None:
    _, pieces, _ = stream(codec, list(codec.encode("a😀b")))
    assert pieces == ["a", "😀", "b"]


def test_an_incomplete_character_at_the_end_is_not_lost(codec: TextCodec) -> None:
    half = list(codec.encode("a😀"))[:-1]
    assert stream(codec, half)[0].text == codec.decode(half)
    assert stream(codec, [*half, END])[0].text == codec.decode(half)


def test_an_end_token_ends_the_text_and_is_no_part_of_it(codec: TextCodec) -> None:
    ids = list(codec.encode("cat"))
    streamed, _, taken = stream(codec, [*ids, END, *ids])
    assert streamed.text == "cat"
    assert streamed.stopped
    assert taken == len(ids) + 1


LETTERS = TextCodec(LetterTokenizer(), frozenset())  # type: ignore[arg-type]


@settings(max_examples=300)
@given(
    text=st.text(alphabet="ab", max_size=20),
    stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3).map(tuple),
)
def test_the_text_is_cut_before_the_first_stop_string_to_be_completed(text: str, stop: tuple[str, ...]) -> None:
    streamed, pieces, taken = stream(LETTERS, list(LETTERS.encode(text)) if text else [], stop)
    ends = [length for length in range(1, len(text) + 1) if any(text[:length].endswith(word) for word in stop)]
    if not ends:
        assert (streamed.text, streamed.stopped) == (text, False)
    else:
        begin = min(text.find(word) for word in stop if word in text[: ends[0]])
        assert (streamed.text, streamed.stopped, taken) == (text[:begin], True, ends[0])
    assert "".join(pieces) == streamed.text


def test_text_that_may_become_a_stop_string_waits() -> None:
    pieces: list[str] = []
    text = TextStream(LETTERS, ("abc",), pieces.append)
    for letter in "xab":
        text.push(LETTERS.encode(letter)[0])
    assert "".join(pieces) == "x"
    text.push(LETTERS.encode("d")[0])
    assert "".join(pieces) == "xabd"


def test_a_stop_string_may_begin_in_one_token_and_end_in_another(codec: TextCodec) -> None:
    ids = list(codec.encode("the cat sat on"))
    assert stream(codec, ids, ("t sa",))[0].text == "the ca"


def test_an_empty_prompt_and_a_chat_without_template_are_errors_of_one_prompt(codec: TextCodec) -> None:
    with pytest.raises(RequestError, match="empty"):
        codec.encode("")
    with pytest.raises(RequestError, match="chat template"):
        codec.encode_chat([{"role": "user", "content": "hi"}])


def test_text_that_is_no_unicode_is_an_error_of_one_prompt(codec: TextCodec) -> None:
    with pytest.raises(RequestError, match="UTF-8"):
        codec.encode("\udce9")


BOS_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"


def bos_codec(template: str | None = None) -> TextCodec:
    """As Llama's: the begin token stands before every text, and `<end>` behind."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "<end>": 2, "the": 3, "cat": 4}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "<end>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <end>", special_tokens=[("<s>", 1), ("<end>", 2)]
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<end>")
    wrapped.chat_template = template
    return TextCodec(wrapped, frozenset([2]))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the cat", (1, 3, 4, 2)),
        ("<s>the cat", (1, 3, 4, 2)),
        ("<s> the cat", (1, 3, 4, 2)),
        ("<s>", (1, 2)),
        ("<s><s>the", (1, 1, 3, 2)),
        ("the <s> cat", (1, 3, 1, 4, 2)),
        ("the the", (1, 3, 3, 2)),
    ],
)
def test_a_text_that_begins_with_the_begin_token_gets_no_second_one(text: str, expected: tuple[int, ...]) -> None:
    assert bos_codec().encode(text) == expected


def test_a_chat_has_the_special_tokens_of_its_template_only() -> None:
    codec = bos_codec(BOS_TEMPLATE)
    assert codec.encode_prompt("the cat") == (1, 3, 4)
    assert codec.encode_prompt("the cat", chat=False) == (1, 3, 4, 2)


def test_a_text_of_equal_tokens_loses_none_where_no_begin_token_is_added(codec: TextCodec) -> None:
    assert codec.decode(codec.encode("!!!!")) == "!!!!"
