"""The training of `plait train 'strategy=[fsdp2]'` as one would write it by hand: torch, and Plait's model and data.

On one rank nothing is sharded, as with `strategy=[]`. By itself:
torchrun --nproc-per-node=2 benchmarks/bare_loop.py [overrides]
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from plait_data.stdlib import Stdlib
from plait_models.llama3 import Llama3


class BareLoop:
    """`config`: the nodes model, data, train, optimizer and schedule of a resolved config of Plait."""

    def __init__(self, config: dict[str, Any]) -> None:
        def options(key: str) -> dict[str, Any]:
            return {name: value for name, value in config[key].items() if name not in ("_target_", "groups", "decays")}

        train, world = config["train"], dist.get_world_size()
        torch.manual_seed(train["seed"])
        self.model = Llama3(**options("model"))
        blocks = list(self.model.layers.values()) if world > 1 else []
        for block in blocks:
            fully_shard(block, reshard_after_forward=block is not blocks[-1])
        if blocks:
            fully_shard(self.model, reshard_after_forward=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **{**options("optimizer"), "fused": True})
        self.warmup = max(config["schedule"]["warmup_steps"], 1)
        self.lr, self.max_norm = config["optimizer"]["lr"], train["max_norm"]
        self.batches = Stdlib(**options("data")).open(
            seq_len=train["seq_len"],
            seed=train["seed"],
            global_batch_size=train["local_batch_size"] * world,
            dp=(dist.get_rank(), world),
        )
        self.steps = 0

    def step(self) -> float:
        """Train one step; returns this rank's loss."""
        batch = self.batches.train(self.steps)
        logits = self.model(batch.tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * min(self.steps / self.warmup, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def main() -> None:
    from plait.host import compose

    dist.init_process_group("gloo")
    config = compose(sys.argv[1:]).plain()
    loop = BareLoop(config)
    for step in range(config["train"]["steps"]):
        loss = loop.step()
        if dist.get_rank() == 0 and (step + 1) % config["metrics"]["log_every"] == 0:
            print(f"step {step + 1}  loss {loss:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
