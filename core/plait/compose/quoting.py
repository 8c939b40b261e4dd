"""How to write a text on the command line so that the shell and Hydra both take it as it is."""

import os
import re
import shlex

PLAIN = re.compile(r"[\w/\-+.$%*@?|:\\ \t]", re.ASCII)  # what Hydra's grammar takes without quotes
QUOTED_KEY = re.compile(r"""(["'])([^"']+)\1(\s*:)""")  # as JSON and YAML allow them


def for_shell(argument: str) -> str:
    """`argument` as one word of a shell, on one line, and unharmed if runs of spaces become one."""
    if argument.isprintable() and "  " not in argument:
        return shlex.quote(argument)
    return f"$'{''.join(map(_escaped, argument))}'"  # bash, zsh, ksh


def _escaped(sign: str) -> str:
    if sign in "\\'":
        return f"\\{sign}"
    if sign.isprintable() and sign != " ":
        return sign
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(sign))


def quoted(key: str, text: str) -> str:
    """The override that gives `key` exactly this text, quoted for Hydra and then for a shell."""
    return for_shell(f"{key}={in_quotes(text)}")


def in_quotes(text: str) -> str:
    """The value in Hydra's grammar that is exactly this text."""
    literal = re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + "\\${", text)  # else it refers to another key
    escaped = re.sub(r'(\\*)("|\Z)', lambda found: found[1] * 2 + ('\\"' if found[2] else ""), literal)
    return f'"{escaped}"'


def advice(argument: str) -> tuple[str, str] | None:
    """What an override that cannot be read lacks, and how to write it; None if its key is at fault, or it has none."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, equals, text = argument.partition("=")
    if not equals:
        return None

    def can_be_read(value: str) -> bool:
        try:
            OverridesParser.create().parse_overrides([f"{key}={value}"])
        except HydraException:
            return False
        return True

    if not can_be_read("x"):
        return None
    bare = QUOTED_KEY.sub(r"\2\3", text)
    if bare != text and can_be_read(bare):
        return "keys of a mapping stand without quotes", for_shell(f"{key}={bare}")
    if words := _list(key, text):
        return "texts in a list need quotes of their own", words
    strange = next((sign for sign in text if not PLAIN.fullmatch(sign)), None)
    why = f"a text with {strange!r} needs quotes of its own" if strange else "the text needs quotes of its own"
    closing = {"[": "]", "{": "}"}.get(text[:1])
    return f"{closing} is missing, or {why}" if closing and closing not in text else why, quoted(key, text)


def _list(key: str, text: str) -> str:
    """The override with each element quoted, if the text is a list of elements without brackets and quotes."""
    inner = re.fullmatch(r"\[([^\[\]{}\"']+)\]", text)
    if not inner:
        return ""
    return for_shell(f"{key}=[{','.join(in_quotes(each.strip()) for each in inner[1].split(','))}]")
