"""300 overrides that cannot be meant: one sentence that names the key, exit code 1, and a disk as it was.

They are made from the schema: of a wrong type, out of range, misspelt, deleted. What is wrong follows from the hints
and validators of the options alone, and is written down here a second time, so that what Plait takes by mistake is made
too.
"""

import math
import os
import typing
from collections import Counter
from collections.abc import Iterator
from functools import cache
from stat import S_ISDIR
from typing import Any

import attrs
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from plait.contract.config import Config
from plait.strategies.registry import installed, load


@attrs.frozen
class Bad:
    """arguments: of `plait train`. key: what the sentence has to name."""

    arguments: list[str]
    key: str


@attrs.frozen
class Option:
    """A key with its type; bounds: (at least, above, at most), each None if there is none."""

    key: str
    hint: Any
    least: float | None = None
    above: float | None = None
    most: float | None = None
    choices: tuple[Any, ...] | None = None
    before: tuple[str, ...] = ()  # what has to be selected for the key to be there


EACH = 3  # of one key


def bad_cases(seed_: int, count: int) -> list[Bad]:
    """`count` different ones, always the same for a seed."""
    found: dict[tuple[str, ...], Bad] = {}
    of_key: Counter[str] = Counter()

    def take(bad: Bad) -> None:
        if of_key[bad.key] < EACH and tuple(bad.arguments) not in found:
            found[tuple(bad.arguments)] = bad
            of_key[bad.key] += 1

    quiet = settings(
        max_examples=2 * count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    while len(found) < count:  # hypothesis likes to come back to what it had
        seed(seed_)(quiet(given(bads())(take)))()
        seed_ += 1
    return list(found.values())[:count]


@cache
def options() -> tuple[Option, ...]:
    """Every typed key of a run, of its strategies too."""
    found = [*_of(Config, ""), Option("optimizer.lr", float, least=0)]
    found += [Option(f"optimizer.{name}", float, least=0) for name in ("eps", "weight_decay")]
    found += [Option(f"model.{name}", int, least=1, most=10**9) for name in MODEL_SIZES]
    found += [Option("model.norm_eps", float, above=0), Option("model.tie_embeddings", bool)]
    found += [Option("data.tokenizer", str), Option("data.validation_fraction", float, least=0, most=0.99)]
    found += [Option("data.attention", str, choices=("across", "document"))]
    for name, plugin in installed().items():
        if plugin.distribution.startswith("plait-") and plugin.state == "ok" and _is_ours(name):
            found += _of(load(name), f"strategy.{name}", before=(f"strategy=[{name}]",))
    return tuple(found)


MODEL_SIZES = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size", "max_seq_len")
NODES = [each.name for each in attrs.fields(Config) if each.name not in ("strategy", "model", "data", "optimizer")]
FREE = ("run.name", "launch.run_id", "launch.nproc_per_node")  # of several types
LEGAL_INFINITE = ("train.max_norm", "train.skip")


def _is_ours(name: str) -> bool:
    return name in ("fsdp2", "simplefsdp", "tensor_parallel", "expert_parallel")


def _of(cls: type, where: str, before: tuple[str, ...] = ()) -> Iterator[Option]:
    hints = typing.get_type_hints(cls)
    for field in attrs.fields(cls):
        key, hint = f"{where}.{field.name}".strip("."), hints[field.name]
        if isinstance(hint, type) and attrs.has(hint):
            yield from _of(hint, key, before)
        elif typing.get_origin(hint) is not dict:
            yield Option(key, hint, before=before, **_bounds(field.validator))


def _bounds(validator: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in getattr(validator, "_validators", None) or [getattr(validator, "validator", validator)]:
        operator = {">=": "least", ">": "above", "<=": "most"}.get(getattr(each, "compare_op", ""))
        if operator:
            found[operator] = each.bound
        if hasattr(each, "options"):
            found["choices"] = tuple(each.options)
    return found


# Values, as they are written in an override

WORD = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=12).filter(
    lambda word: word not in ("true", "false", "null", "nan", "inf")
)
SIGNS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0$"), max_size=20)
HUGE = st.integers(2**63, 10**40)


def quoted(text: str) -> str:
    """`text` as Hydra's grammar takes it literally."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


NUMBER_LIKE = st.integers(-5, 10**6).map(lambda number: quoted(str(number)))
BOOLS, NULL = st.sampled_from(["true", "false", "True", "FALSE"]), st.just("null")
LISTS = st.one_of(st.just("[]"), st.lists(WORD, min_size=1, max_size=3).map(lambda words: f"[{','.join(words)}]"))
DICTS = st.one_of(st.just("{}"), WORD.map(lambda word: f"{{{word}:1}}"))
FRACTIONS = st.floats(-1e6, 1e6).filter(lambda number: not number.is_integer()).map(repr)
NOT_FINITE = st.sampled_from(["inf", "-inf"])
NAN = st.sampled_from(["nan", "NaN"])
TEXTS = st.one_of(WORD, st.just(""), SIGNS.map(quoted))


def _kind(hint: Any) -> tuple[Any, bool]:
    """(type, whether null is one of its values)."""
    inner = [each for each in typing.get_args(hint) if each is not type(None)]
    optional = len(inner) < len(typing.get_args(hint))
    return (inner[0] if len(inner) == 1 and optional else hint), optional


def wrong(option: Option) -> st.SearchStrategy[str]:
    """Values that the option cannot have."""
    kind, optional = _kind(option.hint)
    pool = [DICTS, *([] if optional else [NULL])]
    if kind is bool:
        pool += [st.integers(-3, 3).map(str), FRACTIONS, TEXTS, LISTS, NAN]
    elif kind is int:
        pool += [BOOLS, FRACTIONS, st.integers(0, 9).map(lambda n: f"{n}.0"), NOT_FINITE, NAN, TEXTS, NUMBER_LIKE]
        pool += [LISTS, HUGE.map(str), HUGE.map(lambda n: str(-n)), *_out_of_range(option, st.integers)]
    elif kind is float:
        pool += [BOOLS, NAN, TEXTS, NUMBER_LIKE, LISTS, *_out_of_range(option, _floats)]
        pool += [] if option.key in LEGAL_INFINITE or option.key.startswith("strategy.") else [NOT_FINITE]
    elif kind is str:
        pool += [BOOLS, NAN, FRACTIONS, st.integers(-9, 9).map(str), LISTS]
        pool += [TEXTS.filter(lambda text: text not in option.choices)] if option.choices else []
    else:  # a list
        pool += [st.integers(-9, 9).map(str), BOOLS, WORD, st.just("[true]"), st.just("[[0]]"), st.just("[null]")]
    return st.one_of(pool)


def _floats(least: float, most: float) -> st.SearchStrategy[float]:
    return st.floats(least, most, allow_nan=False, allow_infinity=False)


def _out_of_range(option: Option, numbers: Any) -> list[st.SearchStrategy[str]]:
    found = []
    if option.least is not None:
        found.append(numbers(-(10**9), option.least - 1))
    if option.above is not None:
        found.append(numbers(-(10**9), option.above))
    if option.most is not None:
        found.append(numbers(math.ceil(option.most) + 1, 10**12))
    return [each.map(repr) for each in found]


@st.composite
def bads(draw: st.DrawFn) -> Bad:
    bad: Bad = draw(st.one_of(typed(), typed(), misspelt(), deleted(), replaced(), unresolved(), unnamable()))
    innocent = draw(st.sampled_from([(), (), ("train.steps=7",), ("metrics.wandb=false", "train.seed=3")]))
    before = [each for each in innocent if each.partition("=")[0] != bad.key and bad.key != "train"]
    return attrs.evolve(bad, arguments=[*before, *bad.arguments])


@st.composite
def typed(draw: st.DrawFn) -> Bad:
    option = draw(st.sampled_from([each for each in options() if each.key not in FREE]))
    return Bad([*option.before, f"{option.key}={draw(wrong(option))}"], option.key)


@st.composite
def misspelt(draw: st.DrawFn) -> Bad:
    """A key that is almost one."""
    known = {option.key for option in options()} | {"data.cache_dir", "model.rope_theta"}
    option = draw(st.sampled_from([each for each in options() if "." in each.key]))
    parent, _, name = option.key.rpartition(".")
    at = draw(st.integers(0, len(name) - 1))
    other = draw(
        st.sampled_from([name[:at] + name[at + 1 :], name[:at] + name[at] + name[at:], f"{name}s", f"{name}_"])
    )
    key = f"{parent}.{other}"
    if key in known or not other.strip("_") or other.startswith("_") or other[0].isdigit():
        key, other = f"{parent}.nope", "nope"
    sign = draw(st.sampled_from(["", "+", "++"]))
    return Bad([*option.before, f"{sign}{key}={draw(st.integers(0, 9))}"], key)


@st.composite
def deleted(draw: st.DrawFn) -> Bad:
    whole = [each.key for each in options() if not each.before and each.key.partition(".")[0] in NODES]
    must = [f"model.{name}" for name in (*MODEL_SIZES, "_target_")] + ["optimizer.lr", "optimizer._target_"]
    nodes = [node for node in NODES if node != "cluster"]  # none is chosen by default, so nothing is taken away
    key = draw(st.sampled_from([*whole, *must, *nodes, "data._target_", "strategy", "model", "data", "optimizer"]))
    return Bad([f"~{key}"], key)


@st.composite
def replaced(draw: st.DrawFn) -> Bad:
    """A node by what is none, a group by what names no option of it."""
    if draw(st.booleans()):
        node = draw(st.sampled_from(NODES))
        values = st.one_of(st.integers(-9, 9).map(str), BOOLS, NULL, WORD, LISTS)
        choice = "[]" if node in ("observer", "sink") else None
        return Bad([f"{node}={draw(values.filter(lambda value: value != choice))}"], node)
    group = draw(st.sampled_from(["model", "data", "optimizer", "strategy"]))
    none = st.sampled_from(["zzz_{}", "{}_nope"]).flatmap(lambda form: WORD.map(form.format))
    return Bad([f"{group}={draw(st.one_of(st.integers(-9, 9).map(str), BOOLS, NULL, none, FRACTIONS))}"], group)


@st.composite
def unresolved(draw: st.DrawFn) -> Bad:
    """Interpolations that lead nowhere, to the key itself, or to a node."""
    option = draw(st.sampled_from([each for each in options() if not each.before]))
    node = option.key.partition(".")[0]
    form = draw(st.sampled_from(["${nope}", "${%s.nope}", "${oc.env:PLAIT_NOPE}", "${nope:1}", "${%s}", "${key}"]))
    value = option.key.join(form.split("key")) if "key" in form else form.replace("%s", node)
    return Bad([f"{option.key}={value}"], option.key)


@st.composite
def unnamable(draw: st.DrawFn) -> Bad:
    """Names of runs and folders that would lead elsewhere, or that nobody could type."""
    key = draw(st.sampled_from(["run.name", "launch.run_id", "checkpoint.dir"]))
    up = st.sampled_from(["..", "../x", "x/../..", ".", "...", " ", ". .", ""])
    control = st.characters(categories=["Cc", "Zl", "Zp"], exclude_characters="\0").map(lambda sign: f"a{sign}b")
    long = st.integers(201, 400).map(lambda length: "n" * length)
    dash = WORD.map(lambda word: f"-{word}")
    other = st.just("a/b") if key != "checkpoint.dir" else st.sampled_from(["export", "ranks/x", "metrics.jsonl"])
    return Bad([f"{key}={quoted(draw(st.one_of(up, control, long, dash, other)))}"], key)


CPU = "launch.device=cpu"


@pytest.fixture(autouse=True)
def places(plait_project, tmp_path, monkeypatch):
    """All that a command may write to: the working folder, HOME, the cache, the temporary folder."""
    for name, variable in (("home", "HOME"), ("cache", "PLAIT_CACHE"), ("tmp", "TMPDIR")):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(variable, str(tmp_path / name))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def listing(folder):
    """Path -> size and time of change, of a folder only that it is there. The cache of torch's compiler is torch's."""
    found = [os.path.join(at, name) for at, folders, files in os.walk(folder) for name in (*folders, *files)]
    looks = {path: os.lstat(path) for path in found if "torchinductor_" not in path}
    return {path: (0, 0) if S_ISDIR(look.st_mode) else (look.st_size, look.st_mtime_ns) for path, look in looks.items()}


def problem(plait_project, bad, places):
    """What is wrong with how Plait refuses it; empty: nothing."""
    before = listing(places)
    done = plait_project("train", CPU, *bad.arguments)
    if done.code != 1:
        return f"exit code {done.code}"
    if not (done.err.startswith("plait: ") and done.err.count("\n") == 1 and done.err.endswith("\n")):
        return f"no one sentence: {done.err}"
    if bad.key not in done.err:
        return f"does not name {bad.key}: {done.err}"
    return "it wrote" if listing(places) != before else ""


@pytest.mark.parametrize("count", [10, pytest.param(300, marks=pytest.mark.slow)])
def test_what_cannot_be_meant_is_refused(plait_project, places, count):
    found = {str(bad.arguments): why for bad in bad_cases(0, count) if (why := problem(plait_project, bad, places))}
    assert not found, f"{len(found)} of {count}: " + "\n".join(f"{what}: {why}" for what, why in found.items())
