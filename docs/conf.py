"""How Sphinx builds the documentation: `make docs`."""

from __future__ import annotations

import re

from sphinx.application import Sphinx

import lightning_swarm

project = "lightning_swarm"
author = copyright = "The lightning-swarm developers"  # noqa: A001 - Sphinx wants this name
version = release = lightning_swarm.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
html_theme = "furo"
html_title = f"lightning_swarm {version}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
pygments_dark_style = "github-dark"  # the theme's own style underlines names of classes and modules like links
html_theme_options = {"dark_css_variables": {"color-code-background": "#1c2128"}}  # lighter than the page

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3  # pages may link to sections of other pages

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_class_signature = "mixed"  # arguments and defaults stand in the class's heading
maximum_signature_line_length = 80  # a longer signature has one argument a line
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
default_role = "code"  # docstrings say `this` where they name code

# The copy button skips prompts and output.
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
# A block of `text` is output, and nothing to paste.
copybutton_selector = (
    "div.highlight-default pre, div.highlight-python pre, div.highlight-sh pre, div.highlight-yaml pre"
)


def _shorten_limits(
    app: Sphinx, kind: str, name: str, documented: object, options: object, arguments: str | None, returned: str | None
) -> tuple[str, str | None] | None:
    """Write a default of `Limits()` as such, without its two dozen fields."""
    return None if arguments is None else (re.sub(r"Limits\([^)]*\)", "Limits()", arguments), returned)


def setup(app: Sphinx) -> None:
    """Register the changes of signatures."""
    app.connect("autodoc-process-signature", _shorten_limits)
