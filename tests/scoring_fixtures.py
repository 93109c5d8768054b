"""A bench for xd-score: rows whose synthetic checkpoint scripts the engine, materialised as a user would."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import scripted_engine
from materialize_fixtures import row, signed

from libxd import canon, sequences
from libxd.rundir import Attempt
from libxd.sequences import Sequences

HERE = Path(__file__).resolve().parent


def frozen(first_id: int = 5) -> Sequences:
    """Three sequences of 4, 5 and 3 tokens, their last two active."""
    lengths = [4, 5, 3]
    cu_seqlens = np.cumsum([0, *lengths], dtype=np.int64)
    total = int(cu_seqlens[-1])
    prompt_lens = np.array(lengths, np.int32) - 2
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    active = np.concatenate([np.arange(length) >= length - 2 for length in lengths])
    return Sequences(
        token_ids=(np.arange(total, dtype=np.int32) * 7 + first_id) % scripted_engine.VOCABULARY,
        cu_seqlens=cu_seqlens, active_mask=active, attention_mask=np.ones(total, bool), positions=positions,
        prompt_lens=prompt_lens, prompt_index=np.arange(3, dtype=np.int32),
        logprobs=np.where(active, np.float32(-1), np.float32(np.nan)),
    )  # fmt: skip


class Bench:
    """One temporary place with a sequences file, the scripted runtime installed, and the tools."""

    def __init__(self, xd: Any, place: Path) -> None:
        self.xd = xd
        self.place = place
        metadata = place / "site" / "xd_scripted_engine-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: xd-scripted-engine\nVersion: 1.0\n")
        self.entries = metadata / "entry_points.txt"
        self.entries.write_text(
            "[xd.runtimes]\nscripted = scripted_engine:ScriptedRuntime\n"
            f"[xd.operators]\n{scripted_engine.BACKEND} = scripted_engine:DESCRIPTOR\n"
        )
        self.environment = {"PYTHONPATH": f"{metadata.parent}{os.pathsep}{HERE}"}
        self.sequences = place / "sequences.safetensors"
        sequences.write(self.sequences, frozen())

    def case(self, script: str = "plain", change: tuple[str, Any] | None = None, **options: Any) -> dict[str, Any]:
        """A row whose engine follows the script."""
        made = row(change, operators=dict.fromkeys(("rollout", "training"), scripted_engine.BACKEND), **options)
        synthetic = {"name": script, "seed": 7}
        made["identity"]["checkpoint"] = {"digest": canon.digest(synthetic), "files": {}, "synthetic": synthetic}
        made["identity"]["sequences"] = sequences.identity(self.sequences)
        made["locations"]["sequences"] = str(self.sequences)
        return signed(made)

    def materialize(self, *rows: dict[str, Any]) -> list[str]:
        """Attempt paths, relative to the place."""
        text = "".join(canon.dumps(each).decode() + "\n" for each in rows)
        ran = self.xd("xd-materialize", "--runs", "runs", "--runtime", "scripted", stdin=text, env=self.environment)
        assert ran.status == 0, ran.err
        return ran.out.splitlines()

    def attempts(self, *scripts: str) -> list[str]:
        """A materialised attempt a script."""
        return self.materialize(*(self.case(script) for script in scripts))

    def score(self, *arguments: str, side: str = "rollout", stdin: str = "", **environment: str) -> Any:
        return self.xd("xd-score", "--side", side, *arguments, stdin=stdin, env={**self.environment, **environment})

    def open(self, path: str) -> Attempt:
        return Attempt.open(self.place / path)

    def files(self, path: str) -> set[str]:
        """What stands in an attempt beside what materialising left."""
        return set(os.listdir(self.place / path)) - {"requested.json", "identity.json", "materialized.json"}
