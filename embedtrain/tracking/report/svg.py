"""Elements of SVG and HTML in which nothing that comes from a run is ever markup."""

from markupsafe import Markup, escape

_RENAMED = {"class_": "class"}


def element(tag: str, *children: str, **attributes: object) -> Markup:
    """An element: children that are no Markup are escaped, and so are all values of attributes.

    Args:
        tag: its name.
        children: in their order.
        attributes: `class_` is `class`, and other underscores are hyphens; None leaves one out.
    """
    parts = [
        f' {_RENAMED.get(name, name.replace("_", "-"))}="{escape(_short(value))}"'
        for name, value in attributes.items()
        if value is not None
    ]
    inner = Markup("").join(escape(child) for child in children)
    return Markup(f"<{tag}{''.join(parts)}>{inner}</{tag}>")  # noqa: S704  # all of it was escaped above


def _short(value: object) -> object:
    """Coordinates to a tenth: nobody sees more, and the file stays small."""
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return value
