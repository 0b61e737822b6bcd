"""What keeps README, docs/ and docstrings readable, and their code blocks true.

- No sentence of more than 35 words, also in docstrings; a cell of a table, a list item, an entry of
  `Args:` and a heading end a sentence.
- Sections of docstrings (`Args:` ...) have a line for each name: the reference shows one entry for
  `period: H; every: K`.
- Links inside the repository lead to a file, and to a heading where they name one.
- Names of functions on the pages that name many (`NAMING`) exist in the code. Dotted names that
  begin with a package, or in docstrings with a room, can be imported.
- Every block of code says its language. `>>>` is run as a doctest. Other Python is parsed, what it
  takes from `lc` exists and has the keywords that are given; `docs/add_a_method.md` is run by
  `tests/experiments/train/test_own_method.py`. Of Bash, each command exists with its flags, and
  each config takes the overrides. YAML is loaded. `text` is read by people alone.
"""

import ast
import doctest
import functools
import inspect
import pkgutil
import re
import shlex
from pathlib import Path

import jax
import pytest
import yaml
from markdown_it import MarkdownIt

import lowcomm_jax as lc
from experiments.__main__ import COMMANDS, _module
from experiments.bench.main import NAMES as BENCHMARKS
from experiments.cli import load_config, split_config
from experiments.compare.quick import DEFAULT

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMING = ("architecture.md", "operations.md", "memory.md")
LONGEST = 35
LANGUAGES = ("python", "bash", "yaml", "text")
SOURCES = [
    path
    for room in ("lowcomm_jax", "experiments", "configs", "examples")
    for path in sorted((ROOT / room).rglob("*.py"))
]


def tokens(page: Path):
    return MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))


def texts(page: Path):
    """The text of every paragraph, list item, cell and heading; code is one word."""
    for token in tokens(page):
        if token.type == "inline":
            parts = []
            for child in token.children:
                if child.type == "code_inline":
                    parts.append("CODE")
                elif child.type in ("softbreak", "hardbreak"):
                    parts.append(" ")
                else:
                    parts.append(child.content)
            yield "".join(parts)


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+", text)


def too_long(text: str) -> list[str]:
    return [s for s in sentences(text) if len(s.split()) > LONGEST]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_sentences_are_short(page):
    found = [f"{len(s.split())} words: {s}" for text in texts(page) for s in too_long(text)]
    assert not found, "\n- ".join([f"{page.name}: split these", *found])


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def docstrings(path: Path):
    """(place, text) of every docstring of a file."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes: list[ast.AST] = [tree(path)]
    while nodes:
        node = nodes.pop()
        nodes += [child for child in node.body if isinstance(child, kinds)]
        if text := ast.get_docstring(node):
            yield f"{path.relative_to(ROOT)}:{node.body[0].lineno}", text


# What ends a sentence in a docstring without a full stop: an empty line, an item, an entry of a
# section. Formulas, examples and tables are no sentences.
_ENTRY = re.compile(r"[*\w.,`<> -]+: |[-*] |\d+\. ")
_NO_PROSE = re.compile(r"\||=+( |$)|>>>|\.\.\. |\.\. |\$\$|\\|.*\S  +\S")


def paragraphs(text: str):
    """The prose of a docstring, an item or paragraph each."""
    now: list[str] = []
    for line in [*text.splitlines(), ""]:
        line = line.strip()
        if not line or _ENTRY.match(line) or _NO_PROSE.match(line):
            yield " ".join(now)
            now = []
        if line and not _NO_PROSE.match(line):
            now.append(line)


_TWO_ENTRIES = re.compile(r" +\w+(, \w+)*: [^:`(]*[;.] (?!default|None|else)\w+: ")


def test_docstrings_have_short_sentences_and_an_entry_a_name():
    found = []
    for path in SOURCES:
        for place, text in docstrings(path):
            for paragraph in paragraphs(text):
                found += [f"{place}: {len(s.split())} words: {s}" for s in too_long(paragraph)]
            entries = filter(_TWO_ENTRIES.match, text.splitlines())
            found += [f"{place}: give each name a line: {entry.strip()}" for entry in entries]
    assert not found, "\n- ".join(["split these", *found])


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and mkdocs make them."""
    found, it = set(), iter(tokens(page))
    for token in it:
        if token.type == "heading_open":
            title = next(it).content.lower().replace("`", "")
            found.add(re.sub(r"[^\w\- ]", "", title).replace(" ", "-"))
    return found


def links(page: Path):
    for token in tokens(page):
        for child in token.children or ():
            target = child.attrs.get("href") or child.attrs.get("src")
            if target and not re.match(r"[a-z]+:", target):
                yield target


def test_the_map_of_the_house_is_read_in_one_go():
    assert len((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_no_merge_left_its_marks():
    marks = re.compile(r"^(<{7}|={7}|>{7})($| \w)", re.MULTILINE)
    assert [str(p) for p in (*SOURCES, *PAGES) if marks.search(p.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(file), f"{page.name}: no heading for {target}"


def test_functions_that_pages_name_are_there():
    known = set(re.findall(r"\w+", "\n".join(p.read_text(encoding="utf-8") for p in SOURCES)))
    for name in NAMING:
        for token in tokens(ROOT / "docs" / name):
            for child in token.children or ():
                if child.type == "code_inline" and re.fullmatch(r"[\w.]+", child.content):
                    assert child.content.rpartition(".")[2] in known, f"{name}: {child.content}"


# Names of rooms that variables have, too: `engine.run` names no module.
VARIABLES = {"engine", "exchange", "state"}
ROOMS = {path.stem for path in (ROOT / "lowcomm_jax").iterdir()} - VARIABLES
_DOTTED = re.compile(r"`((?:\w+\.)+\w+)(?:\(\))?`")


def importable(name: str) -> bool:
    """Whether a dotted name is a module, or what one holds."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def stale(text: str, rooms: tuple[str, ...] = ()) -> list[str]:
    """Dotted names of a text that nothing has; names may begin with what one of the rooms holds."""
    wrong = []
    for name in _DOTTED.findall(text):
        first, _, rest = name.partition(".")
        if first in ("lowcomm_jax", "experiments"):
            wrong += [] if importable(name) else [name]
        elif rooms and first in ROOMS and rest != "py":
            wrong += [] if any(importable(f"{room}.{name}") for room in rooms) else [name]
    return wrong


def test_dotted_names_can_be_imported():
    gone, there = "`lowcomm_jax.sync.gone`", "`sync.finish.finish` `engine.run` `rules.py`"
    assert stale(f"{gone} {there}", ("lowcomm_jax",)) == [gone.strip("`")]
    found = [(page.name, stale(page.read_text(encoding="utf-8"))) for page in PAGES]
    for path in SOURCES:
        rooms = ("lowcomm_jax", ".".join(path.relative_to(ROOT).parent.parts))
        found += [(place, stale(text, rooms)) for place, text in docstrings(path)]
    wrong = [f"{place}: {', '.join(names)}" for place, names in found if names]
    assert not wrong, "\n- ".join(["names that nothing has", *wrong])


# -- blocks of code --------------------------------------------------------------------------------


def blocks(language: str):
    found = []
    for page in PAGES:
        for token in tokens(page):
            if token.type == "fence" and token.info.strip() == language:
                label = f"{page.stem}:{token.map[0] + 1}"
                found.append(pytest.param(token.content, id=label))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_say_their_language(page):
    for token in tokens(page):
        assert token.type != "code_block", f"{page.name}: indented code, use a fence"
        if token.type == "fence":
            where = f"{page.name}:{token.map[0] + 1}"
            assert token.info.strip() in LANGUAGES, f"{where}: use one of {LANGUAGES}"
            if token.info.strip() == "text":
                assert not re.search("^(python|pip) ", token.content, re.M), (
                    f"{where}: that is bash"
                )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_run(page):
    """The `>>>` blocks of a page, one after the other."""
    fences = [t.content for t in tokens(page) if t.type == "fence" and t.info.strip() == "python"]
    code = "\n".join(block for block in fences if ">>>" in block)
    example = doctest.DocTestParser().get_doctest(code, {}, page.name, None, 0)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert not doctest.DocTestRunner().run(example).failed


@pytest.mark.parametrize("code", blocks("python"))
def test_python_is_right(code):
    if ">>>" in code:
        return  # `test_examples_run`
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            resolve(node)
        if isinstance(node, ast.Call) and (function := resolve(node.func)) is not None:
            given = {keyword.arg for keyword in node.keywords}
            taken = inspect.signature(function).parameters
            unknown = set() if "kwargs" in taken else given - set(taken)
            assert not unknown, f"{ast.unparse(node.func)} takes no {sorted(unknown)}"


def resolve(node: ast.expr):
    """What an expression that begins with `lc.` is; None for others. Raises AttributeError."""
    if isinstance(node, ast.Name):
        return lc if node.id == "lc" else None
    if isinstance(node, ast.Attribute):
        inside = resolve(node.value)
        return None if inside is None else getattr(inside, node.attr)
    return None


@pytest.mark.parametrize("code", blocks("bash"))
def test_bash_is_right(code):
    commands = [shlex.split(line, comments=True) for line in code.replace("\\\n", " ").splitlines()]
    assert any(commands)
    for words in commands:
        if "experiments" in words:
            check_command(words[words.index("experiments") + 1 :])
        for word in words:
            if re.fullmatch(r"(examples|configs|tests)/[\w/.]+", word):
                assert (ROOT / word).exists(), word


def check_command(argv: list[str]) -> None:
    """The command exists, and has these flags; the config exists, and has these fields."""
    command, rest = (argv[0], argv[1:]) if argv and argv[0] in COMMANDS else ("quick", argv)
    assert command in COMMANDS and not [w for w in argv[:1] if w[0] not in "-" and w != command]
    path, overrides, others = split_config(rest)
    default = DEFAULT if command == "quick" else None
    if path is not None and not (ROOT / path).exists() and path.startswith("my_"):
        path = None  # a file of the reader's
    if (path := path or default) is not None:
        assert load_config(path, overrides)[1] == []
    if command == "bench":
        assert others[0] in BENCHMARKS, others
    source = "".join(
        p.read_text(encoding="utf-8")
        for p in (ROOT / "experiments" / f"{_module(command, rest).split('.')[0]}").glob("*.py")
    )
    for flag in (w[2:].partition("=")[0] for w in others if w.startswith("--")):
        assert flag == "help" or f'"{flag}"' in source, f"{command} has no --{flag}"


@pytest.mark.parametrize("code", blocks("yaml"))
def test_yaml_is_read(code):
    assert yaml.safe_load(code)
