"""A plan of a run whose tokens see none but their document: what attention with a mask keeps is in it."""

from pathlib import Path

import pytest

from plait.host import compose
from plait_plan.engine import plan

RUN = ["strategy=[fsdp2]", "cluster=h100", "model=llama3_debug", "precision.param=bfloat16", "train.seq_len=256"]
ROWS, TOKENS, HEADS, KEY_HEADS, WIDTH = 4, 256, 8, 4, 32


def peak(blocks: int, *overrides: str) -> int:
    """Bytes."""
    given = [*RUN, f"train.local_batch_size={ROWS}", f"model.n_layers={blocks}", *overrides]
    return plan(compose(given), 2).memory.peak


def more(overrides: list[str]) -> list[int]:
    """Bytes that these overrides add to the plan, with two blocks and with four."""
    return [peak(blocks, *overrides) - peak(blocks) for blocks in (2, 4)]


@pytest.mark.slow
def test_documents_cost_a_mask_and_keys_for_each_query_head(tmp_path: Path) -> None:
    """No fused kernel takes a mask and grouped heads, so each block keeps keys and values once per query head."""
    (tmp_path / "a.txt").write_text("words of a text " * 400)
    text = ["data=text", f"data.path={tmp_path}/a.txt"]
    assert more([*text, "data.attention=across"]) == [0, 0]
    few, many = more([*text, "data.attention=document"])
    assert many - few == 2 * (2 * ROWS * TOKENS * (HEADS - KEY_HEADS) * WIDTH * 2)  # two blocks, two tensors, two bytes
    assert few - (many - few) >= ROWS * TOKENS * TOKENS  # the mask


@pytest.mark.slow
@pytest.mark.parametrize("told", ["across", "document"])
def test_a_mixture_has_documents_if_one_of_its_sources_has(told: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words of a text " * 400)
    source = f"{{kind: text, path: {tmp_path}/a.txt, attention: across}}"
    other = f"{{kind: text, path: {tmp_path}/a.txt, attention: {told}}}"
    mixed = more(["data=mix", f"data.sources={{a: {source}, b: {other}}}", "data.weights={a: 1, b: 1}"])
    assert (mixed == [0, 0]) == (told == "across")
