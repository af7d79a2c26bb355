"""Prints the test files that a change can break: those that reach a changed module through imports.

``scripts/test --changed`` runs them. A change is what differs from the commit where this branch left ``main`` (or the
revision that is given), files that are not committed included. Lazy imports count: public names that a test asks of
``policylang``, and modules that the package names in a string. A test that starts a process can reach everything. So
can the tests of the pages, which run their blocks.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("policylang", "tests", "benchmarks", "examples")
STARTS_PROCESSES = {"subprocess", "multiprocessing", "torch.multiprocessing", "pytest_lsp"}
ALWAYS = "tests.documents"
PROSE = {"docs", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"}


def git(*arguments: str) -> list[str]:
    return subprocess.check_output(["git", *arguments], cwd=ROOT, text=True).split("\n")[:-1]


def changed_files(base: str) -> set[str]:
    fork = git("merge-base", base, "HEAD")[0]
    return {*git("diff", "--name-only", fork), *git("ls-files", "--others", "--exclude-standard")}


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def source_of(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def import_graph() -> grimp.ImportGraph:
    """Who imports whom, annotations and functions included, with the imports that a static reading misses."""
    sys.path.insert(0, str(ROOT))
    packages = [each for each in PACKAGES if (ROOT / each / "__init__.py").exists()]
    graph = grimp.build_graph(*packages, cache_dir=None)
    from policylang import _PUBLIC as public

    public = {**public, "report": "policylang.api.apply"}
    for imported in graph.find_modules_directly_imported_by("policylang"):
        graph.remove_import(importer="policylang", imported=imported)
    ours = sorted(each for each in graph.modules if each.split(".")[0] == "policylang")
    for module in sorted(graph.modules):
        tree = ast.parse(source_of(module).read_text(encoding="utf-8"))
        reached = {
            public[node.attr]
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "policylang"
            if node.attr in public
        }
        reached |= {
            public[name.name]
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "policylang"
            for name in node.names
            if name.name in public
        }
        if module != "policylang":
            constants = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
            reached |= {each.split(":")[0] for each in constants if isinstance(each, str)} & graph.modules
        libraries = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
        libraries |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        if module.startswith("tests") and libraries & STARTS_PROCESSES:
            reached |= set(ours)
        for each in sorted(reached - {module}):
            graph.add_import(importer=module, imported=each)
    return graph


def tests_of(changed: set[str]) -> list[str]:
    """Test files as paths; ``["tests"]`` where the change is to something that all of them read."""
    python = {path for path in changed if path.endswith(".py") and path.split("/")[0] in PACKAGES}
    others = changed - python
    if any(path.split("/")[0] not in PROSE for path in others) or any(path.endswith("conftest.py") for path in python):
        return ["tests"]
    graph = import_graph()
    reached = {each for each in graph.modules if each.startswith(ALWAYS)} if changed else set()
    for module in map(module_of, sorted(python)):
        if module not in graph.modules:  # deleted: who imports it still does not import at all
            return ["tests"]
        reached |= {module, *graph.find_downstream_modules(module, as_package=source_of(module).name == "__init__.py")}
    paths = {source_of(each).relative_to(ROOT) for each in reached if each.startswith("tests.")}
    return sorted(str(path) for path in paths if path.name.startswith("test_"))


if __name__ == "__main__":
    print("\n".join(tests_of(changed_files(*(sys.argv[1:2] or ["main"])))))
