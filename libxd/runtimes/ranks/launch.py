"""Which rank of a launcher's world this process is: torchrun's variables, or those of a Slurm step. No torch.

Under a launcher rank 0's xd-score does everything, and the others become its ranks. Without one, the scorer's child
starts the other ranks itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from libxd.errors import Status, XdError

#: variable of torchrun -> that of a Slurm step
_NAMES = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"}
#: where rank 0 listens; torchrun says so, srun does not
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
_GREATEST_PORT = 65535


@dataclass(frozen=True)
class Launch:
    """This process's place in a launcher's world; local_rank: among those of its machine."""

    rank: int
    world_size: int
    local_rank: int

    @property
    def variables(self) -> dict[str, str]:
        """The place as torchrun says it, whoever launched."""
        return {"RANK": str(self.rank), "WORLD_SIZE": str(self.world_size), "LOCAL_RANK": str(self.local_rank)}


def of(variables: Mapping[str, str]) -> Launch | None:
    """The place that a launcher's variables name; None without a launcher, or when it started one process alone.

    XdError 65 for variables that contradict themselves, or do not say where rank 0 listens.
    """
    for names in (_NAMES, _NAMES.values()):
        if not {*names} - {"LOCAL_RANK", "SLURM_LOCALID"} <= variables.keys():
            continue
        launch = Launch(*(_number(name, variables.get(name, "0")) for name in names))
        if launch.world_size == 1:
            return None
        if launch.rank >= launch.world_size:
            raise XdError("the launcher's rank is beyond its world", code="bad-variable", where="$RANK",
                          found=launch.rank, expected=f"below {launch.world_size}")  # fmt: skip
        for name in _ADDRESS:
            if variables.get(name) in (None, "", "0"):
                raise XdError("the launcher does not say where rank 0 listens", code="bad-variable", where=f"${name}",
                              hint="export MASTER_ADDR and MASTER_PORT, as torchrun does; without a launcher, unset "
                              + ", ".join(names))  # fmt: skip
        if _number("MASTER_PORT", variables["MASTER_PORT"]) > _GREATEST_PORT:
            raise XdError("no port", code="bad-variable", where="$MASTER_PORT", found=variables["MASTER_PORT"])
        return launch
    return None


def require_world(launch: Launch | None, world_size: int, where: str) -> None:
    """XdError 69 unless a launcher, where there is one, started as many ranks as a plan spreads its engine over."""
    if launch is not None and launch.world_size != world_size:
        raise XdError("the launcher started another number of ranks than this attempt's engine has",
                      status=Status.REFUSED, code="world-differs", where=where, found=launch.world_size,
                      expected=world_size, hint="launch as many ranks, or none (RANK and WORLD_SIZE unset): "
                      "xd-score starts its own")  # fmt: skip


def _number(name: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal()):
        raise XdError("no number", code="bad-variable", where=f"${name}", found=value)
    return int(value)
