"""Writes configuration.md, from the comments in conf/, hooks.md, from the hookspecs, commands.md, from what the
commands say of themselves, and the table of kinds.md: `python docs/generate.py`."""

import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

from plait.commands.main import OWN, command_of, parser_of
from plait.contract import hookspecs
from plait.contract.kinds import KINDS, PluginKind
from plait.strategies.registry import installed

COMMANDS = [name for name, by in installed("command").items() if by.distribution == OWN]
ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf"
LINE = re.compile(r"^(?P<indent> *)(?P<key>\w+):(?: +(?P<value>[^#\s][^#]*?))?(?: +# (?P<comment>.*))?$")

CONFIGURATION = """\
# Configuration

<!-- written by docs/generate.py from the comments in conf/: change those -->

This page lists every configuration key with its default and meaning.

You can set every key on the command line: `plait train train.steps=100 model.dim=512`. `plait train --cfg job` prints
the resulting configuration without running it. A list in brackets needs quotes in most shells: `'strategy=[fsdp2]'`.
You must give a value for a key whose default is `???`. Your own options are files `./conf/<group>/<option>.yaml`, or
files under `--config-dir`. An option of yours
replaces an option of the same name that Plait or a package ships, and one in `--config-dir` replaces one in `./conf`.
An option that two packages ship, or a package and Plait, is refused if a run selects it; `plait plugins` lists all.

A value must have exactly the type of its key: `true` is not a number, `1` is not `true`, `1.5` and `1e3` are not
integers, and text that looks like a number needs its own quotes (`'run.name="1.10"'`). A value that does not fit, an
unknown key, and a deleted key (`~train.steps`) end the command with one sentence that names the key, before anything is
written.

## A run
"""

COMMANDS_PAGE = """\
# Commands

<!-- written by docs/generate.py from core/plait/commands/: change those -->

This page lists every command and what it takes: what `plait COMMAND --help` prints.

{table}

A mistake ends a command with one sentence on standard error and exit code 1, unless its section names another code.
A signal that stops a command gives exit code 128 + its number.

## plait train

It takes overrides of [the configuration](configuration.md), and the options of Hydra: `-m` runs
[a sweep](sweeps.md), `--cfg job` prints the configuration, `--config-dir DIR` adds a folder with configuration of your
own, `--help` and `--info` explain. Exit codes: 3 if a job of a sweep failed; of a run 4 if memory was full, 5 if a
kernel met an index outside of its tensor, 6 if the compiler failed.

{commands}
"""

HOOKS = """\
# The hooks

<!-- written by docs/generate.py, whose table is from core/plait/contract/hookspecs.py: change those -->

This page lists every hook that a strategy may implement, and explains the design of each. It is the whole contract
between the core and a strategy, API version {api}. [Strategies](strategies.md) shows it in use.

{table}

*All*: every strategy that implements the hook is called, in order. *Fold*: each strategy gets the result of the one
before it. *First result*: at most one selected strategy implements the hook (not counting one that names it in its
`hooks_off`: returning None is an answer as far as this goes); if none does, the core uses its own
implementation.

{strategy}

## Why the hooks are designed this way

Hooks are [pluggy](https://pluggy.readthedocs.io)'s: a method takes the arguments it wants, by name, so new arguments
break nobody. No hook runs per layer or per tensor; a hook is called a few times per run, or once per step. Every run
has its own instances and nothing is process-global, so jobs of a sweep in one process cannot affect each other.

- **`configure`** runs before any check, because a strategy may choose other strategies: in the launcher, on rank 0 if
  another launcher started the ranks, and on every rank under `plait.apply`. Its choices are part of the config that is
  saved with the run and that all ranks read. Strategies that it selects are then asked to configure the run too, each
  once.
- **`build_mesh`** answers are assembled by the core, because no strategy can know the axes of the others. Each states
  what it wants (name, degree, what the axis splits). The core joins the axes, fills in the one -1, orders them from
  those that communicate least (pipelines) to those that communicate most (tensor ranks), and rejects a mesh that does
  not fit with every axis, its degree and its strategy. In a fold the layout would depend on the order of strategies,
  and an error could not name the cause. Views are part of the answer, because process groups must be created in the
  same order on all ranks, and because a data strategy must find them: `mesh.data(param)` reads the ranks that sum a
  gradient from the mesh that the parameter lives on. So fsdp2 works with the experts of a plugin that it does not know.
- **`extend`** adds parameters to the model, such as adapters, and freezes others. It comes before `build_mesh`, and
  before anything is divided. So every other strategy, whatever its phase, finds one model and one spec, and handles
  added parameters by their axes. New parameters are on meta; the core gives them values by the `init` of the returned
  spec, also in a model that has values. What extends a model is part of it: `plait verify` and the conformance suite
  compare with one process under the same extension.
- **`choices`** lets a search set a strategy's options without knowing the strategy. The core composes all combinations
  and keeps those whose mesh fits. The cost of a combination comes from a traced step, so a strategy need not describe
  its cost, and a third party's strategy joins every search with a few lines.
- **`parallelize`** is a fold by phase. Strategies act on each other's result, so their order matters, and users should
  not have to choose it. The order is phase, then `before` and `after`, then name; a cycle is an error that names its
  members. Real strategies need four phases: one that changes what a module computes; one that cuts the model into
  stages, so that it need not know what was changed before; one that rewrites parameters inside the graph; all before
  compilation; and one that wraps modules (FSDP2's hooks) after it. Returning None means that the model was changed in
  place. In phase "stages" a list of this rank's stages may be returned; every later call gets one stage at a time.
  Wrappers around a fold are rejected, because they could act out of turn. Parameters may be on meta, so a laptop can
  inspect the set-up of a thousand ranks; values are drawn afterwards in one place, the same in every layout.
- **`compile`** covers compilation and recomputation, because they are one decision: recomputation must wrap the
  compiled block (the other order fails under tensor parallelism), and a whole-graph strategy lets the compiler
  recompute instead.
- **`optimizer`** is for a strategy that keeps an optimizer's state its own way: a shard of it per rank, in another
  dtype, or on the CPU. `make(groups)` builds the optimizer of the config over whatever stands in the groups: the
  parameters, or tensors that the strategy updates in their place, under the same `names`. The core saves and loads
  state by these names, so such a strategy needs no hook `checkpoint`. A strategy that implements the hook owns the
  optimizer: a step with another one is refused, since it would train as if the strategy were not there.
- **`checkpoint`** is for a strategy whose state is not in parameters under their names; most need none. It returns
  tensors that alias the live state, or a pair of these and a function to call after loading. Names are canonical, so
  any strategy loads what another saved. What a strategy keeps besides has the hook `state`. Ranks along an axis with
  `sums=False` may differ on purpose: of what differs a checkpoint holds every rank's own, and what the strategy's
  attribute `replicas` makes of them for runs with another number of such ranks. Without that attribute a save is
  refused if they differ: all but one would be lost, and the loss would still look good.
- **`state`** is for what a strategy keeps beside parameters: an outer momentum, averaged weights, a counter. A
  checkpoint holds it under `strategy.<name>.`, so other runs leave it alone, and a run that newly selects the strategy
  starts it anew. It returns the live tensors, the same ones at every call, for loading fills them in place;
  `plait.is_loaded` tells afterwards, such as in `after_step`, whether a checkpoint had the entry. A DTensor, such as
  `torch.zeros_like(parameter)` of a sharded parameter, is loaded by any layout; every other tensor must be equal on all
  ranks. It is called before anything is loaded, so values that depend on parameters are set at the first step. An
  observer has the same as a method `state(self, applied)`, under `observer.<name>.`.
- **`export`** decides what the exported folder holds, because a run need not have trained a whole model: adapters have
  a format of their own. It gets the state of this rank, and returns tensors by name, which may be DTensors; the core
  gathers them one by one.
- **`clip_grads`** is for strategies with another rule. The core's own groups parameters by their meshes and combines
  the norms, also those of other stages, without knowing an axis by name. It scales the gradients itself and does not
  hand the factor to a fused optimizer: torch's fused kernels take it as a float32 number that they divide by (the
  protocol of `GradScaler`), so a step would not be bitwise that of other optimizers and of a loop by hand, in float64
  the factor would be off by 6e-8, above the bound of 1e-10, and the kernels write the gradients back in any case.
- **`deal`** decides which part of a row a rank gets, with its labels and true positions, before tokens are counted.
  Training, validation, plans and tests all call it through `Applied.deal`, so none of them cuts labels differently from
  their tokens.
- **`forward_backward`** lets a pipeline decide the order of forwards and backwards of all micro-batches. The core
  divides by the tokens, scales the balance of experts and adds the loss in the `loss` that it passes, so a schedule
  cannot forget them. It refuses a step in which a micro-batch was left out. Training, validation, your own loop and all
  tests call it through `Applied.forward_backward`. The rules:
    - Call each of `parts` with the arguments of micro-batch i; stages after the first also get `stream=x`, what the
      stage before returned.
    - Where the logits are, call `loss(i, logits)` once for each i, and run backward on its result if gradients are on.
      Pass each stage's gradient of `x` back to the stage before.
    - When it returns True, gradients are complete sums, as after `backward`.
- **`plan_stages`** tells `plait plan` what a pipeline does: the number of blocks of each stage, and the order in which
  each rank runs them, as a `plait.StagePlan`. Only plans call it: without it a pipeline trains, but is not planned. The
  order is enough: the plan traces each stage by itself and simulates all ranks, so it knows no schedule by name and
  needs no formula for the bubble.
- **`after_step`** is for what follows the optimizer, such as a router's bias or local SGD's outer step. It gets the
  step's number, so that no strategy counts by itself and a resumed run agrees.

**Entry points.** `plait.strategies` names the class. `plait.api` (`fsdp2 = "v1"`) says which hook API a plugin was
written for. It is metadata and not a class attribute, because importing the class may be exactly what no longer works.

**Claims.** Some things may be done by only one strategy. Instead of knowing all others by name, a strategy claims a
role, and two claims of one role are an error.

- `parameter_sharding`: this strategy shards storage, so it gathers parameters before all others use them and reduces
  their gradients after all others, and it does the casts of mixed precision. If nobody claims it, or if no gradients
  are summed over ranks (`mesh.layout.summed_axes()` is empty), the core casts, so no layout silently computes in
  another dtype. If none are summed, the strategy that claims it may leave the model as it is.
- `gradient_sum`: this strategy sums gradients over the ranks that see other tokens. It is separate because plain
  replication sums but shards nothing. It is a claim so that its *absence* is visible: if an axis splits the tokens and
  nobody claims the sum, the run is refused. Such a run trains with a plausible loss and wrong gradients. In a trial,
  tensor and expert parallelism without a data strategy moved the gradient by 0.86 of its size while the loss was right.
- `sequence`: along an axis with `splits="sequence"` each rank has a part of every row. This strategy lets attention
  see all of it; the core completes the means that a spec names in `row_means`. If an axis splits sequences and nobody
  claims the role, the run is refused: attention would see only a rank's own tokens.
- `stages`: along an axis with `splits="layers"` each rank has some of the model's blocks. This strategy cuts the model
  with `plait.stage` in phase "stages", and runs the stages in `forward_backward`. If an axis splits layers and nobody
  does both, the run is refused.

**After every `backward` call the gradients are complete sums.** There is no "last micro-batch" and no deferred
synchronisation. This costs a reduction per micro-batch with accumulation. In return clipping, the optimizer and all
strategies agree on what `.grad` is, and your own loop has nothing to remember. They are sums because averages do not
compose: with experts, tensor ranks, accumulation and unequal token counts, each strategy would have to divide by
another number. The loss is divided once, by the global token count, before backward.

**Stages.** `plait.stage(model, spec, first, last)` is a part of the model that runs the model's own forward: blocks of
other stages are absent, and stand-ins under their names pass the stream on. So a model with scaled embeddings, two
embeddings, rotations, masks or capped logits needs no second forward for pipelines. Between stages the stream has the
shape and dtype with which it enters the first block; `plait.stream_into(part, spec, *inputs)` tells them without
running a block, whatever other strategies did to the stream. Ranks along the axis hold only their own parameters. The
core joins what must be whole: norms, losses, counts of experts, checkpoints, exports, `plait inspect` and `plait
verify`. A save or an export is refused if no rank holds one of the model's tensors.

One step with two stages, each on two ranks that divide the sequence. The core calls `deal` and `forward_backward`; the
strategies do the rest:

```text
             rows of a step, the same on all four ranks
                              | deal: tokens, labels and positions, before they are counted
             +----------------+----------------+
   cp=0      v                       cp=1      v
   rank 0    blocks 0 and 1 <-k, v-> rank 1    blocks 0 and 1        pp=0: has the embedding
             | x                               | x
   rank 2    v blocks 2 and 3 <-k, v-> rank 3  v blocks 2 and 3      pp=1: has the norm and the head
             loss(i, logits) of its tokens     loss(i, logits) of its tokens
             ---------------- forward_backward ----------------      then dx goes back from pp=1 to pp=0
             the strategy that claims the sum adds gradients over cp: each rank has all of its own stage's
             clip_grads: norms are joined over pp and cp; the loss of the step reaches all four ranks
```

**Transforms of parameters.** Strategies need to change what a module computes with, but not what is stored: names,
optimizer and checkpoints depend on storage. torch's parametrisations rename parameters; getters that are always active
break FSDP2's first use, and what initialisation writes through them is lost. So `transform_param(module, name, fn)` is
active only inside the owning module's forward, or another of its methods that gets a tensor. Transforms nest: a later
one is nearer to storage.

**`run.storage_device`.** The core allocates parameters as the last step of set-up. A strategy that keeps them off the
GPU (fsdp2's `cpu_offload`) sets this field in `parallelize`, before that. Besides what `configure` may do (`run.use`,
`run.set`, `run.leave`, `run.say`), this is all that a strategy changes of a run. """


@attrs.frozen
class Key:
    """A line of a YAML file: `a.b: value # comment`."""

    path: str
    value: str
    comment: str


def keys(path: Path) -> Iterator[Key]:
    """Every key of a config file, with its comment; the defaults list is left out."""
    parents: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if found := LINE.match(line):
            depth = len(found["indent"]) // 2
            parents[depth:] = [found["key"]]
            if parents[0] != "defaults":
                yield Key(".".join(parents), found["value"] or "", found["comment"] or "")


def header(path: Path) -> str:
    """The comment that a file begins with, without Hydra's directive."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            lines.append(line.removeprefix("# "))
    return " ".join(lines)


def table(titles: str, rows: Iterable[Iterable[str]]) -> str:
    names = titles.split(", ")
    cells = [[cell.replace("|", r"\|").replace("<", r"\<") for cell in row] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in (names, *cells)]
    return "\n".join([lines[0], "|" + "---|" * len(names), *lines[1:]])


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def configuration() -> str:
    run = list(keys(CONF / "train.yaml"))
    nodes = {key.path.partition(".")[0] for key in run if "." in key.path}
    rows = [
        (f"**{key.path}**" if key.path in nodes else code(key.path), code(key.value), key.comment)
        for key in run
        if key.path in nodes or key.comment
    ]
    parts = [CONFIGURATION, table("key, default, meaning", rows)]
    defaults = dict(re.findall(r"^  - (\w+): (\w+)$", (CONF / "train.yaml").read_text(encoding="utf-8"), re.MULTILINE))
    parts += [group(name, defaults[name]) for name in ("model", "data", "optimizer")]
    parts += [group("cluster", "h100", alike=True)]
    parts += ["\n## model, of packages\n\nThose of this repository:"]
    for path in sorted(ROOT.glob("plugins/*/src/*/conf/model/*.yaml")):
        parts += packaged(path, f"`model={path.stem}`", "model")
    parts += ["\n## strategy\n\nEach comes with an installed package. Those of this repository:"]
    for path in sorted(ROOT.glob("plugins/*/src/*/conf/strategy/*.yaml")):
        parts += packaged(path, f"`'strategy=[{path.stem}]'`", f"strategy.{path.stem}")
    parts += ["\n## sink\n\nBeside metrics.jsonl, and beside what `metrics` switches on:\n"]
    shipped = [(path, list(keys(path))) for path in sorted((CONF / "sink").glob("*.yaml"))]
    rows = [(code(f"'sink=[{path.stem}]'"), "", header(path)) for path, _ in shipped]
    rows += [
        (code(f"sink.{path.stem}.{k.path}"), code(k.value), k.comment) for path, options in shipped for k in options
    ]
    parts += [table("option or key, default, meaning", rows)]
    parts += ["\n## recipe and hardware\n\nSeveral keys at once, added with a plus: `plait train +hardware=laptop`.\n"]
    found = [path for root in (CONF, *ROOT.glob("plugins/*/src/*/conf")) for path in root.glob("*/*.yaml")]
    found = [path for path in found if path.parent.name in ("recipe", "hardware")]
    options = [(code(f"+{path.parent.name}={path.stem}"), header(path)) for path in found]
    parts += [table("option, what it is", sorted(options, reverse=True))]
    return "\n".join(parts) + "\n"


def packaged(path: Path, option: str, node: str) -> list[str]:
    """The options of a plugin's file."""
    plugin = path.relative_to(ROOT / "plugins").parts[0]
    rows = [(code(f"{node}.{k.path}"), code(k.value), k.comment) for k in keys(path) if k.path != "_target_"]
    return [f"\n{option} ([README](../plugins/{plugin}/README.md))\n", table("key, default, meaning", rows)]


def group(name: str, default: str, alike: bool = False) -> str:
    """The options of a config group, the default first, and one table of the keys that any of them explains.

    alike: all have the same keys, which are explained as in the default.
    """
    paths = sorted((CONF / name).glob("*.yaml"), key=lambda path: (path.stem != default, path.stem))
    contents = {path.stem: {key.path: key for key in keys(path)} for path in paths}
    options, rows = [], []
    for path in paths:
        target = contents[path.stem].pop("_target_", Key("", "", ""))
        options.append((code(f"{name}={path.stem}"), header(path) or target.comment or code(target.value)))
    explained = dict.fromkeys((k.path, k.comment) for found in contents.values() for k in found.values() if k.comment)
    for key, comment in explained:
        if alike:
            if comment == contents[default][key].comment:
                rows.append((code(f"{name}.{key}"), code(contents[default][key].value), "all", comment))
            continue
        owners = {o: found[key] for o, found in contents.items() if key in found}
        owners = {o: own for o, own in owners.items() if own.comment in (comment, "")}
        values = list(dict.fromkeys(own.value for own in owners.values()))
        value = code(values[0]) + (", ..." if len(values) > 1 else "")
        rows.append((code(f"{name}.{key}"), value, "all" if len(owners) == len(paths) else ", ".join(owners), comment))
    title = f"\n## {name}\n"
    return "\n".join([title, table("option, what it is", options), "", table("key, default, of, meaning", rows)])


def hooks() -> str:
    rows = []
    for name, hook in vars(hookspecs).items():
        if hasattr(hook, "plait_spec"):
            kind = "fold" if name in hookspecs.FOLDS else "first result" if name in hookspecs.FIRST_RESULT else "all"
            arguments = ", ".join(inspect.signature(hook).parameters)
            rows.append((code(name), kind, code(arguments), inspect.cleandoc(hook.__doc__)))
    return HOOKS.format(
        api=hookspecs.API,
        table=table("hook, kind, arguments, contract", rows),
        strategy=markdown(inspect.cleandoc(hookspecs.__doc__ or "").partition(" A complete")[2]),
    )


def commands() -> str:
    shown = [f"## plait {name}\n\n```text\n{parser_of(name).format_help()}```" for name in COMMANDS if name != "train"]
    lines = table("command, what it does", [(code(f"plait {name}"), command_of(name).help) for name in COMMANDS])
    return COMMANDS_PAGE.format(table=lines, commands="\n\n".join(shown))


def kinds() -> str:
    """The page, whose table alone is generated."""
    page = (ROOT / "docs" / "kinds.md").read_text(encoding="utf-8")
    before, after = page.split("change that -->\n")[0], page.split("\n<!-- end of the table -->")[1]
    rows = [(kind.name, code(kind.group), chosen(kind), kind.must) for kind in KINDS.values()]
    lines = table("kind, entry points, on the command line, what it must be", rows)
    return f"{before}change that -->\n\n{lines}\n\n<!-- end of the table -->{after}"


def chosen(kind: PluginKind) -> str:
    """How a command line chooses a plugin of this kind."""
    own = {"command": "plait NAME", "pruner": "sweep.prune=true"}
    several = f"'{kind.choice}=[NAME]'"
    return code(own.get(kind.name, "") or (several if kind.several else f"{kind.choice}=NAME" if kind.choice else ""))


def markdown(text: str) -> str:
    """A docstring whose indented parts are the code of a strategy, then tables of plain text."""
    parts = re.split(r"\n\n(?=\S)|(?<=:)\n\n(?=    )", f"A complete{text}")
    kinds = iter(("python",))
    return "\n\n".join(
        f"```{next(kinds, 'text')}\n{inspect.cleandoc(part)}\n```" if part.startswith("    ") else part
        for part in parts
    )


def pages() -> dict[Path, str]:
    """Path -> text of every generated page."""
    made = {"configuration": configuration(), "hooks": hooks(), "commands": commands(), "kinds": kinds()}
    return {ROOT / "docs" / f"{name}.md": text for name, text in made.items()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
