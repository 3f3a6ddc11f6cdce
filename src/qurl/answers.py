"""Finding the answer in a text, and comparing two answers as strings."""

from __future__ import annotations

import re

_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}]|\\\\(?!boxed|fbox)|[{}]")
_WRAPPERS = re.compile(r"\\(?:text|textbf|mathrm|mathbf|boldsymbol|mbox)\s*\{([^{}]*)\}")
_INVISIBLE = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[!,;: ]|[\s$~]+")
_MARK = r"[\s~*_`£€¥₹°$\\]"
_CHANGES_IT = (
    r"(?:.*\b)?(?:sin|cos|tan|log|exp|mod|and|or|not|plus|minus|times|multiplied|over|divided|point"
    r"|sqrt|root|choose|squared|cubed|factorial|(?:hundred|thousand|[mbtr]+illion|dozen)s?"
    r"|hal(?:f|ves)|thirds?|quarters?|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand)ths?)\b"
)
"""A word after a number by which it is another number, not one with a unit."""
_TWO_WORDS = re.compile(r"[\W_]*[a-z]{2,}\s+[a-z]{2,}", re.IGNORECASE)
_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"
_PLAIN_DIGITS = str.maketrans(_SUPERSCRIPTS, "0123456789-")
_FRACTIONS = (
    *("½12", "⅓13", "⅔23", "¼14", "¾34", "⅕15", "⅖25", "⅗35", "⅘45", "⅙16", "⅚56"),
    *("⅛18", "⅜38", "⅝58", "⅞78"),
)
_SIGNS = str.maketrans(
    {sign: rf"\frac{{{top}}}{{{bottom}}}" for sign, top, bottom in _FRACTIONS}
    | {"∞": r"\infty ", "·": r"\cdot ", "√": r"\sqrt "}
)
_LABELLED_NUMBER = re.compile(
    rf"{_MARK}*(?:(?:the\s+)?(?:final\s+)?answer(?:\s+is)?:?{_MARK}*)?"
    r"([-+]?(?:\d+(?:,\d+)*(?:\.\d+)?|\.\d+)(?:/\d+)?)(?:e([-+]?\d{1,3}))?"
    rf"(?:[\s~*_`]++(?!{_CHANGES_IT})[a-z]{{3,}}(?:[\s/-]+[a-z]+)*)?(?:{_MARK}|[.,])*",
    re.IGNORECASE,
)


def find_answer(text: str) -> str | None:
    """The content of the last \\boxed{...}, else the line after the last ####, else None."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    _, mark, rest = text.rpartition("####")
    return rest.strip().split("\n")[0].strip() if mark else None


def last_tagged(text: str) -> str | None:
    """The content of the last <answer>...</answer>; None without one.

    The start tag may stand in the prompt, and the end tag may be the stop string.
    """
    before, end, _ = text.rpartition("</answer>")
    _, start, content = (before if end else text).rpartition("<answer>")
    return content.partition("</answer>")[0].strip() if start or end else None


def last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{...} with balanced braces; None without one."""
    last, opened = (-1, -1), []
    for brace in _BRACE.finditer(text):
        if brace.group() == "}" and opened:
            last = max(last, (opened.pop(), brace.start()))
        elif brace.group()[-1] == "{" and brace.group() != "\\{":
            opened.append(brace.end() if brace.group() != "{" else -1)
    return text[slice(*last)] if last[0] >= 0 else None


def to_latex(text: str) -> str:
    """Write signs that math-verify cannot read in LaTeX: "2√15" -> "2\\sqrt{15}", "½", "x²"."""
    if text.isascii():
        return text
    text = re.sub(f"[{_SUPERSCRIPTS}]+", lambda e: f"^{{{e[0].translate(_PLAIN_DIGITS)}}}", text)
    text = re.sub(r"√\s*(\d+(?:\.\d+)?)", r"\\sqrt{\1}", text)
    text = re.sub(r"√\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    return text.translate(_SIGNS)


def normalise(answer: str) -> str:
    """Remove what only changes the look of an answer: spaces, text wrappers, \\left, dfrac."""
    answer = _WRAPPERS.sub(r"\1", answer)
    answer = re.sub(r"\\[dt]frac", r"\\frac", answer)
    answer = _INVISIBLE.sub("", answer)
    return answer.removesuffix(".")


def bare(answer: str) -> str:
    """A number without the words and marks of plain text around it: "**18 eggs**" -> "18"."""
    if found := _LABELLED_NUMBER.fullmatch(_WRAPPERS.sub(r"\1", answer)):
        number, exponent = found.groups()
        return rf"{number} \times 10^{{{int(exponent)}}}" if exponent else number
    return answer.replace("~", " ").strip("*`")


def is_sentence(answer: str) -> bool:
    """Does an answer begin with two words, as in "She has $18 left"?"""
    return bool(_TWO_WORDS.match(answer))


def is_words(answer: str) -> bool:
    """Is a normalised answer a word such as "yes" or "Evelyn", in which case does not matter?"""
    return bool(re.fullmatch(r"(?=.*[a-z]{3})[a-z][a-z'-]+|no", answer, re.IGNORECASE))
