"""The loaded models that serve requests together, and the fingerprint of what their times depend on."""

from dataclasses import dataclass, field

from rakvctl.core.disk.tier import DiskTier
from rakvctl.core.drafters import Drafter, ModelDrafter
from rakvctl.core.engine import Engine
from rakvctl.core.hardware import processor_name
from rakvctl.core.logits_processors import LogitsSettings
from rakvctl.core.profile import Fingerprint
from rakvctl.core.text import TextCodec


@dataclass(frozen=True, slots=True)
class ModelPair:
    """A target, its tokenizer, and a draft model if there is one. The names are the user's.

    `near_tie`: how close two tokens of the target must be for only a pass over one token to choose between them; None
    where that is not known yet.
    `successors`: what mostly follows each of its first token ids, as far as that is known.
    `disk`: where stored prefixes outlive the process.
    `logits_settings`: what the target's checkpoint asks for; in force for the draft model's tokens too.
    """

    codec: TextCodec
    target: Engine
    target_name: str
    draft: Engine | None = None
    draft_name: str = ""
    near_tie: float | None = None
    successors: tuple[int, ...] = ()
    disk: DiskTier | None = None
    logits_settings: LogitsSettings = field(default_factory=LogitsSettings)

    def drafter(self) -> Drafter | None:
        """The draft model as a drafter, with nothing drafted yet."""
        return ModelDrafter(self.draft) if self.draft is not None else None

    def fingerprint(self) -> Fingerprint:
        """What the pair's times depend on, as things are now."""
        info = self.target.info
        return Fingerprint(
            processor=processor_name(),
            device=info.device,
            driver=info.driver,
            threads=info.num_threads,
            dtype=info.dtype,
            backend=info.backend,
            versions=info.versions,
            target=self.target_name,
            target_digest=info.digest,
            draft=self.draft_name,
            draft_digest=self.draft.info.digest if self.draft is not None else "",
        )
