"""Arrays that grow at their end and lie in unnamed files: what is held of a dump of any size is what was read last."""

from __future__ import annotations

import contextlib
import mmap
import tempfile
from typing import IO

import numpy as np

from libxd.errors import XdError, of_exception

_BUFFER = 1 << 18  # bytes an array


class Spool:
    """Named arrays, each of one dtype, in files in $TMPDIR. It is closed at the end of its `with`, and arrays that were
    asked for outlive it; a file is gone with the last array of it."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[IO[bytes], np.dtype]] = {}

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        for file, _dtype in self._files.values():
            with contextlib.suppress(OSError):  # a disk that is full has been spoken of
                file.close()

    def append(self, name: str, values: np.ndarray) -> None:
        """XdError 73 where there is no room."""
        try:
            if name not in self._files:
                self._files[name] = (tempfile.TemporaryFile(buffering=_BUFFER), values.dtype)  # noqa: SIM115
            file, dtype = self._files[name]
            assert values.dtype == dtype, f"{name} is {dtype}, not {values.dtype}"
            file.write(np.ascontiguousarray(values).data)
        except OSError as error:
            raise self._full(error) from error

    def array(self, name: str) -> np.ndarray:
        """All that was appended [n], read-only, mapped from its file."""
        file, dtype = self._files[name]
        try:
            file.flush()
            if not file.tell():
                return np.empty(0, dtype)
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype)
        except OSError as error:
            raise self._full(error) from error

    def _full(self, error: OSError) -> XdError:
        return of_exception(error, tempfile.gettempdir())
