"""Trains a small network with Lightning's Trainer. When workers are killed, it continues from the last steps, which the
agent's memory holds.

    elastic-agent --standalone --nproc-per-node=2 --max-restarts=3 train_lightning.py
"""

import argparse
import os

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from elastic_agent.torch.lightning import ElasticCallback, ElasticEnvironment


class Classifier(L.LightningModule):
    """Three classes of points."""

    def __init__(self):
        super().__init__()
        self.network = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))

    def training_step(self, batch, _):
        inputs, classes = batch
        loss = torch.nn.functional.cross_entropy(self.network(inputs), classes)
        if self.global_step % 20 == 0 and self.trainer.is_global_zero:
            print(f"step {self.global_step}: loss {loss.item():.4f}", flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--nodes", type=int, default=1, help="how many nodes there are at first")
parser.add_argument("--folder", default="checkpoints", help="where the Trainer's own checkpoints are; all nodes share it")
options = parser.parse_args()

# Represents data of your own: points of three classes, around a centre each.
torch.manual_seed(1)
labels = torch.randint(3, (3_000,))
dataset = TensorDataset(torch.randn(3_000, 20) + torch.randn(3, 20)[labels], labels)

elastic = ElasticCallback()
module = Classifier()
trainer = L.Trainer(
    num_nodes=options.nodes,
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    accelerator="auto",
    strategy="ddp",
    max_epochs=options.epochs,
    default_root_dir=options.folder,
    callbacks=[elastic],
    # Outside of an agent Lightning finds its own.
    plugins=[ElasticEnvironment()] if "ELASTIC_ROUND" in os.environ else [],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
begin = elastic.resume(module, options.folder)
trainer.fit(module, DataLoader(dataset, batch_size=16, shuffle=True), ckpt_path=begin)
if trainer.is_global_zero:
    print(f"step {trainer.global_step} of epoch {trainer.current_epoch}: done", flush=True)
