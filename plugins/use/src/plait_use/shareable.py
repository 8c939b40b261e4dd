"""What of a run's configuration everybody may read."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LEFT_OUT = ("launch", "sink")  # nodes that say where a run was, and not how it trained
HIDDEN = "(secret)"
WORDS = "token|secret|password|passwd|(?:api|access|secret)_?key|credentials?"
SECRET = re.compile(rf"(?:^|_)(?:{WORDS})$", re.IGNORECASE)
NO_SECRETS = {"eod_token", "bod_token", "pad_token"}  # of a tokenizer
# What is replaced in a text, in this order.
ASSIGNED = re.compile(rf"((?:{WORDS})=)[^\s&,;]+", re.IGNORECASE)
FILE = re.compile(r"file:(?://[^/\s]*)?(?=/)", re.IGNORECASE)
USER = re.compile(r"(?<=://)[^\s/]*@|[^\s/:@]+:[^\s/@]+@")  # name:password@ in an address
QUERY = re.compile(r"(://[^\s?#]*)[?#]\S*")  # a signed address has its secret there
# An absolute path of two parts or more within a text; </s> is none.
PATH = re.compile(r"(?<![\w./<~-])(?:~[\w.-]*|/[^/\s]+)/(?:[^/\s]+/)*([^/\s]+)/?")


def shareable(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without the nodes LEFT_OUT, the values of keys that are named as secrets, name and password in
    addresses, and the folders of this machine: of an absolute path the last part stays."""
    return {name: _clean(node) for name, node in config.items() if name not in LEFT_OUT}


def shortened(text: str) -> str:
    """The text without secrets and folders of this machine."""
    text = FILE.sub("", ASSIGNED.sub(rf"\1{HIDDEN}", text))
    if text.startswith(("/", "~")):
        return Path(text).name or text
    return PATH.sub(r"\1", QUERY.sub(r"\1", USER.sub("", text)))


def _clean(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_clean(key): HIDDEN if _is_secret(key, each) else _clean(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(each) for each in value]
    return shortened(value) if isinstance(value, str) else value


def _is_secret(key: Any, value: Any) -> bool:
    return value is not None and SECRET.search(str(key)) is not None and key not in NO_SECRETS
