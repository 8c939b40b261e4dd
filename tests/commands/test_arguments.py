"""What commands take: each mistake is one sentence that says what would fit, and each command is explained."""

import subprocess
import sys

import pytest

from plait.commands.arguments import Parser, one_of, whole
from plait.commands.main import command_of, parser_of
from plait.strategies.registry import installed

TAKES = "--json, --check, --kind KIND"  # of `plait plugins`
COMMANDS = list(installed("command"))


def parser():
    made = Parser("bake")
    made.take_overrides()
    made.take_world()
    made.add_value("crust", "thin|thick", one_of("crust", "thin", "thick"), "how it is")
    made.add_argument("--hot", action="store_true", help="now")
    made.add_argument("--every", metavar="N", nargs="?", const=10, type=whole("--every", "a number"), help="seconds")
    made.description, made.epilog = "Bakes.", "Needs an oven."
    return made


def test_values_options_and_overrides_stand_in_any_order():
    args = parser().read(["a=1", "--hot", "world=2", "~b", "--every", "+c=3", "world=4", "--config-dir", "x", "d@e=f"])
    assert (args.overrides, args.world, args.crust) == (["a=1", "~b", "+c=3", "d@e=f"], 4, None)
    assert (args.hot, args.every, args.config_dir) == (True, 10, "x")
    assert parser().read(["--every=3", "-cd", "y"]).every == 3
    args = parser().read(["--config-dir", "world=2", "--every", "crust=thin", "--hot", "world=4"])
    assert (args.config_dir, args.every, args.crust, args.world) == ("world=2", 10, "thin", 4)


HELP = """\
usage: plait bake [overrides] [world=N] [crust=thin|thick] [--config-dir DIR] [--hot] [--every[=N]]

Bakes.

  world=N           the number of ranks (default: what the degrees and launch.* ask for)
  crust=thin|thick  how it is
  --config-dir DIR  a folder with configuration of your own
  --hot             now
  --every[=N]       seconds

Needs an oven.
"""


def test_help_is_the_same_on_every_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "30")
    with pytest.raises(SystemExit) as end:
        parser().read(["--wrong", "world=x", "--help"])
    assert (end.value.code, capsys.readouterr().out) == (0, HELP)


@pytest.mark.parametrize(
    ("command", "code", "sentence"),
    [
        ("plugins --jsn", 1, f"plait plugins has no option --jsn; it takes {TAKES}; did you mean '--json'?"),
        ("plugins --js", 1, f"plait plugins has no option --js; it takes {TAKES}; did you mean '--json'?"),
        ("plugins fsdp2", 1, f"plait plugins has no argument fsdp2; it takes {TAKES}"),
        (
            "calibrate rank=3",
            1,
            "plait calibrate has no argument rank=3; it takes name=NAME, ranks=N, device=cpu|TYPE, --force; "
            "did you mean 'ranks'?",
        ),
        ("inspect --cfg job", 1, "plait inspect has no option --cfg; it takes overrides, world=N, --config-dir DIR"),
        ("inspect --config-dir", 1, "--config-dir needs a value: --config-dir DIR"),
        ("inspect world=0", 1, "world is '0'; it must be a number of ranks, at least 1, such as world=4"),
        ("plan rank=-1", 1, "rank is '-1'; it must be the number of a rank, such as rank=0"),
        ("plan routing=wrst", 1, "routing is 'wrst'; it must be even or worst; did you mean 'worst'?"),
        ("plan -m x", 1, "'x' is not an override: write key=value"),
        ("compare a", 2, "plait compare needs B: plait compare A B [--tolerance X]"),
        ("compare a b c", 2, "plait compare has no argument c; it takes A, B, --tolerance X"),
        ("new", 1, "plait new needs NAME: plait new NAME [--kind KIND]"),
        ("new a b", 1, "plait new has no argument b; it takes NAME, --kind KIND"),
        ("new a --force", 1, "plait new has no option --force; it takes NAME, --kind KIND"),
        ("compare a b --tolerance=-1", 2, "--tolerance is '-1'; it must be a number, 0 or more"),
        ("compare a b --tolerance=nan", 2, "--tolerance is 'nan'; it must be a number, 0 or more"),
        ("compare a b --tolerance=much", 2, "--tolerance is 'much'; it must be a number, 0 or more"),
        (
            "convert a --to hf",
            1,
            "plait convert needs TARGET: plait convert SOURCE TARGET --to hf|plait [overrides] [--config-dir DIR]",
        ),
    ],
)
def test_a_mistake_is_one_sentence(plait_project, command, code, sentence):
    done = plait_project(*command.split())
    assert (done.code, done.out, done.err) == (code, "", f"plait: {sentence}\n")
    assert done.error is not None
    assert done.error.key


@pytest.mark.parametrize(
    ("command", "own", "said"),
    [
        (
            "plan prize=2.5",
            "plan takes world, rank, routing, tokens, price, and keys of a run",
            "; did you mean 'price'?",
        ),
        (
            "plan +toknes=5",
            "plan takes world, rank, routing, tokens, price, and keys of a run",
            "; did you mean 'tokens'?",
        ),
        (
            "plan json=true",
            "plan takes world, rank, routing, tokens, price, and keys of a run",
            "; did you mean '--json'?",
        ),
        ("inspect wor=2", "inspect takes world, and keys of a run: hydra, model", "; did you mean 'world'?"),
        ("inspect trian.steps=2", "inspect takes world, and keys of a run: hydra, model", "; did you mean 'train'?"),
        ("inspect train.stpes=2", "unknown key train.stpes; available: steps", "; did you mean 'steps'?"),
        ("inspect +world=2", "world is an argument of plait inspect, without a sign", ": world=N"),
    ],
)
def test_beside_keys_of_a_run_its_own_words_are_named(plait_project, command, own, said):
    done = plait_project(*command.split())
    assert (done.code, done.out) == (1, "")
    assert own in done.err
    assert done.err.endswith(f"{said}\n")


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "train"])
def test_every_argument_is_explained(name):
    shown = parser_of(name).format_help()
    usage, rest = shown.split("\n\n", 1)
    for form in usage.removeprefix(f"usage: plait {name}").replace("[", " ").replace("]", " ").split():
        assert form in rest or form == "overrides"
    assert all(len(line) <= 120 for line in shown.splitlines())


def test_commands_are_light():
    """`plait --help` asks all of them for their line."""
    heavy = ("torch", "hydra", "omegaconf", "rich", "numpy", "argparse")
    code = f"""import sys
sys.path[:] = {sys.path}
from plait.commands.main import _usage
_usage()
print([name for name in {heavy} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert all(command_of(name).help for name in COMMANDS)
