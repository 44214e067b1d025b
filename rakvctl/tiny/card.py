"""What the trained pair `tiny` is worth, measured on held-out files, and the model card that says so."""

import platform
from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import GPT2LMHeadModel

_BLOCK = 512
_MAX_BLOCKS = 200
_PROMPT_TOKENS = 96
_CONTINUATION_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Training:
    """Facts about one training run; times in minutes."""

    num_files: int
    num_held_out_files: int
    num_tokens: int
    tokens_seen: int
    draft_tokens_seen: int
    minutes: float
    seed: int


@dataclass(frozen=True, slots=True)
class Quality:
    """Held-out figures: losses in nats a token, the rest are shares of tokens between 0 and 1."""

    target_loss: float
    draft_loss: float
    bits_per_byte: float
    target_accuracy: float
    agreement_on_text: float
    agreement_on_continuations: float
    num_continuations: int


@torch.inference_mode()
def evaluate(target: GPT2LMHeadModel, draft: GPT2LMHeadModel, stream: torch.Tensor, bytes_per_token: float) -> Quality:
    """Compare the pair on a held-out token stream, [num_tokens].

    `agreement_on_text`: how often both name the same next token while reading the files.
    `agreement_on_continuations`: the same along the target's own greedy continuations, which is what a draft meets in
    speculation.
    """
    losses: dict[str, list[torch.Tensor]] = {"target": [], "draft": []}
    right, agree = [], []
    starts = range(0, len(stream) - _BLOCK - 1, _BLOCK)
    for start in starts[:: max(1, len(starts) // _MAX_BLOCKS)]:
        ids = stream[start : start + _BLOCK][None]
        next_ids = stream[start + 1 : start + _BLOCK + 1]
        ours, theirs = target(input_ids=ids).logits[0], draft(input_ids=ids).logits[0]
        losses["target"].append(functional.cross_entropy(ours, next_ids))
        losses["draft"].append(functional.cross_entropy(theirs, next_ids))
        right.append((ours.argmax(-1) == next_ids).float().mean())
        agree.append((ours.argmax(-1) == theirs.argmax(-1)).float().mean())
    agreement, num_continuations = _agreement_on_continuations(target, draft, stream)
    target_loss = _mean(losses["target"])
    return Quality(
        target_loss=target_loss,
        draft_loss=_mean(losses["draft"]),
        bits_per_byte=target_loss / torch.tensor(2.0).log().item() / bytes_per_token,
        target_accuracy=_mean(right),
        agreement_on_text=_mean(agree),
        agreement_on_continuations=agreement,
        num_continuations=num_continuations,
    )


def _agreement_on_continuations(
    target: GPT2LMHeadModel, draft: GPT2LMHeadModel, stream: torch.Tensor
) -> tuple[float, int]:
    num_prompts = min(128, len(stream) // 1024)
    starts = torch.linspace(0, len(stream) - _PROMPT_TOKENS - 1, num_prompts).long()[:, None]
    prompts = stream[starts + torch.arange(_PROMPT_TOKENS)]
    ids = target.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=_CONTINUATION_TOKENS,
        do_sample=False,
        use_cache=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    guesses = draft(input_ids=ids[:, :-1]).logits.argmax(-1)[:, _PROMPT_TOKENS - 1 :]
    return (guesses == ids[:, _PROMPT_TOKENS:]).float().mean().item(), num_prompts


def _mean(values: list[torch.Tensor]) -> float:
    return torch.stack(values).mean().item()


def render(target: GPT2LMHeadModel, draft: GPT2LMHeadModel, training: Training, quality: Quality) -> str:
    """Return the model card as Markdown."""
    return _TEMPLATE.format(
        python=platform.python_version(),
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        target_shape=_shape(target),
        draft_shape=_shape(draft),
        vocab=target.config.vocab_size,
        positions=target.config.n_positions,
        t=training,
        q=quality,
    )


def _shape(model: GPT2LMHeadModel) -> str:
    config = model.config
    return f"{config.n_layer} layers, width {config.n_embd}, {model.num_parameters():,} parameters"


_TEMPLATE = """\
# The pair `tiny`

Two small GPT-2 models with one tokenizer, made to try `rakvctl` without a download and to test it. They continue Python
source code in its look; they know nothing and follow no instructions.

| | target | draft |
|---|---|---|
| shape | {target_shape} | {draft_shape} |
| held-out loss, nats a token | {q.target_loss:.3f} | {q.draft_loss:.3f} |

- Tokenizer: byte-level BPE, {vocab} tokens. Positions: {positions}, all trained. Weights: float16.
- Data: the standard library sources of CPython {python} as installed, with its tests, without character tables and
  help topics ({t.num_files} files, {t.num_tokens:,} tokens). About every twentieth file ({t.num_held_out_files}),
  chosen by a hash of its path, was held out.
- Licence of the data: Python Software Foundation License Version 2, with the notices of single modules. The weights
  are distributed under the project's licence.
- Training: `python -m rakvctl.tiny.train`, seed {t.seed}, torch {torch}, {threads} CPU threads, bfloat16 with float32
  master weights; {t.tokens_seen:,} tokens for both models side by side, then {t.draft_tokens_seen:,} for the draft
  alone, in {t.minutes:.0f} minutes of wall-clock time, whatever else the machine did. The draft was trained on the
  target's predictions, not on the text.

Measured on the held-out files:

- the target's first choice is the file's next token for {q.target_accuracy:.1%} of the tokens
  ({q.bits_per_byte:.3f} bits a byte);
- draft and target choose the same token for {q.agreement_on_text:.1%} of the tokens of the text, and for
  {q.agreement_on_continuations:.1%} along the target's own greedy continuations ({q.num_continuations} prompts), which
  is the acceptance a token in greedy speculation.
"""
