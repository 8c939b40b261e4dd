"""A folder of transformers is fine-tuned on conversations: its losses are those of transformers, step by step."""

import json

import pytest
import torch

from plait_data.chat import Chat
from tests.helpers.chats import CHATS, VOCAB, pieces, tokenizer_in, written
from tests.helpers.commands import plait, rows

STEPS, ROWS, LENGTH = 12, 4, 128


@pytest.fixture
def folder(tmp_path, monkeypatch):
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes)).save_pretrained(tmp_path / "model")
    written(tmp_path / "chats.jsonl", CHATS)
    return tokenizer_in(tmp_path / "model")


def theirs(folder, rates):
    """(losses of transformers' model, that model, the run's export).

    Each conversation is a row of its own, padded, with its mask; the loss is the model's own.
    """
    from transformers import LlamaForCausalLM

    source = Chat(path=str(folder.with_name("chats.jsonl")), tokenizer=str(folder), validation_fraction=0.1)
    batches = source.open(seq_len=LENGTH, seed=0, global_batch_size=ROWS, dp=(0, 1))
    model = LlamaForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, eps=1e-8)
    losses = []
    for step, rate in enumerate(rates):
        found = pieces(batches.train(step))
        pad = torch.nn.utils.rnn.pad_sequence
        ids = pad([tokens for tokens, _ in found], batch_first=True)
        mask = pad([torch.ones_like(tokens) for tokens, _ in found], batch_first=True)
        shifted = [torch.cat([torch.tensor([-100]), labels[:-1]]) for _, labels in found]  # transformers shifts itself
        labels = pad(shifted, batch_first=True, padding_value=-100)
        last = torch.stack([labels[-1] for _, labels in found])[:, None]  # of a last token: its label stands behind it
        ids, mask = (torch.cat([part, torch.zeros_like(last)], 1) for part in (ids, mask))
        labels = torch.cat([labels, torch.full_like(last, -100)], 1)
        lengths = torch.tensor([len(tokens) for tokens, _ in found])[:, None]
        labels.scatter_(1, lengths, last)
        ids.scatter_(1, lengths, last.clamp(min=0))
        mask.scatter_(1, lengths, 1)
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model, LlamaForCausalLM.from_pretrained(folder.parent / "runs" / "a" / "export")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_losses_of_transformers(folder, tmp_path):
    data = (
        "data=chat",
        f"data.path={tmp_path}/chats.jsonl",
        f"data.tokenizer={folder}",
        "data.validation_fraction=0.1",
    )
    sizes = (f"train.seq_len={LENGTH}", "train.local_batch_size=1", f"train.global_batch_size={ROWS}")
    more = (
        f"train.steps={STEPS}",
        "optimizer.decays=all",
        "schedule.warmup_steps=2",
        "validation.batches=1",
        "metrics.tensorboard=false",
    )
    command = ("train", "model=transformers", f"model.path={folder}", *data, *sizes, *more, "checkpoint.interval=5")
    done = plait(*command, "strategy=[fsdp2]", "run.name=a", "launch.device=cpu", cwd=tmp_path)
    assert done.code == 0, done.err
    found = rows(tmp_path / "runs" / "a")
    losses, model, exported = theirs(folder, [row["lr"] for row in found])
    assert len(found) == STEPS
    assert max(abs(row["loss"] - loss) for row, loss in zip(found, losses, strict=True)) < 1e-5
    assert losses[-1] < losses[0] - 0.5
    for (name, ours), parameter in zip(exported.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter, rtol=0, atol=1e-4, msg=name)
    assert json.loads((tmp_path / "runs" / "a" / "export" / "config.json").read_text())["vocab_size"] == VOCAB
