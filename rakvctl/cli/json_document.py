"""Prompt files that are one JSON document: an array of prompts, or an object with one that may span many lines."""

import codecs
import json
import re
from typing import Any

from rakvctl.core.errors import RakvError

_FIELDS = ("prompt", "messages")
# A document that is damaged, and was meant as one with prompts.
_HAS_PROMPT = re.compile(rb'"(prompt|messages)"\s*:')


def json_lines(raw: bytes, where: str, *, is_json: bool, may_be_strings: bool) -> list[bytes] | None:
    """The document's prompts, a JSON line each; None where it is a text like any other.

    `is_json`: it is called so, and never is a text. `may_be_strings`: an array of strings is one of prompts. Raises
    RakvError for a document that is damaged or holds no prompts.
    """
    try:
        document = json.loads(raw.removeprefix(codecs.BOM_UTF8))
    except (ValueError, RecursionError) as error:
        if is_json or _HAS_PROMPT.search(raw):
            hint = "one JSON array, one object, or one object a line is read; --format text takes it as it stands"
            raise RakvError(f"{where} is not JSON: {error}", hint) from error
        return None
    prompts = _prompts(document, may_be_strings)
    if prompts is None and is_json:
        hint = 'write [{"prompt": "..."}, ...], or take it as it stands with --format text'
        raise RakvError(f"{where} holds no prompts", hint)
    return prompts


def _prompts(document: Any, may_be_strings: bool) -> list[bytes] | None:
    if isinstance(document, dict):
        return [_line(document)] if _has_prompt(document) else None
    if not isinstance(document, list):
        return None
    all_fit = may_be_strings and all(isinstance(element, str | dict) for element in document)
    if all_fit or any(_has_prompt(element) for element in document):
        return [_line(element) for element in document]
    return None


def _has_prompt(element: Any) -> bool:
    return isinstance(element, dict) and any(field in element for field in _FIELDS)


def _line(element: Any) -> bytes:
    return json.dumps({"prompt": element} if isinstance(element, str) else element).encode()
