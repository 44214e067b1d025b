"""`rakvctl generate`: prompts through the runtime, results to the writer, one after another."""

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich.console import Console

from rakvctl.cli import outputs, progress, render
from rakvctl.cli.inputs import BadPrompt, Prompt, PromptId, PromptSource, encode
from rakvctl.cli.options import OutputFormat
from rakvctl.cli.stats import Totals
from rakvctl.core.errors import RakvError, RequestError, UsageError, first_line
from rakvctl.core.loading import RuntimeOptions
from rakvctl.core.runtime import Runtime
from rakvctl.core.types import Completion, Request
from rakvctl.measure.ready import load_runtime


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """What concerns the command and not the runtime. `chat` None: as the prompt and the model suggest."""

    chat: bool | None
    output: OutputFormat | None
    out: Path | None
    resume: bool
    stats: bool
    quiet: bool


class InterruptionError(RakvError):
    """Ctrl-C while prompts are served: some of the results may be there to go on from."""

    exit_code = 130


def generate(source: PromptSource, runtime_options: RuntimeOptions, options: GenerateOptions) -> int:
    """Run all prompts; return the exit code: 1 if one of them failed. Raises RakvError, also for an interruption."""
    as_text = options.output is OutputFormat.TEXT or (options.output is None and not source.several)
    if options.resume and (options.out is None or as_text):
        raise UsageError("--resume continues a file of records", "use it with --out FILE and --output jsonl")
    outputs.refuse_overwriting(options.out, source.files)
    with _output_stream(options) as (stream, finished):
        notify = (lambda _: None) if options.quiet else render.print_note
        with progress.measuring(shown=not options.quiet) as on_progress:
            runtime = load_runtime(runtime_options, notify, on_progress)
        # What was imported and loaded stays: leave it out of all collections to come.
        gc.collect()
        gc.freeze()
        gc.enable()
        if options.out is not None and not options.resume:
            outputs.empty(stream, options.out)
        writer = render.TextWriter(stream, source.several) if as_text else render.JsonlWriter(stream)
        totals = Totals()
        try:
            with progress.serving(totals, shown=_shows_progress(source, options)) as advance:
                for prompt in source.prompts:
                    if finished[prompt.id] > 0:
                        finished[prompt.id] -= 1
                    else:
                        _serve(prompt, runtime, options.chat, writer, totals)
                        runtime.settle()
                    advance()
        except KeyboardInterrupt as error:
            raise _interruption(options.out, as_text) from error
    if options.stats:
        totals.show(Console(stderr=True), runtime.engine)
    if totals.num_failed and not as_text:
        num_prompts = totals.num_done + totals.num_failed
        render.print_error(f"{totals.num_failed} of {num_prompts} prompts failed", "see the records with an `error`")
    return 1 if totals.num_failed else 0


def _interruption(out: Path | None, as_text: bool) -> InterruptionError:
    hint = "run the same command again"
    if out is not None and not as_text:
        hint = f"the records in {out} are complete; the same command with --resume goes on from there"
    return InterruptionError("interrupted", hint)


def _serve(
    prompt: Prompt | BadPrompt, runtime: Runtime, chat: bool | None, writer: render.Writer, totals: Totals
) -> None:
    """One prompt: a completion, or an error that leaves the others alone."""
    try:
        completion = _complete(prompt, runtime, chat, writer)
    except RequestError as error:
        totals.num_failed += 1
        writer.failed(prompt.id, error)
    else:
        totals.add(completion)
        writer.done(prompt.id, completion)


def _complete(prompt: Prompt | BadPrompt, runtime: Runtime, chat: bool | None, writer: render.Writer) -> Completion:
    """Encode and run one prompt. Raises RequestError, also where the engine gives up, as for want of memory."""
    if isinstance(prompt, BadPrompt):
        raise prompt.error
    request = Request(encode(prompt.content, runtime.codec, chat), prompt.sampling)
    try:
        return runtime.run(request, writer.text)
    except (RuntimeError, MemoryError, IndexError, ValueError) as error:
        if render.debugging():
            raise
        raise RequestError(
            f"{type(error).__name__} while generating: {first_line(error)}",
            "RAKVCTL_DEBUG=1 stops there and shows where",
        ) from error


@contextmanager
def _output_stream(options: GenerateOptions) -> Iterator[tuple[TextIO, Counter[PromptId]]]:
    """Where results go, and which ids are already there; opened before any model is loaded."""
    if options.out is None:
        yield sys.stdout, Counter()
        return
    if options.resume:
        stream, finished = outputs.resume_output(options.out)
    else:
        stream, finished = outputs.open_output(options.out), Counter()
    with stream:
        yield stream, finished


def _shows_progress(source: PromptSource, options: GenerateOptions) -> bool:
    """Several prompts, and no results on the same terminal."""
    return source.several and not options.quiet and not (options.out is None and sys.stdout.isatty())
