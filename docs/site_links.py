"""Links of the guides, which lead into the repository: into the site instead, and checked there."""

import functools
import html.parser
import os
import pathlib
import re
import urllib.parse

from site_pages import DOCS, EXAMPLES, LISTINGS
from sphinx.util import logging

ROOT = DOCS.parent
# Pages of the site that show a file of the repository's root.
SHOWN = {"changelog": "CHANGELOG.md", "contributing": "CONTRIBUTING.md"}
_LINK = re.compile(r"(?<!!)\[((?:[^\]\[]|\[[^\]]*\])+)\]\(([^)#:]+)(#[^)]*)?\)")
log = logging.getLogger(__name__)


def into_the_site(app, page: str, source: list[str]) -> None:
    """Sphinx's `source-read`: rewrite the links of a Markdown page."""
    path = pathlib.Path(app.env.doc2path(page))
    if path.suffix != ".md":
        return
    if page in SHOWN:
        path = ROOT / SHOWN[page]
        source[0] = path.read_text(encoding="utf-8")
    source[0] = _LINK.sub(functools.partial(_rewritten, path.parent), source[0])


def _rewritten(folder: pathlib.Path, link: re.Match) -> str:
    text, target, anchor = link[1], (folder / link[2]).resolve(), link[3] or ""
    for page, file in SHOWN.items():
        if target == ROOT / file:
            target = DOCS / f"{page}.md"
    if target == ROOT / "README.md":
        target = DOCS / "index.rst"
    if target.parent == EXAMPLES and target.suffix != ".ipynb":
        target = LISTINGS / f"{target.name}.rst"
    if target.is_dir():
        return text
    return f"[{text}]({os.path.relpath(target, DOCS)}{anchor})"


# -- what was built --------------------------------------------------------------------------------


def check(app, error) -> None:
    """Sphinx's `build-finished`: warn of every link inside the site that leads nowhere."""
    if error is not None or app.builder.format != "html":
        return
    for problem in broken(pathlib.Path(app.outdir)):
        log.warning("%s", problem)


class _Page(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given[key] for key in ("id", "name") if given.get(key)}
        self.links += [given[key] for key in ("href", "src") if given.get(key)]


def broken(site: pathlib.Path) -> list[str]:
    """One line for each link of a page to a file or an anchor of the site that is not there."""
    pages = {}
    for path in site.rglob("*.html"):
        pages[path.resolve()] = page = _Page()
        page.feed(path.read_text(encoding="utf-8"))
    problems = []
    for path, page in pages.items():
        for link in page.links:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = path if not parts.path else path.parent / urllib.parse.unquote(parts.path)
            target, anchor = target.resolve(), urllib.parse.unquote(parts.fragment)
            if not target.exists():
                problems.append(f"{path.relative_to(site)}: {link} is not there")
            elif anchor and target in pages and anchor not in pages[target].anchors:
                problems.append(f"{path.relative_to(site)}: {link} has no such place")
    return problems
