"""What the suite asks of pytest and pytest-xdist."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.xdist_group("workers")
def test_a_group_reaches_the_scheduler(request):
    """It goes by the end of a test's id. Without that, each worker starts the engines of a group for itself."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("one process, or no --dist loadgroup")
    assert request.node.nodeid.endswith("@workers")


@pytest.mark.parametrize("data", [b"x" * (1 << 20), "x" * (1 << 20)])
def test_a_long_parameter_stays_out_of_the_environment(data):
    """A test with a long parameter may start processes."""
    assert len(os.environ["PYTEST_CURRENT_TEST"]) < 4096 < len(data)
    subprocess.run([sys.executable, "-c", ""], check=True)
