"""A whole runtime on the toy backend: one letter a token, so that texts and stop strings are easy to read."""

from dataclasses import dataclass, field
from types import SimpleNamespace

from rakvctl.core.backends.fake import FakeBackend
from rakvctl.core.runtime import Runtime
from rakvctl.core.store import PrefixStore
from rakvctl.core.text import TextCodec
from rakvctl.core.tiers import MemoryTier
from rakvctl.core.types import Completion, Request, SamplingParams
from tests.serving import Pair

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEF"
NO_END = frozenset[int]()


class LetterTokenizer:
    """Token i is the i-th letter."""

    chat_template = None

    def get_vocab(self) -> dict[str, int]:
        return {letter: index for index, letter in enumerate(LETTERS)}

    def __call__(self, text: str, **_: object) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[LETTERS.index(letter) for letter in text])

    def decode(self, token_ids: list[int], **_: object) -> str:
        return "".join(LETTERS[token_id] for token_id in token_ids)


@dataclass
class FakeRuntime:
    """Target and draft toy models under one store; `run` serves a request under any policy."""

    seed: int = 0
    noise: float = 0.5
    end_token_ids: frozenset[int] = NO_END
    target_positions: int | None = None
    draft_positions: int | None = None
    budget_bytes: int = 2**20
    target: FakeBackend = field(init=False)
    draft: FakeBackend = field(init=False)
    store: PrefixStore = field(init=False)

    def __post_init__(self) -> None:
        self.target = FakeBackend(seed=self.seed, max_positions=self.target_positions)
        self.draft = FakeBackend(seed=self.seed, noise=self.noise, max_positions=self.draft_positions)
        self.store = PrefixStore(MemoryTier(self.budget_bytes))

    def runtime(self, policy: str) -> Runtime:
        from tests.profiles import toy_profile  # which is made of what is above

        codec = TextCodec(LetterTokenizer(), self.end_token_ids)
        return Pair(codec, self.target, self.draft).runtime(policy, self.store, toy_profile())

    def run(self, policy: str, prompt: tuple[int, ...], sampling: SamplingParams | None = None) -> Completion:
        return self.runtime(policy).run(Request(prompt, sampling or SamplingParams(max_new_tokens=24)))
