"""The numerical contract: the one place a threshold comes from."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from libxd import canon, contracts, schema, strictjson
from libxd.errors import XdError
from libxd.knobs import DTYPES


@dataclass(frozen=True)
class Contract:
    """One numerical contract. `digest` is that of its file's canonical content; it enters every case id."""

    source: str
    version: str
    digest: str
    thresholds_nats: dict[str, float]
    meaning: str

    def threshold(self, dtype: str) -> float:
        """The threshold in nats for `dtype`, rounded to float32, the precision it is compared in."""
        return float32(self.thresholds_nats[dtype])


def float32(value: float) -> float:
    """The nearest float32, as a Python float."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


def looser(a: str, b: str) -> str:
    """The dtype of two that is judged by the wider threshold."""
    return max(a, b, key=DTYPES.index)


@cache
def _load(source: str) -> Contract:
    path = Path(next(iter(contracts.__path__))) / f"{source}.json"
    data = schema.validate("numerical_contract", strictjson.load(path), str(path))
    return Contract(data["source"], data["version"], canon.digest(data), data["thresholds_nats"], data["meaning"])


def sources() -> list[str]:
    """The contracts there are."""
    return sorted(path.stem for path in Path(next(iter(contracts.__path__))).glob("*.json"))


def lookup(source: str, version: str, where: str = "", path: str = "") -> Contract:
    """The contract of a source; version "current" is its newest. XdError for one that does not exist."""
    if source not in sources():
        raise XdError(
            "unknown numerical contract",
            code="unknown-contract",
            where=where,
            path=f"{path}/contract_source",
            found=source,
            expected=" or ".join(sources()),
        )
    found = _load(source)
    if version not in ("current", found.version):
        raise XdError(
            "unknown version of a numerical contract",
            code="unknown-contract",
            where=where,
            path=f"{path}/contract_version",
            found=version,
            expected=f"current or {found.version}",
        )
    return found


def from_row(binding: dict[str, str], where: str) -> Contract:
    """The contract a plan row was bound to; refused when the file in this installation is another one."""
    found = lookup(binding["source"], binding["version"], where, "/contract")
    if found.digest != binding["digest"]:
        raise XdError(
            "the numerical contract has changed since planning",
            code="contract-changed",
            where=where,
            path="/contract/digest",
            found=binding["digest"],
            expected=found.digest,
            hint="plan the experiment again",
        )
    return found
