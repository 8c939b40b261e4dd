"""The entries of reference.md: every public class and function that authors of plugins and programs get, from its
signature and docstring. docs/generate.py writes the page."""

import functools
import importlib
import inspect
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

SECTIONS = {  # title -> MODULE:NAME of each entry, in order; a name without a module is one of `plait`
    "A run": "Run Config Precision Remat Compile Loss Schedule PlaitError misfit no_default unknown_key "
    "near_miss Cluster REMAT",
    "The mesh": "MeshAxis MeshView Mesh MeshLayout join_axes divisors valid_degree",
    "The model": "ModelSpec matches Packed UnequalParts WeightPart stage stream_into",
    "Parameters": "transform_param mix_in distribute_params shard_dim shard_of_parts own_chunk held_indices held_by "
    "canonical whole_tensor is_loaded set_wire_form take_wire_form WireForm",
    "For hooks": "hookimpl hookspec Export",
    "A step": "apply Applied plait.strategies.hooks:Hooks Batch IGNORE Stepped Observer RunObserver",
    "The loss": "Vocab Sequences divide_head",
    "Compilation": "outside_of_graph SELECTIVE_KEEPS budget_config",
    "Plans": "Choice StagePlan StageAction is_planning read_values planned_split",
    "Data": "Source Batches TOKENIZER_FILES",
    "plait.ops": "CausalAttention DocumentMask attend Flops Constant Normal TruncNormal ZeroRow ones zeros "
    "grouped_linear counts_for_products Copies chosen cross_entropy_sum loss_context with_loss HuggingFace Rule",
    "plait.host": "plait.host:compose plait.host:check plait.host:Checked plait.host:simulated plait.host:build_model "
    "plait.host:assembled plait.host:Assembly plait.host:fit plait.host:check_ranks plait.host:make_data "
    "plait.host:build_source plait.host:preload plait.host:standing_in",
    "Without ranks": "plait.host:assemble plait.host:set_up plait.host:materialise "
    "plait.host:hooks_of plait.host:accumulation plait.host:rows_together plait.host:exchange plait.host:crowded "
    "plait.host:is_crowded plait.host:is_joined",
    "What a run leaves": "plait.host:RunFolder plait.host:Outcome plait.host:is_live plait.host:located "
    "plait.host:Ledger plait.host:Job plait.host:metrics plait.host:weights plait.host:numbers plait.host:text",
    "Files and processes": "plait.host:reading plait.host:writing plait.host:replace plait.host:DiskError "
    "plait.host:in_words plait.host:locked plait.host:processes plait.host:can_fork plait.host:cores "
    "plait.host:Scratch plait.host:check_threads plait.host:device_name plait.host:forget_plans",
    "A loop of your own": "plait.host:make_optimizer plait.host:Rounding plait.host:learning_rate plait.host:load "
    "plait.host:load_latest plait.host:with_replicas plait.host:Saver plait.host:Store plait.host:open_store "
    "plait.host:checkpoint_at",
    "A trained model": "plait.host:recompose plait.host:check_trained plait.host:on_ranks plait.host:load_model "
    "plait.host:open_batches plait.host:validated plait.host:export_weights",
    "Plugins": "plait.host:plugins",
    "Commands": "plait.host:Parser plait.host:whole plait.host:one_of plait.host:overrides_of "
    "plait.host:one_line plait.host:explained",
    "plait.testing": "compare Comparison Parallel Share random_tokens RandomTokens Report "
    "Trial TrialResult train take_step forward_backward share batch documents full whole unequal "
    "worst_gradient apart assert_same Layout Collective Counting raises_about is_about",
}
SHOWN = {
    "Hooks": ("answers", "first", "implemented"),
    "RunFolder": ("outcome", "read_config", "read_versions", "log_of"),
    "Ledger": ("read",),
    "Assembly": ("configure", "extend", "layout", "layout_for", "degrees_for"),
    "Scratch": ("close",),
    "Saver": ("save", "wait"),
    "Store": ("latest", "complete", "Store.read", "Store.verify", "prune", "clean"),
    "Parser": ("add_value", "take_overrides", "take_world"),
}  # of a class of which only these are public
TOLD = {  # of what has no docstring of ours
    "hookimpl": ("@hookimpl", "Marks a method of a strategy as a hook. [Wrappers](hooks.md#wrappers) are marked "
                 "`@hookimpl(wrapper=True)`; a hook that [another package](kinds.md#hookspecs) specifies, "
                 "`@hookimpl(optionalhook=True)`."),
    "metrics": ("metrics", "The module of `metrics.jsonl`: `metrics.FILE` is its name in a run's folder, "
                "`metrics.read(path)` its rows, `metrics.MetricsFile(path)` writes one. See [metrics](metrics.md)."),
    "plugins": ("plugins", "The module of installed plugins: `plugins.KINDS` are their kinds, "
                "`plugins.installed(kind)` maps names to what metadata says of each, `plugins.load(name, kind)` is "
                "what an entry point names, `plugins.create(name, options, kind)` an instance, "
                "`plugins.create_all(node, kind)` one for each name of a config's node, and "
                "`plugins.described(name, kind)` how errors name one. `plugins.order(strategies)` is the order in "
                "which instances act, `plugins.claimed(strategies)` who has which role, and `plugins.blamed(error)` "
                "whether a note of an error names the plugin that raised it. `plugins.probe(name, kind)` imports one "
                "in an interpreter of its own and says what it is; `plugins.hooks(name, strategy)` lists the hooks "
                "that an instance has, of the version `plugins.API`."),
    "weights": ("weights", "The module of weights in files: `weights.read(path)` opens a checkpoint, a folder of "
                "safetensors or one such file, to be read tensor by tensor (`weights.Weights`), and "
                "`weights.write(folder, sizes, tensor, beside)` writes a folder with an index and digests; "
                "`weights.of(model)` are a model's tensors by name, `weights.ties(model)` the further names of tied "
                "ones, and `weights.check_new(folder)` refuses a folder that exists. [Converting](convert.md) is made "
                "of them."),
    "text": ("text", "The module of numbers as people read them: `text.gib`, `text.size`, `text.quantity`, "
             "`text.counted`, `text.clock`, `text.loss` and `text.table`."),
    "exchange": ("exchange", "The module of what ranks send each other in every step beside what strategies do: "
                 "`exchange.sum_counts` sums `exchange.COUNTS` integers, `exchange.gather_metrics` gathers losses, "
                 "peaks of memory and seconds of work."),
    "IGNORE": ("IGNORE: int", "-100: the label of a token from which nothing is learned."),
    "REMAT": ("REMAT: tuple[str, ...]", "The modes of recomputation of a single block."),
    "ones": ("ones", "`Constant(1.0)`."),
    "zeros": ("zeros", "`Constant(0.0)`."),
    "hookspec": ("@hookspec", "Marks a function of a package's module as the specification of a "
                 "[hook](kinds.md#hookspecs)."),
    "SELECTIVE_KEEPS": ("SELECTIVE_KEEPS: frozenset[str]", "Names of the operations whose results "
                        "`remat.mode=selective` keeps, for a compile hook of your own."),
    "TOKENIZER_FILES": ("TOKENIZER_FILES: tuple[str, ...]", "Names of the files of a tokenizer in a folder of Hugging "
                        "Face's libraries; all of it text."),
}  # fmt: skip


ITEM = re.compile(r"(?:^|(?<=[.;] ))(\w+(?:, \w+)*): +", re.MULTILINE)
CALLED = {"__getitem__": "{name}[{given}]", "__contains__": "{given} in {name}", "__call__": "{name}({given})"}


def entries() -> Iterator[tuple[str, str, Any]]:
    """(title of its section, name, object) of everything on the page."""
    for title, names in SECTIONS.items():
        for name in names.split():
            module, _, own = (f"{title}:{name}" if title in ("plait.ops", "plait.testing") else name).rpartition(":")
            yield title, own, getattr(importlib.import_module(module or "plait"), own)


def reference(comments: Mapping[type, Mapping[str, str]]) -> str:
    """The sections of the page, in each the functions first. comments: class -> its keys in conf/ -> their comments."""
    lines: list[str] = []
    for title in SECTIONS:
        own = [(name, entry) for section, name, entry in entries() if section == title]
        lines += [f"## {title}", ""]
        lines += [line for name, entry in own if not inspect.isclass(entry) for line in of_function(name, entry)]
        for name, entry in own:
            if inspect.isclass(entry):
                lines += ["", f"### {name}", "", *of_class(entry, comments.get(entry, {}))]
        lines += [""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip()


def of_function(name: str, function: Any, of: str = "") -> list[str]:
    """A bullet, with one for each argument that the docstring explains. of: what it is a member of."""
    if name in TOLD:
        return [bullet(*TOLD[name])]
    prose, items = explained(inspect.getdoc(function) or "", [*inspect.signature(function).parameters])
    form = CALLED[name].replace("{name}", of.lower()) if name in CALLED else f"{name}({{given}})"
    shown = signature(function, form)
    return [bullet(shown, " ".join(prose)), *(f"    {bullet(*item)}" for item in items)]


def of_class(cls: Any, comments: Mapping[str, str]) -> list[str]:
    """What it is, its attributes and its methods."""
    known = attributes(cls)
    prose, items = explained(inspect.getdoc(cls) or "", [*known])
    if cls.__name__ in SHOWN:
        prose, items = prose[:1], []
    lines = [line for paragraph in prose for line in (escaped(paragraph), "")]
    for names, text in [*items, *comments.items()]:
        lines.append(bullet(", ".join(known.get(name, name) for name in names.split(", ")), text))
    return [*lines, *of_members(cls)]


def of_members(cls: Any, prefix: str = "") -> list[str]:
    """The methods and properties of a class. prefix: before their names."""
    lines = []
    for name, member in methods(cls).items():
        if isinstance(member, property):
            told = annotation(inspect.signature(member.fget).return_annotation)  # type: ignore[arg-type]
            lines.append(bullet(f"{prefix}{name}: {told}", " ".join((inspect.getdoc(member) or "").split())))
        else:
            lines += of_function(f"{prefix}{name}", member, cls.__name__)
    return lines


def attributes(cls: Any) -> dict[str, str]:
    """Name -> "name: type = default" of every public attribute, and of what the class is made of."""
    made = inspect.signature(vars(cls)["__init__"]).parameters.values() if "__init__" in vars(cls) else ()
    given = {each.name: (each.annotation, each.default) for each in made if each.name != "self"}
    for base in reversed(cls.__mro__):
        given |= {name: (hint, attrs.NOTHING) for name, hint in vars(base).get("__annotations__", {}).items()}
    if attrs.has(cls):
        given |= {field.name: (field.type, field.default) for field in attrs.fields(cls)}
    return {n: f"{n}: {annotation(hint)}{default(value)}" for n, (hint, value) in given.items() if is_public(n)}


def methods(cls: Any) -> dict[str, Any]:
    """Name -> function or property of every public member that no other class on the page has."""
    others = {entry for _, _, entry in entries() if inspect.isclass(entry) and entry is not cls}
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("plait") and base not in others:
            for name, member in vars(base).items():
                if isinstance(member, functools.cached_property):
                    member = property(member.func)
                if isinstance(member, classmethod | staticmethod):
                    member, name = member.__func__, f"{cls.__name__}.{name}"
                if (inspect.isfunction(member) or isinstance(member, property)) and is_public(name):
                    found[name] = member
    return {name: found[name] for name in SHOWN.get(cls.__name__, found)}


def is_public(name: str) -> bool:
    return not name.startswith("_") or name in CALLED


def explained(doc: str, names: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """(paragraphs, (names, text) of each of `names` that it explains, as `name: text`) of a docstring."""
    prose, items = [], list[tuple[str, str]]()
    for paragraph in doc.split("\n\n"):
        starts = [found for found in ITEM.finditer(paragraph) if all(n in names for n in found[1].split(", "))]
        prose += [" ".join(paragraph[: starts[0].start() if starts else None].split())]
        for found, following in itertools.zip_longest(starts, starts[1:]):
            text = paragraph[found.end() : following.start() if following else None]
            items.append((found[1], " ".join(text.split())))
    return [each for each in prose if each], items


def bullet(shown: str, text: str) -> str:
    return f"- `{shown}`: {escaped(text)}"


def escaped(text: str) -> str:
    """Text whose `<` are no HTML, outside of code."""
    parts = text.split("`")
    return "`".join(part.replace("<", r"\<") if i % 2 == 0 else part for i, part in enumerate(parts))


def signature(function: Any, form: str) -> str:
    """As in the code, without the module of a type. form: what is put around the arguments."""
    found, shown, kind = inspect.signature(function), [], None
    for each in found.parameters.values():
        if each.kind is each.KEYWORD_ONLY and kind not in (each.KEYWORD_ONLY, each.VAR_POSITIONAL):
            shown.append("*")
        kind, star = each.kind, {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        if each.name not in ("self", "cls", "_", "__"):
            shown.append(f"{star}{each.name}: {annotation(each.annotation)}{default(each.default)}")
    return f"{form.format(given=', '.join(shown))} -> {annotation(found.return_annotation)}"


def annotation(hint: Any) -> str:
    text = hint if isinstance(hint, str) else inspect.formatannotation(hint)
    return re.sub(r"\b(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])", "", text).replace("'", "").replace("NoneType", "None")


def default(value: Any) -> str:
    if value in (inspect.Parameter.empty, attrs.NOTHING) or isinstance(value, attrs.Factory):
        return ""
    return f" = {value!r}" if isinstance(value, int | float | str | tuple | frozenset | None) else " = ..."
