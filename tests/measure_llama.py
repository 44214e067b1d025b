"""What llama.cpp's settings cost, and whether passes of all widths give the same bits in them: the README's table.

`python -m tests.measure_llama MODEL.gguf`; the settings take turns, so that their times can be compared.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from rakvctl.core.backends.llama_cpp import LlamaBackend
from rakvctl.core.backends.llama_model import ContextOptions, LlamaModel
from rakvctl.core.engine import Engine
from rakvctl.core.exactness import logit_difference

TURNS, REPEATS = 5, 5
NEAR, CONTEXT, VERIFY, PROMPT = 128, 1024, 5, 512
SETTINGS = {
    "llama.cpp's own": {"key_type": "f16", "value_type": "f16", "flash_attention": None},
    "f32 states, not fused": {"key_type": "f32", "value_type": "f32", "flash_attention": False},
    "the same, not repacked": {"key_type": "f32", "value_type": "f32", "flash_attention": False, "repack": False},
    "f16 keys, bf16 values": {"key_type": "f16", "value_type": "bf16"},
    "q8_0 keys, f16 values": {"key_type": "q8_0", "value_type": "f16"},
    "bf16 keys, f16 values": {},
}
COLUMNS = (
    "largest difference",
    "step at 128",
    f"step at {CONTEXT}",
    f"verify of {VERIFY} at 128",
    f"prefill of {PROMPT}",
)


def engines(path: Path) -> Iterator[tuple[str, Engine]]:
    models = {repack: LlamaModel(path, repack) for repack in (True, False)}
    for name, changed in SETTINGS.items():
        options = ContextOptions(num_threads=2, **changed)
        model = models[options.repack]
        yield name, Engine(LlamaBackend(model, options, vocab_size=model.vocab_size, digest=name))


def timed(run: Callable[[], object]) -> float:
    """Milliseconds."""
    started = time.perf_counter()
    run()
    return (time.perf_counter() - started) * 1e3


def one_turn(engine: Engine, ids: tuple[int, ...]) -> dict[str, list[float]]:
    """Milliseconds of everything once over, what is short several times."""
    engine.rollback(0)
    times = {"prefill": [timed(lambda: engine.prefill(ids[:PROMPT]))], "far": [], "step": [], "verify": []}
    engine.prefill(ids[PROMPT:])
    for _ in range(REPEATS):
        times["far"].append(timed(lambda: engine.step(ids[0])))
        engine.rollback(CONTEXT)
    engine.rollback(NEAR)
    for _ in range(REPEATS):
        times["step"].append(timed(lambda: engine.step(ids[0])))
        engine.rollback(NEAR)
        times["verify"].append(timed(lambda: engine.verify(ids[:VERIFY])))
        engine.rollback(NEAR)
    return times


def main() -> None:
    loaded = dict(engines(Path(sys.argv[1])))
    ids = tuple(int(token) for token in np.random.default_rng(0).integers(1000, size=CONTEXT))
    differences = {name: logit_difference(engine) for name, engine in loaded.items()}
    turns: dict[str, list[dict[str, list[float]]]] = {name: [] for name in loaded}
    for _ in range(TURNS):
        for name, engine in loaded.items():
            turns[name].append(one_turn(engine, ids))
    table = Table("", *COLUMNS)
    for name, difference in differences.items():
        cells = [
            f"{statistics.median(ms for turn in turns[name] for ms in turn[what]):.1f} ms"
            for what in ("step", "far", "verify", "prefill")
        ]
        table.add_row(name, f"{difference:.2g}", *cells)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
