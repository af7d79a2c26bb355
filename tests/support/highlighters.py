"""What a text looks like in an editor, on a page and in a terminal: the class of each character, by highlighter."""

import atexit
import ctypes
import json
import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from hashlib import sha256
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from policylang.language.diagnostics import Source
from policylang.language.lexer import split
from policylang.language.parser import parse_file

ROOT = Path(__file__).resolve().parents[2]
TREE_SITTER = ROOT / "editors" / "tree-sitter-policylang"
VSCODE = ROOT / "editors" / "vscode"

Classes = list[str | None]
"""Of each character: a class that all highlighters have, or None for a name and for what is between words."""

_PYGMENTS = (
    ("Comment", "comment"), ("Literal.String", "string"), ("Literal.Number", "number"),
    ("Keyword.Constant", "constant"), ("Keyword", "keyword"), ("Operator.Word", "keyword"), ("Operator", "operator"),
    ("Name.Attribute", "property"), ("Name.Builtin", "group"),
)  # fmt: skip
_TEXTMATE = (
    ("comment", "comment"), ("string", "string"), ("constant.numeric", "number"), ("keyword.other.unit", "number"),
    ("constant.language", "constant"), ("keyword.operator.logical", "keyword"), ("keyword.operator", "operator"),
    ("keyword", "keyword"), ("storage.modifier", "keyword"), ("support.type.property-name", "property"),
    ("support.function.group", "group"),
)  # fmt: skip
_TREE_SITTER = (
    ("comment", "comment"), ("string", "string"), ("number", "number"), ("constant.builtin", "constant"),
    ("keyword", "keyword"), ("operator", "operator"), ("property", "property"), ("function.builtin", "group"),
)  # fmt: skip


@cache
def _repository_texts() -> dict[str, str]:
    found: dict[str, str] = {}
    for folder in ("policies", "examples", "tests", "benchmarks", "editors/vscode/tests"):
        for file in sorted((ROOT / folder).rglob("*.apl")):
            found[str(file.relative_to(ROOT))] = file.read_text(encoding="utf-8")
    for page in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))):
        blocks = re.findall(r"^```apl[^\n]*\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        found.update({f"{page.relative_to(ROOT)} {index}": block for index, block in enumerate(blocks)})
    return found


@cache
def repository_policies() -> dict[str, str]:
    """Every policy of the repository in which nothing is wrong: files, and the blocks of pages."""
    return {name: text for name, text in _repository_texts().items() if is_read(text)}


@cache
def repository_statements() -> tuple[str, ...]:
    """Every statement of the repository in which nothing is wrong, once."""
    sources = [Source("", text) for text in _repository_texts().values()]
    found = dict.fromkeys(source.text[start:end] for source in sources for start, end in split(source).ranges)
    return tuple(text for text in found if is_read(text))


def is_read(text: str) -> bool:
    """Whether the language's own parser reads a text without a diagnostic."""
    return not parse_file(Source("", text))[1]


def in_pygments(texts: list[str]) -> list[Classes]:
    lexers = pytest.importorskip("policylang.integrations.apl_lexer", reason="Pygments is not installed")
    found = []
    for text in texts:
        classes: Classes = [None] * len(text)
        for at, kind, piece in lexers.PolicyLexer().get_tokens_unprocessed(text):
            assert "Error" not in str(kind)
            _colour(classes, text, at, at + len(piece), _class(str(kind).removeprefix("Token."), _PYGMENTS))
        found.append(classes)
    return found


def in_textmate(texts: list[str]) -> list[Classes]:
    found = []
    for text, tokens in zip(texts, textmate_tokens(texts), strict=True):
        classes: Classes = [None] * len(text)
        for begin, end, scopes in tokens:
            known = (_class(scope, _TEXTMATE) for scope in scopes[1:])
            _colour(classes, text, begin, end, next((each for each in known if each is not None), None))
        found.append(classes)
    return found


def in_tree_sitter(texts: list[str]) -> list[Classes]:
    binding, query = pytest.importorskip("tree_sitter"), tree_sitter_query("highlights")
    found = []
    for text in texts:
        encoded = text.encode()
        root = tree_sitter_parser().parse(encoded).root_node
        assert not (root.has_error and is_read(text)), f"tree-sitter does not parse {text!r}: {root}"
        captures = binding.QueryCursor(query).captures(root)
        classes: Classes = [None] * len(text)
        for capture, nodes in captures.items():
            for node in nodes:
                begin, end = (len(encoded[:at].decode()) for at in (node.start_byte, node.end_byte))
                _colour(classes, text, begin, end, _class(capture, _TREE_SITTER))
        found.append(classes)
    return found


HIGHLIGHTERS = {"Pygments": in_pygments, "TextMate": in_textmate, "tree-sitter": in_tree_sitter}


def textmate_tokens(texts: list[str]) -> list[list[tuple[int, int, list[str]]]]:
    """Begin, end and scopes of each token, as VS Code makes them; skips where node or its packages are missing."""
    tokenizer = _tokenizer()
    asked, answers = tokenizer.stdin, tokenizer.stdout
    asked.write(json.dumps(texts) + "\n")
    asked.flush()
    found: list[list[tuple[int, int, list[str]]]] = json.loads(answers.readline())
    return [
        [(_index(text, begin), _index(text, end), scopes) for begin, end, scopes in tokens]
        for text, tokens in zip(texts, found, strict=True)
    ]


@cache
def _tokenizer() -> subprocess.Popen[str]:
    """The process that all tests ask, until Python ends."""
    command, environment = [node(), str(VSCODE / "tests" / "tokenize.cjs")], node_environment()
    needed = "require.resolve('vscode-textmate'), require.resolve('vscode-oniguruma')"
    if subprocess.run([command[0], "-e", needed], cwd=VSCODE, env=environment, capture_output=True).returncode:
        pytest.skip("the packages of editors/vscode are not installed: npm ci there")
    process = subprocess.Popen(command, env=environment, stdin=PIPE, stdout=PIPE, encoding="utf-8")
    atexit.register(process.terminate)
    return process


def node() -> str:
    """The path of node; skips where there is none."""
    return shutil.which("node") or pytest.skip("node is not installed")


def node_environment() -> dict[str, str]:
    """Of a script of editors/vscode, whose packages may stand elsewhere: in the folder ``POLICYLANG_NODE_MODULES``."""
    elsewhere = os.environ.get("POLICYLANG_NODE_MODULES")
    return {**os.environ, **({"NODE_PATH": elsewhere} if elsewhere else {})}


@cache
def tree_sitter_library() -> Path:
    """The parser as editors load it, generated and compiled once for what it is made of; skips without the tools."""
    generator = shutil.which("tree-sitter") or pytest.skip("the command line of tree-sitter is not installed")
    compiler = shutil.which("cc") or pytest.skip("no C compiler is installed")
    grammar, scanner = TREE_SITTER / "grammar.js", TREE_SITTER / "src" / "scanner.c"
    made_of = sha256(grammar.read_bytes() + scanner.read_bytes()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"policylang-{os.getuid()}-{made_of}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(grammar, folder)
            subprocess.run([generator, "generate", "--abi", "14"], cwd=folder, check=True, capture_output=True)
            shutil.copy(scanner, Path(folder) / "src")
            made, sources = Path(folder) / library.name, sorted(Path(folder).glob("src/*.c"))
            flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-Wno-unused", "-I", str(Path(folder) / "src")]
            subprocess.run([compiler, *flags, "-o", str(made), *map(str, sources)], check=True)
            shutil.copy(made, library.with_suffix(".partial"))
            library.with_suffix(".partial").replace(library)
    return library


@cache
def tree_sitter_language() -> Any:
    binding = pytest.importorskip("tree_sitter")
    function = ctypes.CDLL(str(tree_sitter_library())).tree_sitter_policylang
    function.restype = ctypes.c_void_p
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return binding.Language(capsule(function(), b"tree_sitter.Language", None))


@cache
def tree_sitter_parser() -> Any:
    return pytest.importorskip("tree_sitter").Parser(tree_sitter_language())


@cache
def tree_sitter_query(name: str) -> Any:
    text = (TREE_SITTER / "queries" / f"{name}.scm").read_text(encoding="utf-8")
    return pytest.importorskip("tree_sitter").Query(tree_sitter_language(), text)


def _class(kind: str, classes: tuple[tuple[str, str], ...]) -> str | None:
    return next((name for start, name in classes if kind == start or kind.startswith(f"{start}.")), None)


def _colour(classes: Classes, text: str, begin: int, end: int, name: str | None) -> None:
    """Blanks have no colour that anyone sees."""
    for at in range(begin, end):
        if not text[at].isspace():
            classes[at] = name


def _index(text: str, offset: int) -> int:
    """The character at an offset in UTF-16 code units."""
    return offset if text.isascii() else len(text.encode("utf-16-le")[: 2 * offset].decode("utf-16-le"))
