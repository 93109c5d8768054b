"""Foreign packages: named when they do not load, refused when two claim one name."""

from __future__ import annotations

import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

from libxd import plugins
from libxd.errors import Status, XdError
from libxd.runtimes import registry

GROUP = "xd.runtimes"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """install(package, name, value, source): a package whose entry point it is, its module written from source."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(package: str, name: str, value: str, source: str = "") -> None:
        (tmp_path / f"{value.partition(':')[0]}.py").write_text(source)
        metadata = tmp_path / f"{package}-1.2.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
        (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {value}\n")
        assert any(found.name == package for found in distributions(path=[str(tmp_path)]))

    def forget() -> None:
        plugins._installed.cache_clear()
        plugins.entries.cache_clear()

    forget()
    yield install
    forget()
    sys.modules.pop("their_engine", None)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def", "SyntaxError"),
        ("raise ValueError('two\\nlines')", "ValueError: two lines"),
        ("import no_such_module", "ModuleNotFoundError"),
        ("", "AttributeError"),
    ],
)
def test_what_does_not_load_is_named_with_its_package(install, source, said):
    install("their-package", "theirs", "their_engine:RUNTIME", source)
    with pytest.raises(XdError) as caught:
        plugins.load("runtime", plugins.entries(GROUP)["theirs"])
    assert caught.value.status == Status.BUG
    line = caught.value.line()
    assert "runtime theirs cannot be loaded" in line
    assert said in line
    assert "their_engine:RUNTIME of their-package 1.2" in line


def test_what_loads_is_given(install):
    install("their-package", "theirs", "their_engine:RUNTIME", "RUNTIME = 7")
    assert plugins.load("runtime", plugins.entries(GROUP)["theirs"]) == 7


def test_two_packages_with_one_name_are_refused(install):
    install("their-package", "theirs", "their_engine:RUNTIME")
    install("other-package", "theirs", "other_engine:RUNTIME")
    with pytest.raises(XdError, match="two packages install theirs") as caught:
        plugins.entries(GROUP)
    assert "other-package 1.2 and their_engine:RUNTIME of their-package 1.2" in caught.value.line()


def test_one_entry_that_two_packages_share_is_one(install):
    install("their-package", "theirs", "their_engine:RUNTIME")
    install("their-package-renamed", "theirs", "their_engine:RUNTIME")
    assert "theirs" in plugins.entries(GROUP)


def test_a_mistake_that_was_named_keeps_its_words(install):
    mistake = "XdError('is wrong', path='/dtypes', found='bf16', expected='bfloat16')"
    source = f"from libxd.errors import XdError\nraise {mistake}"
    install("their-package", "theirs", "their_engine:RUNTIME", source)
    with pytest.raises(XdError) as caught:
        plugins.load("operator", plugins.entries(GROUP)["theirs"])
    assert "operator theirs cannot be loaded: #/dtypes: is wrong (found bf16, expected bfloat16)" in caught.value.line()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("class RUNTIME:\n    name = 'theirs'", "runtime theirs lacks a part of the protocol: version, sides"),
        ("class RUNTIME:\n    def __init__(self):\n        raise OSError('no licence')", "made: OSError: no licence"),
    ],
)
def test_a_runtime_that_is_none_is_named_before_it_is_used(install, source, said):
    install("their-package", "theirs", "their_engine:RUNTIME", source)
    registry.load.cache_clear()
    with pytest.raises(XdError) as caught:
        registry.load("theirs")
    assert (caught.value.status, said in caught.value.line()) == (Status.BUG, True)
    assert "their_engine:RUNTIME of their-package 1.2" in caught.value.line()
