"""`plait verify` of a family in which rounding grows from step to step."""

import json

import pytest

from plait.host import compose
from plait_testing.verify import verify

GEMMA4 = {
    **{"model_type": "gemma4_text", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": 16, "vocab_size": 272, "num_hidden_layers": 6, "intermediate_size": 128, "sliding_window": 32},
    **{"hidden_size_per_layer_input": 0, "layer_types": ["sliding_attention", "full_attention"] * 3},
}


@pytest.mark.slow
def test_rounding_that_grows_in_one_process_too_is_no_error(tmp_path, capsys):
    """Its attention scales no scores: gradients agree within 1e-15 in the first step, and within 1e-7 in the third."""
    (tmp_path / "config.json").write_text(json.dumps(GEMMA4), encoding="utf-8")
    model = ["model=transformers", f"model.path={tmp_path}", "data.tokenizer=bytes", "train.seq_len=64"]
    assert verify(compose([*model, "strategy=[fsdp2]", "launch.nproc_per_node=2"])) == 0
    told = capsys.readouterr().out
    assert "rounding grows in this model: one process that begins a unit in the last place away" in told
    assert told.endswith("all agree\n")
