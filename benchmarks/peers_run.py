"""The training of `plait train strategy=[]` by another library: python benchmarks/peers_run.py PEER [overrides]

PEER is bare (torch alone), fabric (Lightning Fabric), accelerate, or trainer (that of transformers). Model, data,
batch, optimizer, clipping and schedule are those of the config that the overrides resolve to, on one process. A line
appears after each step; if `checkpoint.enabled`, weights and optimizer state are saved after the last. Each loop is
written as its library's documentation shows it. model=transformers trains transformers' own model of that folder, with
its own loss.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Config = dict[str, Any]


def own(config: Config) -> nn.Module:
    """The model, as its own library makes it."""
    options = {name: value for name, value in config.items() if name != "_target_"}
    if "transformers" in config["_target_"]:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(options["path"])
    from plait_models.llama3 import Llama3

    return Llama3(**options)


def weights_in(config: Config) -> torch.dtype:
    """bfloat16 is what is computed in, as in Plait: weights and the optimizer's state are float32."""
    param: torch.dtype = getattr(torch, config["precision"]["param"])
    return torch.float32 if param is torch.bfloat16 else param


def computing(config: Config) -> torch.autocast:
    return torch.autocast(
        config["launch"]["device"], torch.bfloat16, enabled=config["precision"]["param"] == "bfloat16"
    )


def built(config: Config) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(config["train"]["seed"])
    model = own(config["model"]).to(config["launch"]["device"], weights_in(config))
    options = {
        name: value for name, value in config["optimizer"].items() if name not in ("_target_", "groups", "decays")
    }
    optimizer = torch.optim.AdamW(model.parameters(), **{**options, "fused": True})
    warmup = max(config["schedule"]["warmup_steps"], 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / warmup, 1.0))
    return model, optimizer, schedule


def batches(config: Config) -> Iterator[dict[str, Tensor]]:
    """The arguments of `loss_of`, step by step. With positions, a row is several documents."""
    from hydra.utils import instantiate

    train = config["train"]
    size = train["local_batch_size"]
    source = instantiate(config["data"])
    opened = source.open(seq_len=train["seq_len"], seed=train["seed"], global_batch_size=size, dp=(0, 1))
    for step in range(train["steps"]):
        batch = opened.train(step)
        found = {"tokens": batch.tokens, "labels": batch.labels, "positions": batch.positions}
        yield {name: each.to(config["launch"]["device"]) for name, each in found.items() if each is not None}


class Given(torch.utils.data.IterableDataset):
    """The same batches for libraries that want a data loader of their own."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return batches(self.config)


def say(step: int, loss: float) -> None:
    print(f"step {step}  loss {loss:.7f}", flush=True)


def loss_of(model: Callable[..., Any], tokens: Tensor, labels: Tensor, positions: Tensor | None = None) -> Tensor:
    """The mean over tokens. `labels` are those of the next tokens."""
    if hasattr(model, "loss_function"):  # one of transformers; with a cache, packed documents would see each other
        given = {"position_ids": positions, "labels": labels, "shift_labels": labels, "use_cache": False}
        found: Any = model(tokens, **given)
        if found.logits.dtype is torch.float64:  # which transformers' loss rounds to float32
            return F.cross_entropy(found.logits.flatten(0, 1), labels.flatten())
        loss: Tensor = found.loss
        return loss
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def bare(config: Config) -> None:
    model, optimizer, schedule = built(config)
    for step, batch in enumerate(batches(config), 1):
        with computing(config):
            loss = loss_of(model, **batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config["train"]["max_norm"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        say(step, loss.item())
    if config["checkpoint"]["enabled"]:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "saved.pt")


def fabric(config: Config) -> None:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    model, optimizer, schedule = built(config)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(Given(config), batch_size=None))
    for step, batch in enumerate(loader, 1):
        loss = loss_of(model, **batch)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=config["train"]["max_norm"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        say(step, loss.item())
    if config["checkpoint"]["enabled"]:
        fabric.save("saved.ckpt", {"model": model, "optimizer": optimizer})


def accelerate(config: Config) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, schedule = built(config)
    loader = torch.utils.data.DataLoader(Given(config), batch_size=None)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for step, batch in enumerate(loader, 1):
        loss = loss_of(model, **batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), config["train"]["max_norm"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        say(step, loss.item())
    if config["checkpoint"]["enabled"]:
        accelerator.save_state("saved")


def trainer(config: Config) -> None:
    import transformers

    class WithLoss(nn.Module):
        """transformers wants the loss from the model."""

        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: Tensor, labels: Tensor, positions: Tensor | None = None) -> dict[str, Tensor]:
            return {"loss": loss_of(self.model, tokens, labels, positions)}

    class Said(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
            if "loss" in logs:
                say(state.global_step, float(logs["loss"]))

    class OneBatch(transformers.Trainer):
        """An item of the data is a batch already."""

        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(self.train_dataset, batch_size=None)

    model, optimizer, schedule = built(config)
    asked = transformers.TrainingArguments(
        output_dir="saved",
        use_cpu=config["launch"]["device"] == "cpu",
        bf16=config["precision"]["param"] == "bfloat16",
        max_steps=config["train"]["steps"],
        max_grad_norm=config["train"]["max_norm"],
        logging_steps=1,
        save_strategy="steps" if config["checkpoint"]["enabled"] else "no",
        save_steps=config["train"]["steps"],
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        seed=config["train"]["seed"],
    )
    OneBatch(
        model=WithLoss(model),
        args=asked,
        train_dataset=Given(config),
        optimizers=(optimizer, schedule),
        callbacks=[Said()],
    ).train()


PEERS = {"bare": bare, "fabric": fabric, "accelerate": accelerate, "trainer": trainer}


def main() -> None:
    from plait.host import compose

    PEERS[sys.argv[1]](compose(sys.argv[2:]).plain())


if __name__ == "__main__":
    main()
