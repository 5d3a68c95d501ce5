"""Whether our packages are ours: their names are short, and another distribution may carry one too."""

from __future__ import annotations

import importlib.util
from pathlib import Path

PACKAGES = ("adapters", "broker", "pipelines", "workers")


def find(home: Path | None = None) -> str | None:
    """What is wrong, in words with the cure, when a package of that name comes from elsewhere; else None.

    Args:
        home: The folder that should hold our packages; by default the one this module is in.
    """
    home = (home or Path(__file__).parent.parent).resolve()
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None:
            return f"the package {name!r} is missing from {home}; install omni-broker anew"
        found = Path(spec.origin).resolve().parent if spec.origin else None
        if found != home / name:
            where = found or ", ".join(spec.submodule_search_locations or ())
            return (
                f"another distribution{_owner(name)} shadows omni-broker's package {name!r}: Python finds "
                f"{where}, ours is {home / name}. Uninstall the other, or install omni-broker in a virtual "
                "environment of its own"
            )
    return None


def _owner(package: str) -> str:
    """ " (name)" of the other distribution that provides a package, as far as it is installed properly."""
    from importlib.metadata import packages_distributions

    owners = set(packages_distributions().get(package, ())) - {"omni-broker"}
    return f" ({', '.join(sorted(owners))})" if owners else ""
