"""xd-impact: say what the difference between two sides does to a policy update."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from libxd import console
from libxd.console import PATH, Console
from libxd.rundir import Attempt

if TYPE_CHECKING:
    from libxd.credit import Credit
    from libxd.impact_settings import Settings
    from libxd.pairs import Pair

EXAMPLES = """
# ratios, KL and corrections of an attempt, and what its rewards' advantages would make of them
xd-impact --rewards rewards.csv runs/smollm2/cases/c-0123456789abcdef/a0001

# two score files by themselves, without advantages, as JSON
xd-impact --json score_rollout.safetensors score_training.safetensors
"""
_ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


@console.command("xd-impact", EXAMPLES)
@click.argument("paths", nargs=-1, metavar="[ATTEMPT]... | SCORES SCORES")
@click.option("--json", "as_json", is_flag=True, help="Print each impact as a line of JSON, not as text.")
@click.option(
    "--advantages", type=PATH, metavar="FILE",
    help="Advantages, a sequence or a token each: JSONL, CSV or safetensors, named advantage or advantages.",
)  # fmt: skip
@click.option(
    "--rewards", type=PATH, metavar="FILE", help="Rewards, one a sequence, in such a file: advantages are made of them."
)
@click.option(
    "--estimator", type=click.Choice(_ESTIMATORS), default=_ESTIMATORS[0], show_default=True,
    help="How advantages are made of rewards.",
)  # fmt: skip
@click.option(
    "--group", metavar="COLUMN",
    help="The column (of safetensors: the tensor) of the rewards that says the group, instead of the prompts.",
)  # fmt: skip
@click.option(
    "--sequences", type=PATH, metavar="FILE",
    help="The frozen tokens, whose prompts are the groups; else those that the attempt names.",
)
@click.option(
    "--overlong", type=int, nargs=2, metavar="MAX CACHE",
    help="Add the soft overlong punishment to rewards: from MAX - CACHE response tokens on, -1 at MAX.",
)  # fmt: skip
@click.option(
    "--epsilon", multiple=True, metavar="NAME=LOW,HIGH",
    help="Another clip of an objective: ppo grpo dr_grpo 0.2, dapo 0.2,0.28, cispo 4, gspo 3e-4,4e-4.",
)  # fmt: skip
@click.option(
    "--threshold", multiple=True, metavar="NAME=LOW,HIGH",
    help="Other bounds of a correction: token_truncate 2, token_mask 0.5,5, sequence_truncate 2, sequence_mask 3, "
    "sequence_reject 0.5,2, geometric_reject 0.999,1.001.",
)  # fmt: skip
@click.option("--beta", type=float, metavar="B", help="Weight of the k3 penalty in every objective; needs --reference.")
@click.option(
    "--reference", type=PATH, metavar="SCORES", help="A score file of the same tokens by the reference policy."
)
def cli(console: Console, paths: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Say what a difference does to the update: of attempts (operands or stdin), or of two score files.

    The ratio training / rollout of every active token, turn (an unbroken run of active tokens) and sequence; its
    effective sample size and chi-square; k1, k2 and k3 in both directions; what each importance correction truncates,
    masks or rejects; and, by advantages or rewards, what each objective clips, on which side, how many coefficients
    change or vanish, and the norm of their change. Nothing is written.
    """
    from libxd import canon, impact, impact_text, schema

    _refuse_contradictions(options)
    settings = _settings(options)
    first = True
    for where, opened in _pairs(console, paths):
        with console.guard(where):
            pair = opened()
            found = impact.of_pair(pair, _credit(pair, options), _for(settings, pair, options["reference"]))
            if as_json:
                console.emit(canon.dumps(schema.validate("impact", found.as_json(), where)))
                continue
            text = impact_text.lines(found)
            for line in text if first else ("", *text):
                console.emit(line)
            first = False


def _pairs(console: Console, paths: tuple[str, ...]) -> Iterator[tuple[str, Callable[[], Pair]]]:
    """(name, how to open it) of each pair: two files are one, everything else is an attempt each."""
    from libxd import pairs

    if any(os.path.isfile(path) for path in paths):
        yield " ".join(paths), lambda: pairs.of_files(paths)
        return
    for path in console.operands(paths, "attempts"):
        yield path, lambda path=path: _of_attempt(path)


def _of_attempt(path: str) -> Pair:
    from libxd import pairs, seal

    attempt = Attempt.open(path)
    seal.require_untampered(attempt)
    return pairs.of_attempt(attempt)


def _refuse_contradictions(options: dict[str, Any]) -> None:
    context = click.get_current_context()
    if options["advantages"] and options["rewards"]:
        raise click.UsageError("--advantages and --rewards exclude one another")
    if not options["rewards"]:
        for name in ("estimator", "group", "sequences", "overlong"):
            if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
                raise click.UsageError(f"--{name} is about rewards: give --rewards, too")
    if options["group"] and options["sequences"]:
        raise click.UsageError("--group and --sequences both say the groups: give one of them")
    if (options["beta"] is None) != (options["reference"] is None):
        raise click.UsageError("--beta and --reference belong together")


def _settings(options: dict[str, Any]) -> Settings:
    from libxd import impact_settings

    return impact_settings.Settings(
        impact_settings.objectives(options["epsilon"]), impact_settings.corrections(options["threshold"]),
        impact_settings.beta(options["beta"]),
    )  # fmt: skip


def _credit(pair: Pair, options: dict[str, Any]) -> Credit | None:
    from libxd import credit
    from libxd.columns import Layout

    layout = Layout(pair.cu_seqlens, pair.rollout.active_mask)
    if options["advantages"]:
        return credit.of_advantages(options["advantages"], layout)
    if not options["rewards"]:
        return None
    grouped = options["estimator"] in credit.GROUPED and options["group"] is None
    return credit.of_rewards(
        options["rewards"], layout, estimator=options["estimator"], group=options["group"],
        prompt_index=credit.prompt_index(pair, options["sequences"]) if grouped else None,
        overlong=options["overlong"],
    )  # fmt: skip


def _for(settings: Settings, pair: Pair, path: Path | None) -> Settings:
    """The settings with the reference of this pair."""
    from libxd import impact_settings

    return settings if path is None else impact_settings.with_reference(settings, pair, path)


main = console.entry(cli)
