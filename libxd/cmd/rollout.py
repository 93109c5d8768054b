"""xd-rollout: sample the sequences that an experiment freezes."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from libxd import console, devices, freezing, prompts, publish, sampling, sequences, strictjson
from libxd.console import Console
from libxd.errors import Status, XdError
from libxd.slots import Line

EXAMPLES = """
# two samples of each of eight prompts
xd-rollout experiments/prompts/mix.jsonl --model models/smollm2-135m-instruct --limit 8 --samples 2 --out s.safetensors

# three prompts from a pipe, cooler and in float32
head -n 3 experiments/prompts/mix.jsonl |
  xd-rollout --model models/smollm2-135m-instruct --temperature 0.7 --dtype float32 --out s.safetensors
"""


class _Number(click.FloatRange):
    """A float within a range, in which NaN is not."""

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> float:
        number = super().convert(value, param, context)
        if math.isnan(number):
            self.fail(f"{value} is no number.", param, context)
        return number


@console.command("xd-rollout", EXAMPLES)
@click.argument("files", nargs=-1, metavar="[FILE]...")
@click.option("--model", required=True, help="Checkpoint directory, or the runtime's own name for a model.")
@click.option("--out", required=True, type=console.PATH, help="The sequences file to write.")
@click.option("--runtime", default="hf", show_default=True, help="Which runtime samples.")
@click.option("--samples", type=click.IntRange(1, 4096), default=1, show_default=True, help="Samples a prompt.")
@click.option("--max-new-tokens", type=click.IntRange(1, 1 << 20), default=128, show_default=True,
              help="Most tokens of a response, its end token among them.")
@click.option("--temperature", type=_Number(0, 100, min_open=True), default=1.0, show_default=True,
              help="Divides the logits before drawing.")
@click.option("--top-p", type=_Number(0, 1, min_open=True), default=1.0, show_default=True,
              help="Draw from the most probable tokens that hold this mass.")
@click.option("--seed", type=click.IntRange(0, 2**53 - 1), default=0, show_default=True, help="Seed of the draws.")
@click.option("--batch-size", type=click.IntRange(1, 4096), default=8, show_default=True,
              help="Sequences decoded together.")
@click.option("--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), default="bfloat16", show_default=True,
              help="Dtype of the model; bfloat16 is what rollout engines sample in.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True,
              help="Where the model runs.")
@click.option("--limit", type=click.IntRange(1), help="Only the first so many prompts.")
def cli(console: Console, files: tuple[str, ...], model: str, out: Path, runtime: str, device: str,
        limit: int | None, **settings: Any) -> None:  # fmt: skip
    """Sample responses to prompts (JSONL files or stdin) and freeze them: ids, masks, and the logprobs seen.

    A prompt row is {"id": …, "messages": [{"role": …, "content": …}, …]} or {"id": …, "text": …}. Sampling stops at
    the model's end token, which counts as part of the response. A rerun draws the same tokens where the logits are the
    same, whatever the batch size. Logprobs are raw: of the logits before temperature and top-p.
    """
    from libxd.runtimes import registry

    publish.require_place(out)
    rows = prompts.parse(_lines(console, files), ", ".join(files) or "stdin")[:limit]
    chosen = sampling.Sampling(**settings)
    open_generator = getattr(registry.load(runtime), "generator", None)
    if open_generator is None:
        raise XdError("this runtime cannot sample", status=Status.REFUSED, code="cannot-sample", where=runtime)
    if device == "cuda":
        _take_a_slot(console)
    generator = open_generator(model, chosen.dtype, device)
    try:
        with _progress(console, len(rows) * chosen.samples) as bar:
            responses = sampling.sample(generator, rows, chosen, lambda _: bar.update())
        described = generator.describe()
    finally:
        generator.close()
    frozen = freezing.freeze(responses, freezing.metadata(runtime, described, rows, chosen))
    written = sequences.write(out, frozen)
    console.info(f"{frozen.num_sequences} sequences, {frozen.num_tokens} tokens, {int(frozen.active_mask.sum())} of "
                 f"them sampled{'' if written else '; the same file was there already'}")  # fmt: skip
    console.emit(str(out))


def _take_a_slot(console: Console) -> None:
    """Wait for a device, which is then the only one that torch will see. It is given back when this process ends."""
    with Line(devices.of(os.environ), 1) as line:
        held = line.take()
        if held is None:
            console.info(f"waits for {line} ({line.obstacle})")
            held = line.wait()
    os.environ.update(held.variables)


def _lines(console: Console, files: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    for file in files or ("-",):
        if file == "-":
            yield from console.rows_of_stdin("prompts")
        else:
            yield from prompts.rows(strictjson.read_bytes(file), file)


def _progress(console: Console, total: int) -> Any:
    """A bar on stderr, on a terminal only."""
    from tqdm import tqdm

    return tqdm(total=total, unit="seq", file=sys.stderr, disable=True if console.quiet else None, leave=False)


main = console.entry(cli)
