"""A rank other than the first: does what rank 0 asks of all, prints nothing but what goes wrong, ends with rank 0.

    RANK=1 WORLD_SIZE=2 MASTER_ADDR=… MASTER_PORT=… python -P -m libxd.runtimes.ranks.worker --side rollout
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import traceback
from typing import Any, NoReturn

from libxd.errors import Status, XdError
from libxd.rundir import SIDES
from libxd.scoring.child import end_with_parent
from libxd.scoring.scorer import as_xd_error


def main() -> None:
    """Serve until rank 0 closes the world. Under a launcher it stands for xd-score, and ends with its statuses."""
    parser = argparse.ArgumentParser(prog="libxd.runtimes.ranks.worker", description=__doc__)
    parser.add_argument("--side", choices=SIDES, required=True)
    parser.add_argument("--parent", type=int, help="end with this process")
    arguments = parser.parse_args()
    if arguments.parent is not None:
        end_with_parent(arguments.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches xd-score, which ends the scorer
    from libxd.runtimes.ranks.group import QUEUE_S, Group

    said_by = "" if arguments.parent is not None else f"xd-score: rank {os.environ['RANK']}: "
    try:
        group = Group.join(arguments.side, QUEUE_S)
        serve(group)
    except Exception as error:
        _leave(said_by, as_xd_error(error))
    group.leave()


def serve(group: Any) -> None:
    """Commands, one after the other, until `close`; what is refused is refused by all ranks alike, and told so.

    XdError for whatever else fails, after rank 0 has been told; 75 when rank 0 is gone.
    """
    from libxd.runtimes.ranks.rank import Rank

    me, serial, command = Rank(), 1, ""  # 1 was meeting
    while command != "close":
        try:
            command, arguments = group.receive()
        except RuntimeError as error:  # gloo's, of a connection that is closed
            raise XdError("rank 0 is gone", status=Status.RETRY, code="rank-died") from error
        serial += 1
        try:
            outcome = me.do(command, *arguments)
        except XdError as error:
            group.store.set(f"refused/{serial}/{group.rank}", _record(group.rank, error))
            group.store.wait([f"over/{serial}"])
            continue
        except Exception as error:
            if os.environ.get("XD_DEBUG") == "1":
                traceback.print_exception(error)
            failure = as_xd_error(error)
            if group.store.add("failures", 1) == 1:  # those that come after it fail because of it
                group.store.set("failed", _record(group.rank, failure))
            raise failure from error
        group.gather(outcome)


def _record(rank: int, error: XdError) -> str:
    return json.dumps({**error.record(), "message": f"rank {rank}: {error.message}"})


def _leave(said_by: str, error: XdError) -> NoReturn:
    """Leave without the clean-up of libraries that wait for ranks which do not answer."""
    sys.stderr.write(f"{said_by}{error.line()}\n")
    sys.stderr.flush()
    os._exit(error.status)


if __name__ == "__main__":
    main()
