"""Tiny tokenizers of every kind that language models have: how words, spaces and bytes are written differs in each."""

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rakvctl.core.text import TextCodec

BEGIN, END, SPECIAL = "<s>", "</s>", "<|special|>"
_WORDS = ("the", "dog", "quick", "ing", "s", "e", "t", "h", "d", "o", "g", ".", ",", "\N{REPLACEMENT CHARACTER}")
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))


def _vocab(*tokens: str) -> dict[str, int]:
    unique = dict.fromkeys(("<unk>", BEGIN, END, *tokens))
    return {token: number for number, token in enumerate(unique)}


def _byte_level() -> Tokenizer:
    """As GPT-2 and Llama-3: a token is bytes, perhaps of half a character."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    halves = (
        "\u00f0\u0141",
        "\u013a\u0122",
        "\u00a9\u00f0",
        "\u0122\u00c2",
        "\u0120dog",
        "\u0120the",
        "dog",
        "\u010a\u0120",
    )
    tokenizer = Tokenizer(models.BPE(_vocab(*letters, *halves), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(*, strips: bool) -> Tokenizer:
    """BPE with byte fallback, as Llama-2 and Mistral (`strips` the first space) or as Gemma."""
    spaced = ("\u2581", "\u2581\u2581", *(f"\u2581{word}" for word in _WORDS))
    tokenizer = Tokenizer(models.BPE(_vocab(*_BYTES, *spaced, *_WORDS), [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strips:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _unigram() -> Tokenizer:
    """As T5 and XGLM."""
    vocab = _vocab("\u2581", "\u2581\u2581", *(f"\u2581{word}" for word in _WORDS), *_WORDS)
    tokenizer = Tokenizer(models.Unigram([(token, -1.0) for token in vocab], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def _word_piece() -> Tokenizer:
    """As BERT."""
    tokenizer = Tokenizer(
        models.WordPiece(_vocab(*_WORDS, *(f"##{word}" for word in _WORDS), "n't"), unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _word_ends() -> Tokenizer:
    """As CLIP and the first GPT: the end of a word is marked, not its beginning."""
    tokenizer = Tokenizer(models.BPE(_vocab(*_WORDS, *(f"{word}</w>" for word in _WORDS), "</w>"), []))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder()
    return tokenizer


BUILDERS = {
    "byte-level": _byte_level,
    "sentencepiece": lambda: _sentencepiece(strips=True),
    "gemma": lambda: _sentencepiece(strips=False),
    "unigram": _unigram,
    "word-piece": _word_piece,
    "word-ends": _word_ends,
}
KINDS = tuple(BUILDERS)


@cache
def codec_of(kind: str) -> TextCodec:
    """A codec without end tokens, of which `<s>`, `</s>` and `<|special|>` are special."""
    tokenizer = BUILDERS[kind]()
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BEGIN, eos_token=END, clean_up_tokenization_spaces=False
    )
    return TextCodec(wrapped, frozenset())


def ids(kind: str, *tokens: str) -> list[int]:
    """Ids of tokens as the vocabulary writes them."""
    vocab = codec_of(kind).token_map()
    return [vocab[token] for token in tokens]
