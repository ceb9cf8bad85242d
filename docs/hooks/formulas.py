"""mkdocs hook: renders formulas as MathML, which browsers display without scripts or fonts.

They are written in the syntax of GitHub, $...$ and $$...$$.
"""

import html
import re

import latex2mathml.converter

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)

LONG = 40  # characters: a longer formula within a text may be wider than a phone, and scrolls


def on_page_content(content: str, **_: object) -> str:
    """The page with MathML for every formula."""
    return _FORMULA.sub(_mathml, content)


def _mathml(match: re.Match[str]) -> str:
    whole = match[1] == "div"
    latex = html.unescape(match[2]).strip()
    mathml = latex2mathml.converter.convert(latex, display="block" if whole else "inline")
    if whole:
        return f'<div class="formula">{mathml}</div>'
    return f'<span class="long formula">{mathml}</span>' if len(latex) > LONG else mathml
