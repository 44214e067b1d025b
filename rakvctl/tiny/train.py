"""Train the pair `tiny` from scratch: `python -m rakvctl.tiny.train --out DIR`.

Writes DIR/target, DIR/draft (Hugging Face checkpoints, float16) and DIR/MODEL_CARD.md with the figures measured after
the training. The target learns the text; beside it, on the same batches, the draft learns the target's predictions,
since it is the target that its guesses have to please. Deterministic for a given Python, torch, seed and thread count.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from rakvctl.tiny import card, corpus

# Short tokens are easy to foresee, for the target and for the draft, and leave the bytes to the layers.
_VOCAB_SIZE = 1024
_NUM_POSITIONS = 2048
_TOKENS_PER_STEP = 8192
# Short blocks are cheap and teach most; long ones teach attention over the whole range. (length, share of the steps)
_BLOCK_LENGTHS = ((256, 0.70), (512, 0.15), (2048, 0.15))
_PEAK_LR = 3e-3
_WARMUP_STEPS = 60


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids and positions, both [B, T]; `next_ids` are the tokens to be predicted, [B, T]."""

    ids: torch.Tensor
    next_ids: torch.Tensor
    positions: torch.Tensor


def make_model(num_layers: int, num_heads: int, width: int) -> GPT2LMHeadModel:
    """Build a GPT-2 without dropout (the data is seen only once or twice)."""
    config = GPT2Config(
        n_layer=num_layers,
        n_embd=width,
        n_head=num_heads,
        n_positions=_NUM_POSITIONS,
        vocab_size=_VOCAB_SIZE,
        bos_token_id=0,
        eos_token_id=0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def batches(stream: torch.Tensor, num_steps: int, generator: torch.Generator) -> Iterator[Batch]:
    """Yield random blocks of the stream, each at a random offset, so that every position embedding is trained."""
    lengths = torch.tensor([length for length, _ in _BLOCK_LENGTHS])
    shares = torch.tensor([share for _, share in _BLOCK_LENGTHS])
    for _ in range(num_steps):
        length = int(lengths[torch.multinomial(shares, 1, generator=generator)])
        rows = _TOKENS_PER_STEP // length
        starts = torch.randint(len(stream) - length - 1, (rows, 1), generator=generator)
        offsets = torch.randint(_NUM_POSITIONS - length + 1, (rows, 1), generator=generator)
        steps = torch.arange(length)
        index = starts + steps
        yield Batch(ids=stream[index], next_ids=stream[index + 1], positions=offsets + steps)


def language_loss(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Cross-entropy of the next token, nats; logits [B, T, V]."""
    return functional.cross_entropy(logits.flatten(0, 1), batch.next_ids.flatten())


def distillation_loss(logits: torch.Tensor, teacher_logits: torch.Tensor) -> torch.Tensor:
    """Half Kullback-Leibler divergence from the teacher, half cross-entropy of its argmax; both [B, T, V].

    The second half trains what greedy verification asks of a draft: the same argmax.
    """
    student = functional.log_softmax(logits.flatten(0, 1), dim=-1)
    teacher = teacher_logits.flatten(0, 1)
    soft = functional.kl_div(student, functional.log_softmax(teacher, dim=-1), log_target=True, reduction="batchmean")
    hard = functional.nll_loss(student, teacher.argmax(dim=-1))
    return 0.5 * soft + 0.5 * hard


def learning_rate(step: int, num_steps: int) -> float:
    """Share of the peak rate: linear warm-up, constant up to the middle, linear decay to zero."""
    warmup = min(1.0, (step + 1) / _WARMUP_STEPS)
    decay = min(1.0, 2.0 * (1.0 - step / num_steps))
    return min(warmup, decay)


def optimizers(model: GPT2LMHeadModel) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for embeddings, norms and biases."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".h." in name]
    others = [p for name, p in model.named_parameters() if not (p.ndim == 2 and ".h." in name)]
    return [
        torch.optim.Muon(matrices, lr=_PEAK_LR, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=_PEAK_LR, betas=(0.9, 0.95), weight_decay=0.0),
    ]


class Learner:
    """A model with its optimizers: one `forward` and one `learn` a batch, in bfloat16 with float32 master weights."""

    def __init__(self, model: GPT2LMHeadModel) -> None:
        self.model = model.train()
        self.optimizers = optimizers(model)
        self.smoothed_loss = 0.0

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits [B, T, V], float32."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits: torch.Tensor = self.model(input_ids=batch.ids, position_ids=batch.positions).logits
        return logits.float()

    def learn(self, loss: torch.Tensor, lr: float) -> None:
        """One step down the loss."""
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
        self.smoothed_loss = 0.95 * (self.smoothed_loss or loss.item()) + 0.05 * loss.item()


def train(target: GPT2LMHeadModel, draft: GPT2LMHeadModel, stream: torch.Tensor, num_steps: int, seed: int) -> None:
    """Train both in place; prints the losses and the speed now and then.

    In step with the target, the draft meets predictions for text that the target has not learned by heart, as its
    users' will be; the rate's decay brings the target to rest while the draft still learns.
    """
    generator = torch.Generator().manual_seed(seed)
    teacher, student = Learner(target), Learner(draft)
    started = time.monotonic()
    for step, batch in enumerate(batches(stream, num_steps, generator)):
        lr = _PEAK_LR * learning_rate(step, num_steps)
        logits = teacher.forward(batch)
        teacher.learn(language_loss(logits, batch), lr)
        student.learn(distillation_loss(student.forward(batch), logits.detach()), lr)
        if step % 20 == 0 or step == num_steps - 1:
            speed = (step + 1) * _TOKENS_PER_STEP / (time.monotonic() - started)
            losses = f"target {teacher.smoothed_loss:.4f} draft {student.smoothed_loss:.4f}"
            print(f"step {step}/{num_steps} {losses} {speed:.0f} tokens/s", flush=True)
    target.eval(), draft.eval()


def distill(target: GPT2LMHeadModel, draft: GPT2LMHeadModel, stream: torch.Tensor, num_steps: int, seed: int) -> None:
    """Train the draft alone, in place, now that the target rests."""
    generator = torch.Generator().manual_seed(seed)
    student = Learner(draft)
    started = time.monotonic()
    for step, batch in enumerate(batches(stream, num_steps, generator)):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            logits = target(input_ids=batch.ids, position_ids=batch.positions).logits.float()
        student.learn(distillation_loss(student.forward(batch), logits), _PEAK_LR * learning_rate(step, num_steps))
        if step % 20 == 0 or step == num_steps - 1:
            speed = (step + 1) * _TOKENS_PER_STEP / (time.monotonic() - started)
            print(f"draft step {step}/{num_steps} {student.smoothed_loss:.4f} {speed:.0f} tokens/s", flush=True)
    draft.eval()


def save(model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write config, tokenizer and float16 weights; the model in memory then holds the rounded weights too."""
    model.half().float()
    model.config.use_cache = model.generation_config.use_cache = True
    model.half().save_pretrained(directory)
    model.float()
    tokenizer.save_pretrained(directory)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("tiny"), help="directory to write (default: ./tiny)")
    parser.add_argument("--steps", type=int, default=1500, help="steps of 8192 tokens for both (default: 1500)")
    parser.add_argument("--draft-steps", type=int, default=700, help="then steps for the draft alone (default: 700)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches (default: 0)")
    return parser.parse_args()


def main() -> None:
    """Tokenizer, target, draft, checkpoints, model card."""
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    files = corpus.source_files()
    bpe = corpus.train_tokenizer(files.training, _VOCAB_SIZE)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=corpus.END_OF_TEXT,
        eos_token=corpus.END_OF_TEXT,
        model_max_length=_NUM_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    stream, held_out = corpus.encode(files.training, bpe), corpus.encode(files.held_out, bpe)
    print(f"{len(files.training)} files, {len(stream)} tokens; held out {len(files.held_out)} files", flush=True)

    started = time.monotonic()
    target = make_model(num_layers=8, num_heads=7, width=224)
    draft = make_model(num_layers=2, num_heads=8, width=256)
    train(target, draft, stream, arguments.steps, arguments.seed)
    save(target, tokenizer, arguments.out / "target")
    distill(target, draft, stream, arguments.draft_steps, arguments.seed + 1)
    save(draft, tokenizer, arguments.out / "draft")
    training = card.Training(
        num_files=len(files.training),
        num_held_out_files=len(files.held_out),
        num_tokens=len(stream),
        tokens_seen=arguments.steps * _TOKENS_PER_STEP,
        draft_tokens_seen=arguments.draft_steps * _TOKENS_PER_STEP,
        minutes=(time.monotonic() - started) / 60,
        seed=arguments.seed,
    )
    bytes_per_token = sum(path.stat().st_size for path in files.held_out) / len(held_out)
    quality = card.evaluate(target, draft, held_out, bytes_per_token)
    (arguments.out / "MODEL_CARD.md").write_text(card.render(target, draft, training, quality), encoding="utf-8")
    print(quality)


if __name__ == "__main__":
    main()
