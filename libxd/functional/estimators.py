"""How advantages are made of rewards: the names that may be asked for, and what each needs beside them. No numpy."""

from __future__ import annotations

#: name -> what it needs: "groups" of samples of one prompt, "values" of a critic, or nothing
NEEDS = {
    "grpo": "groups", "dr_grpo": "groups", "rloo": "groups", "reinforce_plus_plus": "",
    "reinforce_plus_plus_baseline": "groups", "gae": "values",
}  # fmt: skip
ESTIMATORS = tuple(NEEDS)
