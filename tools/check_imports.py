"""Check that each installed package of this repository declares every sibling that it imports.

Runs where all of them are installed from wheels. Imports for type checkers only do not count.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.metadata import distribution
from pathlib import PurePosixPath

import grimp

from tools.workspace import Workspace


def owners(workspace: Workspace) -> dict[str, str]:
    """Which distribution installed which module: `{"composer.core.time": "composer-core"}`."""
    found = {}
    for name in workspace.names:
        for file in distribution(name).files or ():
            path = PurePosixPath(file)
            if path.suffix == ".py" and path.parts[0] == "composer":
                parts = path.with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = name
    return found


def problems(workspace: Workspace, graph: grimp.ImportGraph, owner: Mapping[str, str]) -> list[str]:
    """Each import of a sibling that the importing package does not declare, one sentence each."""
    found = []
    for importer in sorted(owner.keys() & graph.modules):
        mine = workspace[owner[importer]]
        declared = {requirement.name for requirement in mine.dependencies}
        for imported in sorted(graph.find_modules_directly_imported_by(importer)):
            theirs = owner.get(imported, mine.name)
            if theirs != mine.name and theirs not in declared:
                found.append(
                    f"{mine.name}: `{importer}` imports `{imported}` of `{theirs}`, which is not declared."
                    " Declare it, or remove the import."
                )
    return found


def main() -> None:
    workspace = Workspace()
    graph = grimp.build_graph("composer", exclude_type_checking_imports=True, cache_dir=None)
    found = problems(workspace, graph, owners(workspace))
    sys.exit("\n".join(found) or None)


if __name__ == "__main__":
    main()
