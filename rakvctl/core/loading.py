"""From options to loaded models and a `Runtime`: find the models, load what the policy needs, check that they fit."""

from dataclasses import dataclass, replace
from pathlib import Path

from rakvctl.core.acceptance import initial_experience
from rakvctl.core.cost import CostModel
from rakvctl.core.disk.tier import DiskTier
from rakvctl.core.engine import Engine
from rakvctl.core.errors import ModelError, RakvError, UsageError
from rakvctl.core.exactness import logit_difference
from rakvctl.core.generation_config import read_generation_config
from rakvctl.core.hardware import num_cores
from rakvctl.core.loaders import Loader, make_loader
from rakvctl.core.lookup import History, LookupDrafter
from rakvctl.core.models import ModelFiles, Notify, default_draft
from rakvctl.core.pair import ModelPair
from rakvctl.core.policies import make_policy, policy_needs
from rakvctl.core.profile import HardwareProfile
from rakvctl.core.runtime import Runtime
from rakvctl.core.store import PrefixStore
from rakvctl.core.successors import read_successors, successors_path
from rakvctl.core.text import TextCodec
from rakvctl.core.tiers import MemoryTier

# Of the budget for what is kept, this part goes to earlier texts where they are looked up in.
_HISTORY_PART = 16
# As many tokens of earlier processes' texts are read at the start, in some hundredths of a second.
_READ_TOKENS = 30_000


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """What the command line says of models, engine, policy and store. `draft` None: the one of the target's name.

    `exact`: only a target whose logits are the same bits in whatever pass. `kv_dir`: where stored prefixes outlive the
    process, if they are to; `kv_read_only`: they are looked up there, and nothing is written. `kv_type`,
    `context_size`: number type of states, and the most positions, on llama.cpp.
    """

    target: str = "tiny"
    draft: str | None = None
    backend: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    num_threads: int | None = None
    kv_type: str | None = None
    context_size: int | None = None
    policy: str = "auto"
    drafter: str = "auto"
    profile: str = "auto"
    exact: bool = False
    kv_budget_bytes: int = 512 * 2**20
    kv_dir: Path | None = None
    kv_disk_budget_bytes: int = 4 * 2**30
    kv_read_only: bool = False


def load_pair(options: RuntimeOptions, notify: Notify) -> ModelPair:
    """Load the models that the policy works with; `notify` hears what takes long and what will not be in force.

    Raises ModelError for models that cannot be had or cannot be loaded; UsageError for a draft with another tokenizer,
    for options that contradict each other, and for more threads than cores.
    """
    _refuse_more_threads_than_cores(options.num_threads)
    draft_name = _draft_name(options)
    loader = make_loader(options)
    target_files = loader.find(options.target, "target", notify)
    draft_files = loader.find(draft_name, "draft", notify) if draft_name else None
    codec = loader.load_codec(target_files)
    if draft_files is not None:
        difference = _first_difference(codec.token_map(), loader.load_codec(draft_files).token_map())
        if difference:
            raise UsageError(
                f"draft {draft_files.name} and target {target_files.name} have different tokenizers: {difference}",
                "take a draft with the target's tokenizer, or --draft none",
            )
    generation = read_generation_config(target_files)
    if generation.not_applied:
        names = ", ".join(generation.not_applied)
        notify(f"the generation config of {options.target} sets {names}, which rakvctl does not apply")
    disk = _open_disk(options, notify)
    content = disk.weights_digest("\0".join(target_files.identity), target_files.whole_digest) if disk else ""
    target = _load_target(loader, target_files, options.exact, codec.vocab_size, content)
    _tell_unstable_prefixes(target, options, notify)
    draft = None
    if draft_files is not None and target.can_rollback:
        draft = _load_draft(loader, draft_files, codec.vocab_size, notify)
    return ModelPair(
        codec,
        target,
        options.target,
        draft,
        draft_files.name if draft and draft_files else "",
        disk=disk,
        logits_settings=generation.settings,
    )


def _tell_unstable_prefixes(target: Engine, options: RuntimeOptions, notify: Notify) -> None:
    """Say where the target cannot do what the policy asks for."""
    needs, limit = policy_needs(options.policy), target.prefix_stable_positions
    if not target.can_rollback:
        notify(f"{options.target} keeps states that cannot be rolled back: no KV reuse and no speculation")
    elif limit is not None and (needs.store or needs.drafter != "unused"):
        notify(
            f"{options.target} changes its rotary embedding in sequences of more than {limit} tokens (prompt and new "
            "ones): no KV reuse and no speculation in those"
        )


def load_codec(options: RuntimeOptions, notify: Notify) -> TextCodec:
    """The target's tokenizer alone, of which `load_pair` says the rest.

    The number of threads is not for this process, which may be on another machine than the models.
    """
    loader = make_loader(replace(options, num_threads=None))
    return loader.load_codec(loader.find(options.target, "target", notify))


def make_runtime(pair: ModelPair, options: RuntimeOptions, profile: HardwareProfile | None) -> Runtime:
    """Put store and policy around loaded models; only a policy that reckons with costs needs a profile."""
    pair = with_near_tie(pair, options.policy, profile)
    # Without anything to look up, nothing is left to be decided round by round.
    is_per_request = options.policy == "auto" and options.drafter in ("none", "model")
    policy = "rakv" if is_per_request else options.policy
    needs = policy_needs(policy)
    looks_up = options.drafter == "lookup" and not needs.profile
    history_bytes = options.kv_budget_bytes // _HISTORY_PART if needs.history else 0
    experience = initial_experience(profile, history_bytes) if profile else None
    if pair.disk is not None and experience is not None and needs.history:
        for text in pair.disk.texts(pair.target.model_key, _READ_TOKENS):
            experience.remember(text)
    return Runtime(
        codec=pair.codec,
        target=pair.target,
        drafter=LookupDrafter(History(0)) if looks_up else pair.drafter(),
        store=PrefixStore(
            MemoryTier(options.kv_budget_bytes - history_bytes),
            pair.disk,
            CostModel(profile).loading_pays if profile else None,
        ),
        policy=make_policy(policy, profile, pair.successors),
        experience=experience,
        near_tie=pair.near_tie or 0.0,
        logits_settings=pair.logits_settings,
    )


def with_near_tie(pair: ModelPair, policy: str, profile: HardwareProfile | None) -> ModelPair:
    """The pair that knows how close two tokens must be for the width of a pass to decide between them.

    Each of the two may be off by as much as logits differ from pass to pass: as the profile has it, and without one it
    is measured now where the policy drafts and it matters, in half precision. In float32 it is a matter of the fifth
    digit, if of any. Where the pair knows already, that stands.
    """
    if pair.near_tie is not None:
        return pair
    if profile is not None and profile.logit_difference is not None:
        return replace(pair, near_tie=2 * profile.logit_difference)
    drafts = policy_needs(policy).drafter != "unused"
    matters = drafts and pair.target.can_rollback and pair.target.info.dtype != "float32"
    return replace(pair, near_tie=2 * logit_difference(pair.target)) if matters else pair


def with_successors(pair: ModelPair, notify: Notify) -> ModelPair:
    """The pair with what is known of its target's habits; `notify` hears of a file that cannot be used."""
    try:
        path = successors_path(pair.target.info.digest)
        return replace(pair, successors=read_successors(path, pair.codec.vocab_size))
    except RakvError as error:
        notify(f"{error.message}; {error.hint}")
        return pair


def _refuse_more_threads_than_cores(num_threads: int | None) -> None:
    """Raise UsageError: beyond the cores threads only cost, and far beyond torch crashes."""
    most = num_cores()
    if num_threads is not None and num_threads > most:
        raise UsageError(
            f"--threads {num_threads} is more than the {most} core{'s' * (most > 1)} that this process may use",
            f"give {f'1 to {most}' if most > 1 else '1'}, or leave the option out",
        )


def _draft_name(options: RuntimeOptions) -> str | None:
    """The draft model to load. Raises UsageError where the policy cannot do without and there is none."""
    use = policy_needs(options.policy).drafter
    if options.policy == "rakv" and options.drafter == "lookup":
        raise UsageError("policy rakv reckons with a draft model", "looking up goes with auto, spec-K and joint-K")
    has_none = options.drafter in ("none", "lookup") or options.draft == "none"
    name = None if has_none else options.draft or default_draft(options.target)
    if use == "required" and name is None and options.drafter != "lookup":
        hint = "leave --drafter none out" if options.drafter == "none" else "name a draft model with --draft"
        raise UsageError(f"policy {options.policy} needs a drafter", f"{hint}, or look tokens up with --drafter lookup")
    return None if use == "unused" else name


def _first_difference(target: dict[str, int], draft: dict[str, int]) -> str:
    """Which token id, the lowest one, is another token for a draft than for its target; empty where none is."""
    differing = target.items() ^ draft.items()
    if not differing:
        return ""
    first = min(token_id for _, token_id in differing)

    def named(tokens: dict[str, int]) -> str:
        return " or ".join(repr(token) for token in sorted(tokens) if tokens[token] == first) or "missing"

    return f"token {first} is {named(target)} in the target and {named(draft)} in the draft"


def _open_disk(options: RuntimeOptions, notify: Notify) -> DiskTier | None:
    """The directory of stored prefixes, where there is to be one and the policy reuses them."""
    if options.kv_dir is None or not policy_needs(options.policy).store:
        return None
    return DiskTier(options.kv_dir, options.kv_disk_budget_bytes, notify, read_only=options.kv_read_only)


def _load_target(loader: Loader, files: ModelFiles, exact: bool, vocab_size: int, content: str) -> Engine:
    """The target; where it must be exact, computing in the first way that is measured to be so.

    Raises ModelError where none is.
    """
    differences = []
    for way in loader.ways if exact else loader.ways[:1]:
        engine = Engine(loader.load(files, vocab_size, way, content))
        if not exact or not engine.can_rollback:
            return engine
        differences.append(logit_difference(engine))
        if differences[-1] == 0.0:
            return engine
    raise ModelError(
        f"in {engine.info.dtype} on {engine.info.device} the logits of {files.name} differ from pass to pass, "
        f"by up to {min(differences):.2g}",
        "leave --exact out: near ties are then decided by plain steps; or take other number types",
    )


def _load_draft(loader: Loader, files: ModelFiles, vocab_size: int, notify: Notify) -> Engine | None:
    engine = Engine(loader.load(files, vocab_size))
    if not engine.can_rollback:
        notify(f"draft {files.name} keeps states that cannot be rolled back: no speculation")
        return None
    return engine
