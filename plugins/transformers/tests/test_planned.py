"""A plan traces a few blocks of each kind, though each layer of transformers knows its own number."""

import json

import pytest

from plait.host import compose
from plait_plan import engine

LLAMA = {"model_type": "llama", "num_hidden_layers": 16}
GEMMA = {"model_type": "gemma3_text", "num_hidden_layers": 36, "sliding_window": 16, "head_dim": 16}
KINDS = {"llama": (LLAMA, [[4], [5]]), "gemma": (GEMMA, [[4, 4], [5, 4], [4, 5]])}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


def planned(folder, keys, every=False):
    (folder / "config.json").write_text(json.dumps({**SMALL, "vocab_size": 272, **keys}), encoding="utf-8")
    run = ["strategy=[fsdp2]", "model=transformers", f"model.path={folder}", "train.seq_len=32", "cluster=h100"]
    return engine.plan(compose([*run, "train.local_batch_size=2", "validation.interval=0"]), 4, every=every)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_each_kind_of_block_is_traced_once_and_once_more(kind, tmp_path, monkeypatch):
    keys, wanted = KINDS[kind]
    plain, traced = engine.steps, []

    def counted(jobs):
        traced.extend(job[4] for job in jobs)
        return plain(jobs)

    monkeypatch.setattr(engine, "steps", counted)
    found = planned(tmp_path, keys)
    assert traced == wanted
    assert found.traced == (sum(wanted[0]), keys["num_hidden_layers"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_they_cost_what_all_of_them_cost(kind, tmp_path):
    keys = {**KINDS[kind][0], "num_hidden_layers": 12}
    few, every = (planned(tmp_path, keys, every) for every in (False, True))
    assert (few.flops, few.collectives, few.memory.parameters) == (
        every.flops, every.collectives, every.memory.parameters,
    )  # fmt: skip
    assert few.memory.peak == pytest.approx(every.memory.peak, rel=0.03)
    assert few.time.step == pytest.approx(every.time.step, rel=1e-3)
