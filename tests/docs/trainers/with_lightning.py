"""Lightning on backend "clcomm": docs/pytorch-ddp.md shows the lines that differ."""

import os

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy

import clcomm.torch  # noqa: F401 - registers the backend


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)

    def training_step(self, batch, index):
        inputs, labels = batch
        loss = torch.nn.functional.cross_entropy(self.layer(inputs), labels)
        right = (self.layer(inputs).argmax(1) == labels).sum()
        self.log_dict({"loss": loss, "right": right}, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))
model = Classifier()
trainer = Trainer(
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    max_epochs=2,
    logger=False,
    strategy=DDPStrategy(process_group_backend="clcomm"),
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
if trainer.is_global_zero:
    print(f"{trainer.world_size} ranks, loss {trainer.callback_metrics['loss']:.3f}")
