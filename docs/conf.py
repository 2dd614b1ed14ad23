"""How Sphinx builds the documentation: `make docs`."""

from __future__ import annotations

import lightning_swarm

project = "lightning_swarm"
author = copyright = "The lightning-swarm developers"  # noqa: A001 - Sphinx wants this name
version = release = lightning_swarm.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"lightning_swarm {version}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3  # so that pages may point at each other's sections

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_class_signature = "separated"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
default_role = "code"  # docstrings say `this` where they name code
