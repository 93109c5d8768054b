"""Head: logits rounded on one side alone."""

from __future__ import annotations

from libxd.doctor.evidence import Evidence
from libxd.doctor.finding import SHAPE, Finding, Rule
from libxd.rundir import SIDES

RULE = Rule(
    "head",
    ("head-rounding",),
    "The two sides hold parameters of one dtype, and their heads gave logits of different ones. What no file says "
    "needs logits: third-scorer compares with logits rounded to bfloat16 and float16, and shows how the difference "
    "goes with |logit|.",
    "None: a fact; whether it is the cause is not.",
)


def examine(evidence: Evidence) -> Finding | None:
    logits = [file.metadata["dtypes"]["logits"] for file in evidence.files]
    parameters = set(evidence.dtypes.values())
    if None in logits or None in parameters or len(parameters) > 1 or logits[0] == logits[1]:
        return None
    said = ", ".join(f"{dtype} on {side}" for side, dtype in zip(SIDES, logits, strict=True))
    return Finding("head-rounding", SHAPE, "the heads give logits of different dtypes", [
        f"parameters in {parameters.pop()} on both sides, logits in {said}",
        "a bfloat16 logit between 16 and 32 is a multiple of 0.125",
    ], ["compute logits in float32 on both sides: a head with float32 output", evidence.rescoring])  # fmt: skip
