"""The one exception whose message is meant for the person who typed the command."""


class PlaitError(Exception):
    """A mistake that the user can mend: one sentence that names the key, the value and what would fit.

    The command line prints it without a traceback and exits with 1.
    """


def one_line(error: BaseException) -> str:
    """What the user is told of `error`: its message, after its type if it is neither ours nor the system's,
    and its notes."""
    text = visible(str(error))
    if not isinstance(error, PlaitError):
        from plait.system.disk import number_of, sentence

        kind = type(error).__name__
        text = visible(sentence(error)) if number_of(error) is not None else f"{kind}: {text}" if text else kind
    notes = visible("; ".join(getattr(error, "__notes__", ())))
    return f"{text} ({notes})" if notes else text


def visible(text: str) -> str:
    """`text` in one line, without characters that would do something to a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(text.split()))


def left(error: BaseException) -> str:
    """What code did that raised what is no Exception, in words."""
    return f"calls sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"raises {type(error).__name__}"


def near_miss(name: str, known: "list[str] | tuple[str, ...]") -> str:
    """`"; did you mean 'dim'?"` where something known is close to `name`, else an empty string."""
    import difflib

    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
