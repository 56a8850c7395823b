r"""Exact numbers in free text.

Text is matched by linear-time patterns and never evaluated. The rules:

* Numbers are `42`, `-3`, `.5`, `1,234.50`, `073`, `1e3`, `3/4`, `1 1/2` and TeX
  fractions. U+2212 and its relatives are minus signs; `1{,}234` and `1\,234` are 1234.
* Currency, percent and degree signs, bold, TeX text commands and units are dropped:
  `42%` is 42, never 0.42. Number words are units as well: `3 million` is 3.
* Equality is exact: 0.1000001 is not 0.1, and 1/2 is 0.5.
* Digits that are part of something else are no number: `x2`, `10^2`, `3.1.4`, `1,23`,
  `4\sqrt{2}`, `2x`.
"""

import re
from collections.abc import Iterator
from fractions import Fraction

# Longer digit strings are no answers; the cap keeps exact arithmetic cheap.
_MAX_DIGITS = 64

_HYPHENS = "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"
_SPACES = "\u00a0\u2007\u2009\u200a\u200b\u202f\u3000`°"
_CHARACTERS = str.maketrans(
    dict.fromkeys(_HYPHENS, "-")
    | dict.fromkeys(_SPACES, " ")
    | dict.fromkeys("€£¥₹", "$")
    | dict.fromkeys("≈→⇒", "=")
)
_BRACED = r"\{\s*(-?[0-9.,]{1,64})\s*\}"
_TEX_TEXT = (
    r"\\(?:boxed|mbox|operatorname|math(?:rm|bf|it)|text(?:bf|rm|it)?)\s*\{([^{}]*)\}"
)
_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # Thousands: 1{,}234 and 1\,234.
        (r"(?<=[0-9])(?:\{,\}|\\[,!])(?=[0-9]{3}(?![0-9]))", ","),
        # Fractions; a whole number before one makes a mixed number.
        (r"(?<=[0-9])\s?(?=\\[dtc]?frac)", " "),
        (rf"\\[dtc]?frac\s*{_BRACED}\s*{_BRACED}", r"\1/\2 "),
        (r"\\[dtc]?frac\s*([0-9])\s*([0-9])", r"\1/\2 "),
        # Degrees, and powers of units: cm^2, \text{m}^3.
        (r"\^\s?(?:\\circ|\{\\circ\})", " "),
        (r"(?<=[A-Za-z])\^\{?-?[0-9]{1,2}\}?", " "),
        (_TEX_TEXT + r"(?:\^\{?-?[0-9]{1,2}\}?)?", r" \1 "),
        (r"\\(?:left|right)(?![A-Za-z])", ""),
        (r"\\(?:approx|implies|[Rr]ightarrow|to)(?![A-Za-z])|[=-]>", "="),
        (r"\\q?quad(?![A-Za-z])|\\[,!;: ()\[\]]|~", " "),
        # A sign keeps its number across a currency sign: -$5.
        (r"-\s?\\?\$\s?", "-"),
        (r"(?<=[0-9])\*\*(?=[0-9])", "^"),
        (r"\\?[$%]|\*\*|__", " "),
    )
)
_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_NUMBER = re.compile(
    rf"(?:{_INTEGER}(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{{1,2}})?"
    rf"|{_INTEGER}/{_INTEGER}"
)
_MIXED = re.compile(r"([0-9]+)\s([0-9]+/[0-9]+)")
# A maximal run of digits and separators, checked afterwards: this keeps hostile input
# from backtracking. Minus is a sign only where nothing stands before it.
_RUN = re.compile(
    r"(?<![A-Za-z0-9_^{])(?<![0-9][.,/])"
    r"(?P<sign>(?<![A-Za-z0-9)\]}.-])[-+])?"
    r"(?P<run>(?:(?<!\.)\.)?(?<![A-Za-z_^{])[0-9][0-9.,/]*"
    r"(?:[eE][-+]?[0-9]+|\s[0-9]+/[0-9]+(?![0-9/]))?)"
)
_FACTOR = re.compile(r"\s?(?:[\\^_√π²³]|[nxyzNXYZ](?![A-Za-z]))")
_COMPARISON = re.compile(r"[<>≤≥≠]|!=|\\(?:[gl]eq?|neq?|[gl]t)(?![A-Za-z])")
_OPERATORS = tuple("-+*/×÷·^√\\")
_OPERATION = re.compile(r"\s?[-+*×÷·]")
_CLAUSE_END = re.compile(r"[\r\n]|[.!?](?=\s|$)")


def normalize(text: str) -> str:
    """Returns `text` with TeX, Markdown and Unicode variants of numbers made plain."""
    text = text.translate(_CHARACTERS)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text


def parse_number(text: str) -> Fraction | None:
    """Returns the one number that a stated answer means.

    Only the first clause counts (up to the end of the line or sentence), and of a chain
    of equalities the last member: `a+b = 3+4 = 7` is 7.

    Args:
      text: What followed an answer marker, or a reference answer.

    Returns:
      The value; None if there is no number, an expression (`3+4`), a comparison or
      several different numbers.
    """
    clause = _CLAUSE_END.split(normalize(text).strip(), maxsplit=1)[0]
    if _COMPARISON.search(clause):
        return None
    clause = re.sub(r"^\s*([-+])\s+", r"\1", clause.rpartition("=")[2])
    values = set()
    for match, value in _numbers(clause):
        before = clause[max(0, match.start() - 2) : match.start()].rstrip()
        if before.endswith(_OPERATORS) or _OPERATION.match(clause, match.end()):
            return None
        values.add(value)
    return values.pop() if len(values) == 1 else None


def last_number(text: str) -> Fraction | None:
    """Returns the last number of a text, or None if its last digits are no number."""
    values = [value for _, value in _numbers(normalize(text))]
    return values[-1] if values else None


def _numbers(text: str) -> Iterator[tuple[re.Match[str], Fraction | None]]:
    """Yields every run of digits with its value, None if it is no number."""
    for match in _RUN.finditer(text):
        run = match["run"].rstrip(".,/")
        value = None if _FACTOR.match(text, match.end()) else _value(run)
        yield match, -value if value and match["sign"] == "-" else value


def _value(run: str) -> Fraction | None:
    if len(run) > _MAX_DIGITS:
        return None
    try:
        if mixed := _MIXED.fullmatch(run):
            return Fraction(mixed[1]) + Fraction(mixed[2])
        return Fraction(run.replace(",", "")) if _NUMBER.fullmatch(run) else None
    except ZeroDivisionError:
        return None
