"""`rakvctl generate`: prompts through the runtime, results to the writer, one after another."""

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rakvctl.cli import interrupts, outputs, progress, render
from rakvctl.cli.inputs import PromptSource, jobs, unfinished
from rakvctl.cli.options import OutputFormat
from rakvctl.cli.page import error_console
from rakvctl.cli.servers import FleetServer, LocalServer, Server
from rakvctl.cli.stats import Totals
from rakvctl.core.errors import RakvError, RequestError, UsageError
from rakvctl.core.loading import RuntimeOptions
from rakvctl.core.models import Notify
from rakvctl.core.serving import Answer, PromptId
from rakvctl.fleet.fleet import FleetOptions, open_fleet
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


def generate(
    source: PromptSource,
    runtime_options: RuntimeOptions,
    options: GenerateOptions,
    fleet_options: FleetOptions | None = None,
) -> int:
    """Run all prompts; return the exit code: 1 if one of them failed. Raises RakvError, also for an interruption."""
    as_text = options.output is OutputFormat.TEXT or (options.output is None and not source.several)
    if options.resume and (options.out is None or as_text):
        raise UsageError("--resume continues a file of records", "use it with --out FILE and --output jsonl")
    outputs.refuse_overwriting(options.out, source.files)
    notify = (lambda _: None) if options.quiet else render.print_note
    with _output_stream(options) as (stream, finished):
        prompts = unfinished(source.prompts, finished)
        if prompts is None:
            notify(f"nothing is left to run: {options.out} has a record of every prompt")
            return 0
        with _server(runtime_options, fleet_options, notify, quiet=options.quiet) as server:
            if options.out is not None and not options.resume:
                outputs.empty(stream, options.out)
            writer = render.TextWriter(stream, source.several) if as_text else render.JsonlWriter(stream)
            totals = Totals()
            try:
                interrupts.raise_from_now_on()
                answers = server.answers(jobs(prompts, server.codec, options.chat), writer.text)
                with progress.serving(totals, shown=_shows_progress(source, options)) as advance:
                    for answer in answers:
                        _record(answer, writer, totals)
                        advance()
            except KeyboardInterrupt as error:
                raise _interruption(options.out, as_text) from error
            if options.stats:
                totals.show(error_console(), server.places)
    if totals.num_failed and not as_text:
        num_prompts = totals.num_done + totals.num_failed
        render.print_error(f"{totals.num_failed} of {num_prompts} prompts failed", "see the records with an `error`")
    return 1 if totals.num_failed else 0


def _interruption(out: Path | None, as_text: bool) -> InterruptionError:
    hint = "run the same command again"
    if out is not None and not as_text:
        hint = f"the records in {out} are complete; the same command with --resume goes on from there"
    return InterruptionError("interrupted", hint)


def _record(answer: Answer, writer: render.Writer, totals: Totals) -> None:
    """Count and write a completion, or an error that leaves the others alone."""
    if isinstance(answer.outcome, RequestError):
        totals.num_failed += 1
        writer.failed(answer.prompt_id, answer.outcome)
    else:
        totals.add(answer.outcome, answer.worker)
        writer.done(answer.prompt_id, answer.outcome)


@contextmanager
def _server(
    options: RuntimeOptions, fleet_options: FleetOptions | None, notify: Notify, *, quiet: bool
) -> Iterator[Server]:
    """What serves: a runtime in this process, or workers of a cluster."""
    if fleet_options is not None:
        with ExitStack() as stack:
            with progress.measuring(shown=not quiet) as on_progress:
                on_progress("starting workers", 0.0)
                fleet = stack.enter_context(open_fleet(fleet_options, options, notify, debugging=render.debugging()))
            yield FleetServer(fleet)
        return
    with progress.measuring(shown=not quiet) as on_progress:
        runtime = load_runtime(options, notify, on_progress)
    # What was imported and loaded stays: leave it out of all collections to come.
    gc.collect()
    gc.freeze()
    gc.enable()
    yield LocalServer(runtime, notify)


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
