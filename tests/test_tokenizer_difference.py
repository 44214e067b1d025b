"""A draft must have the target's tokenizer; where it has not, the first token that differs is named."""

from typing import Any

import pytest

from rakvctl.core import loading
from rakvctl.core.errors import UsageError
from rakvctl.core.models import ModelFiles
from rakvctl.core.text import TextCodec
from tests.fakes import NO_END


class Vocabulary:
    """A tokenizer of which only the tokens matter."""

    def __init__(self, tokens: dict[str, int]) -> None:
        self._tokens = tokens

    def get_vocab(self) -> dict[str, int]:
        return self._tokens


class Loader:
    """Finds models called `target` and `draft`, which are only their tokenizers."""

    def __init__(self, target: dict[str, int], draft: dict[str, int]) -> None:
        self._vocabularies = {"target": target, "draft": draft}

    def find(self, name: str, *_: object) -> ModelFiles:
        return ModelFiles(name, Any)  # type: ignore[arg-type]

    def load_codec(self, files: ModelFiles) -> TextCodec:
        return TextCodec(Vocabulary(self._vocabularies[files.name]), NO_END)


@pytest.mark.parametrize(
    ("target", "draft", "difference"),
    [
        (
            {"a": 0, "foo": 1, "c": 2},
            {"a": 0, "bar": 1, "d": 2},
            "token 1 is 'foo' in the target and 'bar' in the draft",
        ),
        ({"c": 9, "a": 0, "b": 5}, {"a": 0, "B": 5, "C": 9}, "token 5 is 'b' in the target and 'B' in the draft"),
        ({"a": 0, "b": 1}, {"a": 0}, "token 1 is 'b' in the target and missing in the draft"),
        ({"a": 0}, {"a": 0, "<one more>": 7}, "token 7 is missing in the target and '<one more>' in the draft"),
        ({"a": 0, "b": 1}, {"b": 0, "a": 1}, "token 0 is 'a' in the target and 'b' in the draft"),
        ({"a": 0, "A": 0}, {"a": 0}, "token 0 is 'A' or 'a' in the target and 'a' in the draft"),
        ({"line\n": 0}, {"'": 0}, "token 0 is 'line\\n' in the target and \"'\" in the draft"),
    ],
)
def test_the_first_token_that_differs_is_named(
    target: dict[str, int], draft: dict[str, int], difference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "make_loader", lambda _: Loader(target, draft))
    with pytest.raises(UsageError) as raised:
        loading.load_pair(loading.RuntimeOptions(target="target", draft="draft", policy="spec-2"), print)
    assert raised.value.message == f"draft draft and target target have different tokenizers: {difference}"
