"""What ranks begin with: the weights that `checkpoint.init_from` names, whatever divides them."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from plait.host import build_model, compose, load_model
from plait.testing import unequal, whole
from tests.helpers.commands import SMALL


def begun(path: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    lines = list[str]()
    config = compose([*SMALL, "strategy=[fsdp2]", f"checkpoint.init_from={path}"])
    return whole(load_model(config, say=lines.append).parts[0]), lines


def test_ranks_begin_with_the_weights_of_a_file(plait_ranks, tmp_path):
    made, _ = build_model(compose(SMALL).model)
    wanted = {fqn: torch.randn(param.shape) for fqn, param in made.named_parameters()}
    save_file(wanted, tmp_path / "a.safetensors")
    for found, lines in plait_ranks.run(begun, tmp_path / "a.safetensors", world=2):
        assert unequal(found, wanted) is None
        assert lines == [f"checkpoint: weights from {tmp_path / 'a.safetensors'}"]
