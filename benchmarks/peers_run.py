"""The training of `plait train strategy=[]` by another library: python benchmarks/peers_run.py PEER [overrides]

PEER is bare (torch alone), fabric (Lightning Fabric), accelerate, or trainer (that of transformers). Model, data,
batch, optimizer, clipping and schedule are those of the config that the overrides resolve to, on one process. A line
appears after each step; if `checkpoint.enabled`, weights and optimizer state are saved after the last. Each loop is
written as its library's documentation shows it.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Config = dict[str, Any]


def built(config: Config) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    from plait.models.llama3 import Llama3

    torch.manual_seed(config["train"]["seed"])
    model = Llama3(**{name: value for name, value in config["model"].items() if name != "_target_"})
    options = {name: value for name, value in config["optimizer"].items() if name != "_target_"}
    optimizer = torch.optim.AdamW(model.parameters(), **{**options, "fused": True})
    warmup = max(config["schedule"]["warmup_steps"], 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / warmup, 1.0))
    return model, optimizer, schedule


def batches(config: Config) -> Iterator[tuple[Tensor, Tensor]]:
    from plait.data.stdlib import Stdlib

    train = config["train"]
    source = Stdlib(**{name: value for name, value in config["data"].items() if name != "_target_"})
    size = train["local_batch_size"]
    opened = source.open(seq_len=train["seq_len"], seed=train["seed"], global_batch_size=size, dp=(0, 1))
    for step in range(train["steps"]):
        batch = opened.train(step)
        yield batch.tokens, batch.labels


class Given(torch.utils.data.IterableDataset):
    """The same batches for libraries that want a data loader of their own."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for tokens, labels in batches(self.config):
            yield {"tokens": tokens, "labels": labels}


def say(step: int, loss: float) -> None:
    print(f"step {step}  loss {loss:.4f}", flush=True)


def loss_of(model: Callable[[Tensor], Tensor], tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def bare(config: Config) -> None:
    model, optimizer, schedule = built(config)
    for step, (tokens, labels) in enumerate(batches(config), 1):
        loss = loss_of(model, tokens, labels)
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
        loss = loss_of(model, batch["tokens"], batch["labels"])
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
        loss = loss_of(model, batch["tokens"], batch["labels"])
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

        def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": loss_of(self.model, tokens, labels)}

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
        use_cpu=True,
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
    from plait.launch.compose import resolve

    PEERS[sys.argv[1]](resolve(sys.argv[2:]))


if __name__ == "__main__":
    main()
