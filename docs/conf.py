"""Settings of the site that `make docs` builds with Sphinx; `tools/site.py` puts its pages together."""

from __future__ import annotations

import re

from sphinx.application import Sphinx

project = "lmpool"
html_title = "lmpool"
html_theme = "furo"
html_show_sphinx = False
html_copy_source = False
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# Fences such as ```promql have no highlighting, and need none.
suppress_warnings = ["misc.highlighting_failure"]
myst_heading_anchors = 4
highlight_language = "none"

# Tutorials are executed anew by each build, and an error in one ends it.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_in_temp = True
# Seconds for one cell. A cell takes a few; a busy machine may need many times as long.
nb_execution_timeout = 900
nb_merge_streams = True

default_role = "py:obj"
add_module_names = False
python_maximum_signature_line_length = 100
python_display_short_literal_types = True
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
autodoc_default_options = {"members": True, "inherited-members": "Exception, TypedDict, NamedTuple, tuple, dict"}
napoleon_use_ivar = True
napoleon_numpy_docstring = False

# `Raises:` may say in prose what others raise.
_NAMES = re.compile(r"\s+[A-Z]\w+(, [A-Z]\w+)*:")
_ARRAY = re.compile(
    r"~?(?:numpy\.)?ndarray\[tuple\[(?:~?typing\.)?Any, \.\.\.\], ~?(?:numpy\.)?dtype\[~?(?:[a-z]+\.)?(\w+)\]\]"
)
_COLON = "\ue000"


def before_napoleon(_app: Sphinx, what: str, _name: str, _obj: object, _options: object, lines: list[str]) -> None:
    """Hide colons that napoleon takes for the end of a type, which docstrings here leave to annotations."""
    section = ""
    for number, line in enumerate(lines):
        if line and not line[0].isspace():
            section = line
        is_prose = section == "Raises:" and line.startswith(" ") and not _NAMES.match(line)
        if is_prose and lines[number - 1] == "Raises:":
            lines[number - 1 : number + 1] = ["", f"Raises{_COLON} {line.strip()}"]
        elif (section == "Returns:" and line != section) or (what == "property" and number == 0):
            lines[number] = line.replace(":", _COLON)


def after_napoleon(_app: Sphinx, _what: str, _name: str, _obj: object, _options: object, lines: list[str]) -> None:
    """Show the colons again, and arrays as their annotations have them."""
    lines[:] = [_ARRAY.sub(r"NDArray[\1]", line.replace(_COLON, ":")) for line in lines]


def signature(
    _app: Sphinx, _what: str, _name: str, _obj: object, _options: object, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """A signature with arrays as annotations have them."""
    short = [_ARRAY.sub(r"NDArray[\1]", text) if text else text for text in (signature, returned)]
    return short[0], short[1]


def skip(_app: Sphinx, _what: str, _name: str, member: object, skipped: bool, _options: object) -> bool | None:
    """Leave out what only numbers the fields of a tuple."""
    return True if (getattr(member, "__doc__", "") or "").startswith("Alias for field number") else None


def setup(app: Sphinx) -> None:
    """Sphinx calls this function: connect the functions that change docstrings."""
    # The priority of napoleon is 500.
    app.connect("autodoc-process-docstring", before_napoleon, priority=400)
    app.connect("autodoc-process-docstring", after_napoleon, priority=600)
    app.connect("autodoc-process-signature", signature)
    app.connect("autodoc-skip-member", skip)
