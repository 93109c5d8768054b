"""xd-impact: say what the difference between two sides does to a policy update."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from libxd import console
from libxd.cmd.difference_operands import Given, given
from libxd.console import PATH, Console
from libxd.functional.estimators import ESTIMATORS, NEEDS

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


@console.command("xd-impact", EXAMPLES)
@click.argument("paths", nargs=-1, metavar="[ATTEMPT]... | SCORES SCORES")
@click.option("--json", "as_json", is_flag=True, help="Print each impact as a line of JSON, not as text.")
@click.option(
    "--advantages", type=PATH, metavar="FILE",
    help="Advantages, a sequence or a token each: JSONL, CSV, Parquet, safetensors; named advantage or advantages.",
)  # fmt: skip
@click.option(
    "--rewards", type=PATH, metavar="FILE", help="Rewards, one a sequence, in such a file: advantages are made of them."
)
@click.option(
    "--estimator", type=click.Choice(ESTIMATORS), default=ESTIMATORS[0], show_default=True,
    help="How advantages are made of rewards.",
)  # fmt: skip
@click.option("--values", type=PATH, metavar="FILE", help="A critic's values, a token each, in such a file, for gae.")
@click.option(
    "--discount", type=float, nargs=2, metavar="GAMMA LAMBDA", default=(1.0, 1.0), show_default=True,
    help="The discounts of gae.",
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
    for operand in given(console, paths):
        with console.guard(operand.where):
            pair = _pair(operand)
            found = impact.of_pair(pair, _credit(pair, options), _for(settings, pair, options["reference"]))
            if as_json:
                console.emit(canon.dumps(schema.validate("impact", found.as_json(), operand.where)))
                continue
            text = impact_text.lines(found)
            for line in text if first else ("", *text):
                console.emit(line)
            first = False


def _pair(operand: Given) -> Pair:
    from libxd import pairs, seal

    attempt = operand.attempt()
    if attempt is None:
        return pairs.of_files(operand.files)
    seal.require_untampered(attempt)
    return pairs.of_attempt(attempt)


def _refuse_contradictions(options: dict[str, Any]) -> None:
    context = click.get_current_context()
    if options["advantages"] and options["rewards"]:
        raise click.UsageError("--advantages and --rewards exclude one another")
    if not options["rewards"]:
        for name in ("estimator", "values", "discount", "group", "sequences", "overlong"):
            if _is_given(context, name):
                raise click.UsageError(f"--{name} is about rewards: give --rewards, too")
    of_values = NEEDS[options["estimator"]] == "values"
    if of_values != bool(options["values"]) or (not of_values and _is_given(context, "discount")):
        raise click.UsageError("--values and --discount are gae's, and gae needs --values: --estimator gae")
    if options["group"] and NEEDS[options["estimator"]] != "groups":
        raise click.UsageError(f"{options['estimator']} compares no groups: --group says nothing to it")
    if options["group"] and options["sequences"]:
        raise click.UsageError("--group and --sequences both say the groups: give one of them")
    if (options["beta"] is None) != (options["reference"] is None):
        raise click.UsageError("--beta and --reference belong together")


def _is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT


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
    if options["values"]:
        gamma, lam = options["discount"]
        return credit.of_values(
            options["rewards"], options["values"], layout, gamma=gamma, lam=lam, overlong=options["overlong"]
        )
    grouped = NEEDS[options["estimator"]] == "groups" and options["group"] is None
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
