"""The one exception whose message is meant for the person who typed the command."""


class PlaitError(Exception):
    """A mistake that the user can mend: one sentence that names the key, the value and what would fit.

    The command line prints it without a traceback and exits with 1.
    """


def one_line(error: BaseException) -> str:
    """What the user is told of `error`: its message, after its type if it is neither ours nor the system's,
    and its notes."""
    text = " ".join(str(error).split())
    if not isinstance(error, PlaitError):
        from plait.disk import number_of, sentence

        kind = type(error).__name__
        text = sentence(error) if number_of(error) is not None else f"{kind}: {text}" if text else kind
    notes = "; ".join(getattr(error, "__notes__", ()))
    return f"{text} ({notes})" if notes else text


def near_miss(name: str, known: "list[str] | tuple[str, ...]") -> str:
    """`"; did you mean 'dim'?"` where something known is close to `name`, else an empty string."""
    import difflib

    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
