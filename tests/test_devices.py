"""Which devices engines may be given, by the driver and by two variables."""

from __future__ import annotations

import ctypes
import sys
import uuid

import pytest

from libxd import devices
from libxd.devices import Device
from libxd.errors import Status, XdError

KEYS = ["aaaa-1", "bbbb-2", "cccc-3"]


@pytest.fixture
def driver(monkeypatch):
    """driver(keys): what it shows; None: there is none."""

    def shows(keys):
        monkeypatch.setattr(devices, "_driver_keys", lambda visible: keys)

    return shows


def names(**variables):
    return [device.name for device in devices.of(variables)]


@pytest.mark.parametrize("value", ["", " ", "\t"])
def test_an_empty_variable_is_as_none(driver, value):
    driver(KEYS)
    assert names(XD_DEVICES=value) == names() == ["0", "1", "2"]


@pytest.mark.parametrize(
    "value", ["0,", ",", "0,,1", "-1", "01", "0 1", "0;1", "gpu0", "cuda:0", "0x1", "1.0", "GPU-", "all", "0,\n", "٣",
              "GPU-../../etc", "9" * 300, "0,1,GPU_3", "99999"],
)  # fmt: skip
def test_what_is_no_list_of_devices_is_one_line(value):
    with pytest.raises(XdError) as caught:
        devices.of({"XD_DEVICES": value})
    assert (caught.value.status, caught.value.code, caught.value.where) == (
        Status.INVALID, "bad-variable", "$XD_DEVICES")  # fmt: skip
    assert len(caught.value.line().splitlines()) == 1


def test_without_a_variable_all_that_the_driver_shows(driver):
    driver(KEYS)
    assert devices.of({}) == [Device("0", "aaaa-1"), Device("1", "bbbb-2"), Device("2", "cccc-3")]
    driver([])
    assert devices.of({}) == []


def test_a_device_named_twice_is_there_twice(driver):
    driver(KEYS)
    assert names(XD_DEVICES="2, 0,2") == ["2", "0", "2"]


def test_names_are_those_of_what_is_visible(driver):
    driver(KEYS[:2])
    assert devices.of({"CUDA_VISIBLE_DEVICES": "5,7"}) == [Device("5", "aaaa-1"), Device("7", "bbbb-2")]
    assert names(CUDA_VISIBLE_DEVICES="5,7", XD_DEVICES="7") == ["7"]
    with pytest.raises(XdError, match="not visible") as caught:
        devices.of({"CUDA_VISIBLE_DEVICES": "5,7", "XD_DEVICES": "0"})
    assert (caught.value.status, caught.value.expected) == (Status.INVALID, ["5", "7"])


def test_a_device_is_the_same_by_ordinal_and_by_uuid(driver):
    driver(KEYS)
    by_uuid, by_ordinal = devices.of({"XD_DEVICES": "GPU-bbbb,1"})
    assert by_uuid == by_ordinal == Device("1", "bbbb-2")
    assert by_uuid != devices.of({"XD_DEVICES": "GPU-aaaa"})[0]


@pytest.mark.parametrize(("visible", "found"), [("", []), ("-1", []), ("NoDevFiles", []), ("1,-1,2", ["1"]),
                                                ("1,1", ["1"]), ("1, 2", ["1", "2"])])  # fmt: skip
def test_the_first_name_that_is_none_ends_the_visible_ones(driver, visible, found):
    driver(None)
    assert names(CUDA_VISIBLE_DEVICES=visible) == found


def test_without_a_driver_names_are_believed(driver):
    driver(None)
    assert names() == []
    assert devices.of({"XD_DEVICES": "0,3"}) == [Device("0", "0"), Device("3", "3")]


def test_the_driver_is_asked_in_a_process_of_its_own_and_no_torch_comes_in(tmp_path, monkeypatch):
    """A driver that was initialised in this process would know no other CUDA_VISIBLE_DEVICES."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "seen-${CUDA_VISIBLE_DEVICES-unset}"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert devices.of({"CUDA_VISIBLE_DEVICES": "6"}) == [Device("6", "seen-6")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    assert devices.of({}) == [Device("0", "seen-unset")]


class Driver:
    """As much of the CUDA driver library as is asked of it."""

    def __init__(self, count, failing=None, status=0):
        self.count, self.failing, self.status = count, failing, status

    def __getattr__(self, function):
        def answer(*arguments):
            if function == self.failing:
                return self.status
            if function == "cuDeviceGetCount":
                arguments[0]._obj.value = self.count
            elif function == "cuDeviceGet":
                arguments[0]._obj.value = arguments[1] + 40  # a handle, which need be no ordinal
            elif function == "cuDeviceGetUuid_v2":
                arguments[0]._obj[:] = bytes([arguments[1].value] * 16)
            return 0

        return answer


@pytest.mark.parametrize(("driver", "found"), [
    (Driver(2), [str(uuid.UUID(bytes=bytes([40 + ordinal] * 16))) for ordinal in (0, 1)]), (Driver(0), []),
    (Driver(1, "cuInit", 100), []), (Driver(1, "cuInit", 3), None), (Driver(1, "cuDeviceGetCount", 3), None),
    (Driver(1, "cuDeviceGetUuid_v2", 101), None),
], ids=["two", "none", "no device", "not initialised", "no count", "no uuid"])  # fmt: skip
def test_what_the_driver_says(monkeypatch, driver, found):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert devices._uuids() == found


def test_no_driver_says_nothing(monkeypatch):
    def absent(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert devices._uuids() is None
