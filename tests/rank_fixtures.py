"""A chain over a tiny random Llama whose engines are spread over ranks: rows by what they change, and its attempts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from conftest import ROOT, Tools
from hf_fixtures import VOCABULARY, frozen, save_model

from libxd import sequences

ENGINES = ROOT / "tests" / "engines"
CHANGES = ("rollout.tensor_parallel_size", "rollout.context_parallel_size", "training.sharding")
SIDE_OF = {change: change.partition(".")[0] for change in CHANGES}


class RankChain:
    """Rows of one experiment in float32: the baseline (None), and one a change over two ranks."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._tools = Tools(place)
        self._environment = {"PYTHONPATH": str(ENGINES)}
        save_model(place / "tiny")
        sequences.write(place / "tiny.safetensors", frozen())
        config = json.loads((ROOT / "experiments" / "smollm2-fp32.json").read_text())
        config |= {"experiment_id": "ranks", "scenario_id": "ranks-fp32"}
        config["identity"] |= {
            "checkpoint": {"path": "tiny", "digest": None},
            "tokenizer": {"id": "none", "policy": "token_ids"},
            "sequences": {"path": "tiny.safetensors", "digest": None},
            "model": {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY},
        }
        config["interventions"] = [
            {"path": change, "values": ["fsdp" if change == "training.sharding" else 2]} for change in CHANGES
        ]
        (place / "ranks.json").write_text(json.dumps(config))
        rows = self.run("xd-plan", "ranks.json").splitlines()
        self.rows = {
            next((change["path"] for change in json.loads(row)["intervention"]), None): row for row in rows
        }

    def ran(self, tool: str, *arguments: object, stdin: str = "", **environment: str) -> Any:
        return self._tools(tool, *arguments, stdin=stdin, env={**self._environment, **environment})

    def run(self, tool: str, *arguments: object, stdin: str = "", status: int = 0, **environment: str) -> str:
        done = self.ran(tool, *arguments, stdin=stdin, **environment)
        assert done.status == status, done.err
        return done.out

    def attempt(self, change: str | None, runtime: str = "hf", **environment: str) -> str:
        """A materialised attempt, relative to the place; the runtime serves the side that the change is of."""
        side = SIDE_OF.get(change or "", "rollout")
        other = "training" if side == "rollout" else "rollout"
        return self.run("xd-materialize", "--runs", "runs", f"--runtime-{side}", runtime, f"--runtime-{other}", "hf",
                        stdin=self.rows[change] + "\n", **environment).strip()  # fmt: skip

    def read(self, attempt: str, name: str) -> dict[str, Any]:
        return json.loads((self.place / attempt / name).read_text())

    def files(self, attempt: str) -> set[str]:
        """What stands in an attempt beside what materialising left."""
        return set(os.listdir(self.place / attempt)) - {"requested.json", "identity.json", "materialized.json"}


def ranks_of(marker: str) -> list[int]:
    """The processes alive that have this in their environment, and are ranks or scorers."""
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        try:
            variables = (process / "environ").read_bytes()
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if marker.encode() in variables and (b"libxd.runtimes.ranks.worker" in command or b"scoring.child" in command):
            found.append(int(process.name))
    return found
