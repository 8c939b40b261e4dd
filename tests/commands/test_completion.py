"""What Tab offers on a line of `plait`, and how little that takes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LINES = {
    "plait tr": ["train"],
    "plait nonsense x": [],
    "plait train tr": ["train."],
    "plait train train.st": ["train.steps="],
    "plait train ++train.st": ["++train.steps="],
    "plait train nonsense train.st": ["train.steps="],
    "plait train model=gpt2_d": ["model=gpt2_debug"],
    "plait train model=mi": ["model=mine"],
    "plait train model=mine model.wi": ["model.width="],
    "plait train --config-dir more model=ot": ["model=other"],
    "plait train model.ffn": ["model.ffn_dim="],
    "plait train rec": [],  # it must be appended
    "plait train +rec": ["+recipe="],
    "plait train +recipe=s": ["+recipe=sft", "+recipe=single"],
    "plait train strategy=[fsdp2,dd": ["strategy=[fsdp2,ddp"],
    "plait train 'strategy=[fsdp2,ddp]' strategy.fsdp2.sh": ["strategy.fsdp2.shard="],
    "plait train strategy.fsdp2.sh": [],
    "plait train compile.enabled=": ["compile.enabled=false", "compile.enabled=true"],
    "plait train train.steps=": [],
    "plait train --mul": ["--multirun"],
    "plait inspect wor": ["world="],
    "plait inspect model=gpt2_d": ["model=gpt2_debug"],
    "plait inspect --con": ["--config-dir"],
    "plait plugins tr": [],  # takes no overrides
}

PROGRAM = """
import json, sys
from plait.commands.completion import candidates
from plait.commands.main import parser_of
from plait.strategies.registry import installed
found = {line: candidates(line, installed("command"), parser_of) for line in sys.argv[1:]}
print(json.dumps([found, sorted({"torch", "hydra", "omegaconf", "yaml"} & sys.modules.keys())]))
"""


def test_what_may_follow_is_told_without_composing(tmp_path: Path) -> None:
    for folder, name in (("conf", "mine"), ("more", "other")):
        (tmp_path / folder / "model").mkdir(parents=True)
        (tmp_path / folder / "model" / f"{name}.yaml").write_text("_target_: a.B\nwidth: 3 # of it\n", encoding="utf-8")
    command = [sys.executable, "-c", PROGRAM, *LINES]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert json.loads(done.stdout) == [LINES, []], done.stderr


SCRIPTS = {
    "bash": """
        eval "$(plait -sc install=bash)"
        COMP_LINE="plait train train.ste --later" COMP_POINT=21 COMP_CWORD=2
        hydra_bash_completion
        echo "${COMPREPLY[@]}"
    """,
    "zsh": """
        autoload -Uz compinit bashcompinit && compinit -u -D && bashcompinit
        eval "$(plait -sc install=bash)"
        as_bash() {  # as bashcompinit calls it
            emulate -L sh; setopt kshglob noshglob braceexpand
            COMP_LINE="plait train train.ste --later" COMP_POINT=21 COMP_CWORD=2
            typeset -h words
            hydra_bash_completion
        }
        as_bash; echo "${COMPREPLY[@]}"
    """,
    "fish": """
        plait -sc install=fish | source
        complete -C"plait train train.ste"
    """,
}


@pytest.mark.parametrize("shell", [n if n == "bash" else pytest.param(n, marks=pytest.mark.slow) for n in SCRIPTS])
def test_in_a_real_shell(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [shell, "-c", SCRIPTS[shell]], capture_output=True, text=True, env={**os.environ, "PATH": path}
    )
    assert (done.stdout, done.stderr) == ("train.steps=\n", "")
