"""Sphinx: the guides of this folder, and a reference made of the docstrings.

pip install -e '.[docs]'
sphinx-build -W --keep-going -j auto docs build/site

`site_pages` writes the pages of the reference, `site_docstrings` reads docstrings that are Markdown,
`site_links` checks the links of what was built.
"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import site_docstrings  # noqa: E402
import site_links  # noqa: E402
import site_pages  # noqa: E402

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
    "sphinx-mathjax-offline",
]
root_doc = "index"
exclude_patterns = ["build"]
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
html_show_sourcelink = False
html_copy_source = False


def setup(app):
    """Connect what is ours."""
    app.connect("builder-inited", site_pages.write)
    app.connect("source-read", site_links.into_the_site)
    app.connect("autodoc-process-docstring", site_docstrings.convert, priority=400)
    app.connect("build-finished", site_links.check)
