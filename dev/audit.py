"""What of the installed packages can be audited without a network: pins, ranges, files, licences, origins.

    python -P dev/audit.py            # `make audit`: of everything that constraints.txt pins

Known vulnerabilities are in databases elsewhere: `pip-audit -r constraints.txt --no-deps` asks them over a network.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
#: vllm pins its own torch and lives in an environment of its own (constraints-vllm.txt)
ELSEWHERE = ("vllm",)
#: what `make setup` leaves out and a target of its own adds
ADDED = ("fuzz",)
#: words of a licence's metadata by which xd may be installed with it, and passed on as it is
FREE = ("apache", "mit", "bsd", "isc", "psf", "python software foundation", "matplotlib", "mpl-2.0",
        "mozilla public license 2.0", "cc0", "unlicense", "hpnd", "zlib", "dual license")  # fmt: skip


def requirements() -> dict[str, list[Requirement]]:
    """Of pyproject.toml: base under "", and each extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    return {group: [Requirement(line) for line in lines] for group, lines in groups.items()}


def pins(path: Path = ROOT / "constraints.txt") -> dict[str, Version]:
    """Name -> the one version that is allowed."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    pinned = (line.split("==") for line in lines if line)
    return {canonicalize_name(name): Version(version) for name, version in pinned}


def closure(wanted: Iterable[Requirement]) -> dict[str, metadata.Distribution]:
    """What these requirements bring along here, by canonical name; as installed, markers of this machine."""
    found: dict[str, metadata.Distribution] = {}
    waiting = [(requirement, "") for requirement in wanted]
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for part in ("", *requirement.extras):
            if (name, part) in seen:
                continue
            seen.add((name, part))
            found[name] = metadata.distribution(requirement.name)
            waiting += [(Requirement(line), part) for line in found[name].requires or []]
    return found


def here() -> dict[str, metadata.Distribution]:
    """All that `make setup` installs, and what that brings along."""
    groups = requirements()
    left_out = ELSEWHERE + ADDED
    return closure(requirement for group in groups if group not in left_out for requirement in groups[group])


def unpinned(installed: dict[str, metadata.Distribution], pinned: dict[str, Version]) -> Iterator[str]:
    """What is installed in another version than the pinned one, or pinned in none."""
    for name, found in sorted(installed.items()):
        if name not in pinned:
            yield f"{name} {found.version} is not pinned"
        elif Version(found.version).public != pinned[name].public:
            yield f"{name} is {found.version}, pinned {pinned[name]}"


def stale(installed: dict[str, metadata.Distribution], pinned: dict[str, Version]) -> Iterator[str]:
    """Pins that nothing asks for."""
    added = {canonicalize_name(requirement.name) for group in ADDED for requirement in requirements()[group]}
    left = pinned.keys() - installed.keys() - added
    yield from (f"{name} is pinned, and nothing asks for it" for name in sorted(left))


def out_of_range(pinned: dict[str, Version]) -> Iterator[str]:
    """Pins that pyproject.toml does not allow, or names without one."""
    for group, wanted in requirements().items():
        for requirement in wanted if group not in ELSEWHERE else ():
            name = canonicalize_name(requirement.name)
            if name not in pinned or pinned[name] not in requirement.specifier:
                yield f"{requirement} of {group or 'the base'}: pinned {pinned.get(name)}"


def unsatisfied(installed: dict[str, metadata.Distribution]) -> Iterator[str]:
    """Requirements between the installed ones that do not hold, as `pip check` finds them."""
    for name, found in sorted(installed.items()):
        for line in found.requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                other = installed.get(canonicalize_name(requirement.name))
                if other is None or not requirement.specifier.contains(other.version, prereleases=True):
                    yield f"{name} asks for {requirement}, and there is {other.version if other else 'none'}"


def changed_files(found: metadata.Distribution) -> Iterator[str]:
    """Files of a package that are not those of its wheel, by the digests that its RECORD holds."""
    name, counted = found.metadata["Name"], 0
    for file in found.files or []:
        if file.hash is None or ".." in file.parts:  # scripts are written by pip, for this interpreter
            continue
        counted += 1
        path = Path(str(found.locate_file(file)))
        digest = hashlib.file_digest(path.open("rb"), file.hash.mode).digest() if path.is_file() else b""
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
            yield f"{name}: {file} is not the wheel's"
    if not counted:
        yield f"{name}: has no record of its files"


def foreign(found: metadata.Distribution) -> Iterator[str]:
    """A package that came from elsewhere than an index: a checkout, an archive, a repository."""
    if (text := found.read_text("direct_url.json")) is not None:
        yield f"{found.metadata['Name']}: installed from {json.loads(text).get('url')}"


def licence(found: metadata.Distribution) -> str:
    """As its metadata says, in one line."""
    about = found.metadata
    classifiers = about.get_all("Classifier") or []
    classified = [line.rpartition(" :: ")[2] for line in classifiers if line.startswith("License")]
    said = about.get("License-Expression") or ", ".join(classified) or about.get("License") or ""
    return " ".join(said.split())[:80]


def unfree(found: metadata.Distribution) -> Iterator[str]:
    if not any(word in licence(found).lower() for word in FREE):
        yield f"{found.metadata['Name']}: licence {licence(found) or 'not said'}"


def main() -> int:
    """Print what was looked at and what is wrong; 1 when something is."""
    installed, pinned = here(), pins()
    checks = {
        "pins within pyproject's ranges": list(out_of_range(pinned)),
        "installed as pinned": list(unpinned(installed, pinned)),
        "pins that are needed": list(stale(installed, pinned)),
        "requirements between them": list(unsatisfied(installed)),
        "files as in their wheels": [line for found in installed.values() for line in changed_files(found)],
        "from an index": [line for found in installed.values() for line in foreign(found)],
        "licences": [line for found in installed.values() for line in unfree(found)],
    }
    print(f"{len(installed)} packages; the base alone brings {len(closure(requirements()['']))}")
    for what, wrong in checks.items():
        print(f"{what:32} {'ok' if not wrong else f'{len(wrong)} wrong'}")
        print(*(f"  {line}" for line in wrong), sep="\n", end="\n" if wrong else "")
    print("not looked at: known vulnerabilities (needs a network: pip-audit -r constraints.txt --no-deps)")
    return 1 if any(checks.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
