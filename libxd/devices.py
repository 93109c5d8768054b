"""Which accelerators engines may be given: what is visible, or of that what XD_DEVICES names.

`python -P -m libxd.devices` prints the UUIDs of the devices that the CUDA driver shows, a line each: a driver that was
initialised knows no other CUDA_VISIBLE_DEVICES any more, so it is asked in a process of its own. No torch.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from libxd import environment
from libxd.errors import Status, XdError

#: policy: devices by name, as CUDA_VISIBLE_DEVICES names them; one that stands there twice has two slots
VARIABLE = "XD_DEVICES"
VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
#: an ordinal, or a UUID of a device or of a part of one; the driver takes the beginning of a UUID for the whole
_NAME = re.compile(r"(?:0|[1-9][0-9]{0,3}|(?:GPU|MIG)-[0-9A-Za-z/-]{1,100})\Z")
_ASK_TIMEOUT_S = 60.0
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


@dataclass(frozen=True)
class Device:
    """name: as CUDA_VISIBLE_DEVICES takes it. key: what tells it from others, whatever it is called."""

    name: str
    key: str


def named(variables: Mapping[str, str]) -> list[str]:
    """The names in XD_DEVICES, one a slot; none when it is not set. XdError 65 for what is no list of devices."""
    given = variables.get(VARIABLE, "").strip()
    if not given:
        return []
    names = [name.strip() for name in given.split(",")]
    for name in names:
        if not _NAME.match(name):
            raise XdError("names no device", code="bad-variable", where=f"${VARIABLE}", found=name,
                          expected="ordinals or UUIDs with commas between them, as 0,1 or 0,0",
                          hint="one that is named twice serves two engines; unset, all visible ones serve one each")
    return names


def of(variables: Mapping[str, str]) -> list[Device]:
    """The devices there are for engines, each as often as engines may share it, in the order in which they are named.

    XdError 65 for XD_DEVICES that names what is not visible. Where no driver can be asked, names are believed.
    """
    names, visible = named(variables), _visible(variables)
    if visible is None:
        return [Device(name, name) for name in names]
    return [_among(visible, name) for name in names] if names else visible


def _visible(variables: Mapping[str, str]) -> list[Device] | None:
    """The devices that an engine would see; None: neither a driver nor a variable says."""
    visible = variables.get(VISIBLE_VARIABLE)
    names = None if visible is None else _leading_names(visible)
    keys = _driver_keys(visible)
    if keys is None:
        return None if names is None else [Device(name, name) for name in names]
    if names is None:
        names = [str(ordinal) for ordinal in range(len(keys))]
    return [Device(name, key) for name, key in zip(names, keys, strict=False)]


def _leading_names(value: str) -> list[str]:
    """As the driver reads CUDA_VISIBLE_DEVICES: the first name that is none ends it."""
    names: list[str] = []
    for name in (part.strip() for part in value.split(",")):
        if not _NAME.match(name) or name in names:
            break
        names.append(name)
    return names


def _among(visible: list[Device], name: str) -> Device:
    unique = name.partition("-")[2]  # of GPU-… and MIG-…; an ordinal has none
    for device in visible:
        if device.name == name or (unique and device.key.startswith(unique)):
            return device
    raise XdError("names a device that is not visible", code="bad-variable", where=f"${VARIABLE}", found=name,
                  expected=[device.name for device in visible], hint=f"${VISIBLE_VARIABLE} hides devices")  # fmt: skip


@functools.cache
def _driver_keys(visible: str | None) -> list[str] | None:
    """UUIDs of the devices that the driver shows under this CUDA_VISIBLE_DEVICES; None: there is no driver."""
    variables = {key: value for key, value in os.environ.items() if key != VISIBLE_VARIABLE}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "libxd.devices"], capture_output=True, check=False, timeout=_ASK_TIMEOUT_S,
            env=variables if visible is None else {**variables, VISIBLE_VARIABLE: visible},
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise XdError(f"the driver does not say which devices there are: no answer in {_ASK_TIMEOUT_S:g} s",
                      status=Status.RETRY, code="no-driver", where=environment.CUDA_LIBRARY) from error
    return done.stdout.decode().split() if done.returncode == 0 else None


def _uuids() -> list[str] | None:
    """CUDA driver API: cuDeviceGetUuid of each visible device. None without a driver."""
    try:
        driver = ctypes.CDLL(environment.CUDA_LIBRARY)
    except OSError:
        return None
    count, device, raw = ctypes.c_int(), ctypes.c_int(), (ctypes.c_ubyte * 16)()
    failed = driver.cuInit(0)
    if failed == _NO_DEVICE:
        return []
    if failed or driver.cuDeviceGetCount(ctypes.byref(count)):
        return None
    found = []
    for ordinal in range(count.value):
        if driver.cuDeviceGet(ctypes.byref(device), ordinal) or driver.cuDeviceGetUuid_v2(ctypes.byref(raw), device):
            return None
        found.append(str(uuid.UUID(bytes=bytes(raw))))
    return found


if __name__ == "__main__":
    answer = _uuids()
    if answer is None:
        sys.exit(1)
    sys.stdout.write("".join(f"{key}\n" for key in answer))
