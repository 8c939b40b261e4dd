"""Lightning 2.5.5: manual optimisation under DDP with a static graph, whose first backward is not summed."""

import pytorch_lightning
import torch
from pytorch_lightning.strategies import DDPStrategy

from plait.testing import Comparison, Parallel, random_tokens


class Module(pytorch_lightning.LightningModule):
    """Takes no step of its own, so that gradients can be looked at."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.tokens, self.head = torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64)

    def forward(self, batch):
        logits, labels = self.head(self.tokens(batch["input_ids"])), batch["labels"]
        summed = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return summed / batch.total * batch.ranks

    def training_step(self, batch, index):
        self.loss = self(self.share)
        self.manual_backward(self.loss)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def parallelize(model, mesh):
    def run(batches):
        options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 1}
        options |= {"enable_model_summary": False, "accelerator": "cpu", "devices": mesh.size()}
        trainer = pytorch_lightning.Trainer(strategy=DDPStrategy(static_graph=True), **options)
        model.share = batches[0]
        trainer.fit(model, torch.utils.data.DataLoader([0]))
        return float(model.loss)

    return Parallel(model, run=run)


def loss(model, batch):
    return model(batch)


def manual():
    off = dict.fromkeys(["saved", "norm", "steps", "accumulation", "recomputation"], "its loop takes the steps")
    batch = random_tokens(vocab=64, shifted=True)
    return Comparison(build=Module, parallelize=parallelize, batch=batch, loss=loss, mesh={"dp": 2}, off=off)
