"""Sphinx: the guides of this folder, and a reference made of the docstrings.

pip install -e '.[docs]'
sphinx-build -W --keep-going docs build/site

`site_reference` writes the pages of the reference; `site_markdown` reads docstrings that are
Markdown. Links between pages and to headings are checked by the build itself.
"""

import os
import pathlib
import re
import sys

DOCS = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS.parent), str(DOCS)]

import site_markdown  # noqa: E402
import site_reference  # noqa: E402

import lowcomm_jax  # noqa: E402

project = "lowcomm_jax"
author = "The lowcomm_jax authors"
version = release = lowcomm_jax.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx-mathjax-offline",  # formulas show where there is no internet
]
root_doc = "index"
myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure"]  # blocks of commands with placeholders

# `name` in a docstring: a link where that is a documented name, else code.
default_role = "py:obj"
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 90
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"lowcomm_jax {release}"
html_show_copyright = False
html_show_sourcelink = False
html_copy_source = False

# Files of the repository's root, and the pages that show them (`reference/README.txt` and so on).
SHOWN = {"README.md": "index", "CHANGELOG.md": "changelog", "CONTRIBUTING.md": "contributing"}
LINK = re.compile(r"(!?)\[((?:[^\]\[]|\[[^\]]*\])+)\]\(([^)#:]+)(#[^)]*)?\)")


def _into_the_site(folder: pathlib.Path, text: str) -> str:
    """Markdown whose links lead into the repository, with links that lead into the site.

    Links to folders and to pages of other rooms become plain text; those to files that are no pages
    stay, as downloads.
    """

    def rewritten(link: re.Match) -> str:
        image, words, path, anchor = link.groups(default="")
        target = (folder / path).resolve()
        elsewhere = target.suffix == ".md" and target.parent not in (DOCS, DOCS.parent)
        if target.is_dir() or elsewhere:
            return words
        if target.parent == DOCS.parent and target.name in SHOWN:
            target = DOCS / f"{SHOWN[target.name]}.rst"
        return f"{image}[{words}]({os.path.relpath(target, DOCS)}{anchor})"

    return LINK.sub(rewritten, text)


def _page(app, page, content):
    if app.env.doc2path(page).suffix == ".md":
        content[0] = _into_the_site(DOCS, content[0])


def _written(app):
    site_reference.write()
    for file in SHOWN:
        text = (DOCS.parent / file).read_text(encoding="utf-8")
        page = site_reference.REFERENCE / file.replace(".md", ".txt")
        page.write_text(_into_the_site(DOCS.parent, text), encoding="utf-8")


def setup(app):
    """Connect what is ours."""
    app.connect("builder-inited", _written)
    app.connect("source-read", _page)
    app.connect("autodoc-process-docstring", site_markdown.convert, priority=400)
