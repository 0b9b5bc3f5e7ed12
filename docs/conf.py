"""Sphinx's settings of the site: `make docs` builds it, and takes warnings for errors."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from clcomm._version import __version__  # noqa: E402 - after the path is set
from docs.extensions import public_names  # noqa: E402

project, author, copyright = "clcomm", "The clcomm authors", "the clcomm authors"
version = release = __version__
language = "en"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "docs.extensions.repository",
    "docs.extensions.public_names",
    "docs.extensions.drawings",
    "docs.extensions.commands",
    "docs.extensions.troubleshooting",
    "docs.extensions.results",
    "docs.extensions.try_it",
    "docs.extensions.llms",
    "docs.extensions.excerpts",
    "docs.extensions.accessible",
]
exclude_patterns = ["_build", "extensions", "README.md"]
nitpicky = False

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline", "deflist", "colon_fence"]

autodoc_mock_imports = public_names.missing_packages()
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"show-inheritance": True}
autodoc_class_signature = "mixed"
napoleon_google_docstring, napoleon_numpy_docstring, napoleon_use_ivar = True, False, True
add_module_names = False
python_maximum_signature_line_length = 100
maximum_signature_line_length = 100
toc_object_entries = False  # each page would list all pages' names: three times the time

html_theme = "furo"
html_title = f"clcomm {release}"
html_static_path = ["static"]
html_css_files, html_js_files = ["site.css"], ["site.js"]
html_search_scorer = str(ROOT / "docs" / "scorer.js")
html_copy_source, html_show_sourcelink = True, False
html_show_sphinx = False
html_permalinks_icon = "#"
# Styles whose colours all have a contrast of 7 to 1 and more with their backgrounds.
pygments_style, pygments_dark_style = "a11y-high-contrast-light", "a11y-high-contrast-dark"
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#005a8c", "color-brand-content": "#005a8c", "color-brand-visited": "#6b3f8f",
        "color-foreground-muted": "#52585f", "color-foreground-secondary": "#4a5056",
    },
    "dark_css_variables": {
        "color-brand-primary": "#7cc4f0", "color-brand-content": "#7cc4f0", "color-brand-visited": "#c9a6e8",
        "color-foreground-muted": "#a3a9b0", "color-foreground-secondary": "#b3b9c0",
    },
    "navigation_with_keys": True,
}  # fmt: skip
# The pages of text are the whole site: nothing is loaded from elsewhere.
html_use_index, html_domain_indices = True, True
