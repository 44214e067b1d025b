"""Serving one request on models that are already loaded, under any policy."""

from dataclasses import dataclass

from rakvctl.core.drafters import ModelDrafter
from rakvctl.core.engine import Engine
from rakvctl.core.policies import make_policy
from rakvctl.core.profile import HardwareProfile
from rakvctl.core.runtime import Runtime
from rakvctl.core.seams import Backend
from rakvctl.core.store import PrefixStore
from rakvctl.core.text import TextCodec
from rakvctl.core.tiers import MemoryTier


@dataclass(frozen=True)
class Pair:
    """A loaded target and draft with their tokenizer."""

    codec: TextCodec
    target: Backend
    draft: Backend

    def runtime(self, policy: str, store: PrefixStore | None = None, profile: HardwareProfile | None = None) -> Runtime:
        """A runtime on the pair, with an empty store of its own unless one is given."""
        return Runtime(
            codec=self.codec,
            target=Engine(self.target),
            drafter=ModelDrafter(Engine(self.draft)),
            store=PrefixStore(MemoryTier(2**28)) if store is None else store,
            policy=make_policy(policy, profile),
        )
