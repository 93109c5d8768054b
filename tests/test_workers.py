"""What the suite asks of pytest-xdist: that the tests of a group run in one worker, one after the other."""

from __future__ import annotations

import pytest


@pytest.mark.xdist_group("workers")
def test_a_group_reaches_the_scheduler(request):
    """It goes by the end of a test's id. Without that, each worker starts the engines of a group for itself."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("one process, or no --dist loadgroup")
    assert request.node.nodeid.endswith("@workers")
