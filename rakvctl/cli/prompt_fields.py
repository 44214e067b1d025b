"""From the fields of a JSON line to the content of a prompt and its sampling parameters."""

from collections.abc import Mapping
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Any

from rakvctl.cli.sampling import BOUNDED, bounded
from rakvctl.core.errors import RequestError
from rakvctl.core.text import Message
from rakvctl.core.types import SamplingParams

Content = str | tuple[Message, ...]

# OpenAI's names for our fields.
_ALIASES = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}
_SUPPORTED = (*BOUNDED, *_ALIASES, "stop")
# Fields of OpenAI's, vLLM's and transformers' requests that would change the result, with the values that ask for
# nothing, as some clients write out defaults.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "num_beams": (1,),
    "do_sample": (),
    "length_penalty": (1,),
    "logprobs": (False,),
    "top_logprobs": (),
    "prompt_logprobs": (),
    "echo": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "no_repeat_ngram_size": (0,),
    "typical_p": (1,),
    "logit_bias": ({},),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "stop_token_ids": ([],),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "min_tokens": (0,),
    "min_new_tokens": (0,),
    "max_length": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
}
# What other programs call a supported field, too far from its name to be taken for a slip.
_FOREIGN = {"repeat_penalty": "repetition_penalty", "stop_sequences": "stop", "stop_strings": "stop"}
_ALL_NAMES = (*_SUPPORTED, *_UNSUPPORTED)
_SIMILAR, _SHORTEST_SIMILAR = 0.88, 6


def content_of(fields: Mapping[str, Any]) -> Content:
    """The prompt or the chat of a line. Raises RequestError where it has none, both, or a malformed one."""
    prompt, messages = fields.get("prompt"), fields.get("messages")
    if (prompt is None) == (messages is None):
        raise RequestError("needs either `prompt` or `messages`", 'write {"prompt": "..."} or {"messages": [...]}')
    if prompt is not None:
        if not isinstance(prompt, str):
            raise RequestError("`prompt` is not a string", 'write {"prompt": "..."}')
        return prompt
    if not (isinstance(messages, list) and messages):
        raise _malformed_messages()
    return tuple(_message(message) for message in messages)


def _message(message: Any) -> Message:
    """A message whose content is one string, of whatever parts of text it was made."""
    if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
        raise _malformed_messages()
    content = message.get("content")
    if isinstance(content, str):
        return message
    if not (isinstance(content, list) and content):
        raise _malformed_messages()
    # A line each, as servers of OpenAI's protocol put them.
    return {**message, "content": "\n".join(_part(part) for part in content)}


def _part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind != "text":
        raise RequestError(f"`messages` hold a part of type {kind}", "only parts of type text can be read")
    text = part.get("text") if kind == "text" else None
    if not isinstance(text, str):
        raise _malformed_messages()
    return text


def _malformed_messages() -> RequestError:
    return RequestError(
        "`messages` is not a list of chat messages", 'write {"messages": [{"role": "user", "content": "..."}]}'
    )


def sampling_of(fields: Mapping[str, Any], default: SamplingParams) -> SamplingParams:
    """The parameters of the command line with those of the line put over them.

    Raises RequestError for a value out of bounds, a field that is not supported, and a name that is nearly one of ours.
    Fields of other names are the user's own data.
    """
    for name, value in fields.items():
        _refuse_unsupported(name, value)
    changed: dict[str, Any] = {}
    given: dict[str, str] = {}
    for name in (*BOUNDED, *_ALIASES):
        if name not in fields:
            continue
        target = _ALIASES.get(name, name)
        value = bounded(target, fields[name], f"`{name}`", RequestError)
        if changed.setdefault(target, value) != value:
            raise RequestError(f"`{given[target]}` and `{name}` differ", "they mean the same: give one of them")
        given.setdefault(target, name)
    if "stop" in fields:
        changed["stop"] = _stop(fields["stop"])
    return replace(default, **changed)


def _stop(value: Any) -> tuple[str, ...]:
    stop = [value] if isinstance(value, str) else value
    if not (isinstance(stop, list) and all(isinstance(text, str) and text for text in stop)):
        raise RequestError("`stop` is not a string or a list of strings", "empty strings stop nothing: leave them out")
    return tuple(stop)


def _refuse_unsupported(name: str, value: Any) -> None:
    """Raise RequestError for a field that asks for what would not be done."""
    if name in _UNSUPPORTED:
        # 1 and True are equal, and say different things.
        asks_nothing = any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in _UNSUPPORTED[name]
        )
        if not asks_nothing:
            raise RequestError(f"`{name}` is not supported", f"remove it; a line may have {', '.join(_SUPPORTED)}")
        return
    meant = None if name in _SUPPORTED else _FOREIGN.get(name) or _similar_name(name)
    if meant is not None:
        raise RequestError(f"`{name}` is unknown; is `{meant}` meant?", f"write `{meant}`, or name the field otherwise")


def _similar_name(name: str) -> str | None:
    """The name of a field that this one is a slip of: other capitals, dashes, or a few letters wrong."""
    letters = _letters(name)
    for known in _ALL_NAMES:
        other = _letters(known)
        if letters == other:
            return known
        if min(len(letters), len(other)) < _SHORTEST_SIMILAR or letters[0] != other[0]:
            continue
        if SequenceMatcher(None, letters, other).ratio() >= _SIMILAR:
            return known
    return None


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
