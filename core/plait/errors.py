"""The one exception whose message is meant for the person who typed the command."""


class PlaitError(Exception):
    """A mistake that the user can mend: one sentence that names the key, the value and what would fit.

    The command line prints it without a traceback and exits with 1.
    """


def near_miss(name: str, known: "list[str] | tuple[str, ...]") -> str:
    """`"; did you mean 'fsdp2'?"` where something known is close to `name`, else an empty string."""
    import difflib

    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
