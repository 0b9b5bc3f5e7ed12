"""transformers on backend "clcomm": docs/pytorch-ddp.md shows the lines that differ."""

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import clcomm.torch  # noqa: F401 - registers the backend

dist.init_process_group("clcomm")

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2))
texts = torch.randint(0, 50, (64, 16))
data = [{"input_ids": text, "labels": text} for text in texts]
arguments = TrainingArguments(
    output_dir="run",
    use_cpu=True,
    max_steps=4,
    per_device_train_batch_size=4,
    save_strategy="no",
    report_to="none",
)
trained = Trainer(model=model, args=arguments, train_dataset=data).train()
if dist.get_rank() == 0:
    print(f"{dist.get_world_size()} ranks, loss {trained.training_loss:.3f}")
dist.destroy_process_group()
