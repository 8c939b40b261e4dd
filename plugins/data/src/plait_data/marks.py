"""What a chat template marks with `{% generation %}`, from character to character, and dates that stay the same."""

import re
from datetime import datetime

OPENS = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
CLOSES = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")
SIGNS = [(chr(at), chr(at + 1)) for at in range(0xFDD0, 0xFDF0, 2)]  # Unicode reserves them for use inside programs
DATE = datetime(2024, 7, 26)  # the one that Llama's templates fall back to
CLOCK = "strftime_now"  # transformers' function that gives a template the time of day
_FORMAT = re.compile(r"\"([^\"\n]*%[^\"\n]*)\"|'([^'\n]*%[^'\n]*)'")


def has_marks(template: str) -> bool:
    return OPENS.search(template) is not None


def with_signs(template: str, signs: tuple[str, str]) -> str:
    """The template with the two signs around what it marks. A macro keeps the scopes of the tag, and its whitespace.

    transformers' own spans are wrong within macros and captured blocks.
    """
    before, after = signs
    macro = f"{{% macro plait_answer() %}}{before}{{{{ caller() }}}}{after}{{% endmacro %}}\n"
    opened = OPENS.sub(r"{%\1 call plait_answer() \2%}", template)
    return macro + CLOSES.sub(r"{%\1 endcall \2%}", opened)


def without_signs(text: str, signs: tuple[str, str]) -> tuple[str, list[tuple[int, int]]]:
    """The text, and from where to where the signs stood around it; marks in marks count as one."""
    plain: list[str] = []
    spans: list[tuple[int, int]] = []
    size = depth = begin = 0
    for part in re.split(f"([{''.join(signs)}])", text):
        if part == signs[0]:
            begin = size if depth == 0 else begin
            depth += 1
        elif part == signs[1]:
            depth -= 1
            if depth == 0:
                spans.append((begin, size))
        else:
            plain.append(part)
            size += len(part)
    return "".join(plain), spans


def with_fixed_date(template: str) -> str:
    """The template, for which it is always DATE: the tokens would change from day to day."""
    if CLOCK not in template:
        return template
    formats = sorted({one or other for one, other in _FORMAT.findall(template)})
    # A format that is put together elsewhere is not among these, and the template then refuses the conversation.
    dates = ", ".join(f"{form!r}: {DATE.strftime(form)!r}" for form in formats)
    return f"{{% macro {CLOCK}(form) %}}{{{{ {{{dates}}}[form] + '' }}}}{{% endmacro %}}\n{template}"
