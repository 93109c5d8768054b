"""`make -j4 run` of transformers on one GPU: how many engines were on it at once, with one slot and with two.

    python -P dev/check_slots.py                 # on a machine with a GPU, by an interpreter that has torch for it
    python -P dev/check_slots.py --dry-run       # the first of them on the CPU, where no engine waits: up to eight

A tiny random model, six cases in five groups or more. Exit 0: all cases were scored, and never were there more engines
on the device than it has slots; with two slots, there were two. 1: not so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT / "tests"))  # a tiny model, and tokens for it

JOBS = 4
_POLL_S = 0.05
_CHANGES = {"batch.size": [1], "rollout.dtype": ["bfloat16"], "training.compute_dtype": ["bfloat16"],
            "training.attention_backend": ["sdpa"]}  # fmt: skip


def main() -> int:
    """Run both and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU")
    parser.add_argument("--device", default="0", help="as CUDA_VISIBLE_DEVICES names it")
    chosen = parser.parse_args()
    held = True
    print(f"{'XD_DEVICES':<12} {'slots':>5} {'engines at once':>16} {'seconds':>8} {'answered':>9}")
    turns = [(chosen.device, 1), (f"{chosen.device},{chosen.device}", 2)]
    for value, slots in turns[:1] if chosen.dry_run else turns:
        with tempfile.TemporaryDirectory() as name:
            place = Path(name)
            rows = prepare(place, "cpu" if chosen.dry_run else "cuda")
            most, seconds, status = run(place, value)
            answered = len(list(place.glob("runs/slots/cases/*/*/COMPLETE")))
        held &= status == 0 and answered == rows and (chosen.dry_run or most == slots)
        print(f"{value:<12} {slots:>5} {most:>16} {seconds:>8.1f} {answered:>6}/{rows}", flush=True)
    print("held" if held else "did not hold")
    return 0 if held else 1


def prepare(place: Path, device: str) -> int:
    """The model, its tokens, the experiment and an environment for make; how many rows it has with its repeat."""
    from hf_fixtures import VOCABULARY, frozen, save_model

    from libxd import sequences

    save_model(place / "tiny")
    sequences.write(place / "tiny.safetensors", frozen())
    config = json.loads((ROOT / "experiments" / "smollm2-fp32.json").read_text())
    config |= {"experiment_id": "slots", "scenario_id": "slots-fp32"}
    config["scenario"] |= {"device": device}
    config["identity"] |= {
        "checkpoint": {"path": "tiny", "digest": None},
        "tokenizer": {"id": "none", "policy": "token_ids"},
        "sequences": {"path": "tiny.safetensors", "digest": None},
        "model": {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY},
    }
    config["baseline"]["training"]["attention_backend"] = "eager"
    config["interventions"] = [{"path": path, "values": values} for path, values in _CHANGES.items()]
    (place / "slots.json").write_text(json.dumps(config))
    environment = place / "venv"  # what runs this program, as an environment that make finds ready
    environment.mkdir()
    (environment / "bin").symlink_to(Path(sys.executable).parent)
    for stamp in (".base", ".ready"):
        (environment / stamp).touch()
    return 2 + len(_CHANGES)


def run(place: Path, devices: str) -> tuple[int, float, int]:
    """(most engines at once, seconds, status) of `make -j4 run`."""
    marker = f"XD_SLOTS_CHECK={place.name}"
    began = time.monotonic()
    with open(place / "log", "wb") as log:
        process = subprocess.Popen(
            ["make", "-C", ROOT, f"-j{JOBS}", "run", "EXP=slots", f"CONFIG={place / 'slots.json'}", "REPEATS=1",
             f"RUNS={place / 'runs'}", f"VENV={place / 'venv'}", "POLICY=--runtime hf"],
            stdout=log, stderr=subprocess.STDOUT,
            env={**os.environ, "XD_DEVICES": devices, "XD_PYTHON": sys.executable, "XD_SLOTS_CHECK": place.name},
        )  # fmt: skip
        most = 0
        while process.poll() is None:
            most = max(most, engines(marker))
            time.sleep(_POLL_S)
    if process.returncode:
        sys.stdout.write((place / "log").read_text(errors="replace"))
    return most, time.monotonic() - began, process.returncode


def engines(marker: str) -> int:
    """The scorers' children that are alive and were started by this program."""
    found = 0
    for entry in os.scandir("/proc"):
        try:
            if entry.name.isdecimal() and b"libxd.scoring.child" in Path(entry.path, "cmdline").read_bytes():
                found += marker.encode() in Path(entry.path, "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
    return found


if __name__ == "__main__":
    if shutil.which("make") is None:
        sys.exit("make is needed")
    sys.exit(main())
