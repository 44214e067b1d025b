"""Backslash escapes in values of options, which shells hand on as they are."""

import re

from rakvctl.core.errors import UsageError

_ESCAPE = re.compile(r'\\(?:(?P<letter>[ntr\\"])|x(?P<byte>[0-9a-fA-F]{2})|u(?P<unit>[0-9a-fA-F]{4}))')
_LETTERS = {"n": "\n", "t": "\t", "r": "\r"}


def unescape(text: str, option: str) -> str:
    r"""The text with \n, \t, \r, \\, \", \xNN and \uNNNN (a pair of them for one character) replaced.

    Any other backslash stands for itself. Raises UsageError for half a surrogate pair.
    """
    replaced = _ESCAPE.sub(_character, text)
    try:
        return replaced.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{option} is not valid Unicode", r"write both \uNNNN of a character, or the character"
        ) from error


def _character(match: re.Match[str]) -> str:
    if match["letter"]:
        return _LETTERS.get(match["letter"], match["letter"])
    return chr(int(match["byte"] or match["unit"], 16))
