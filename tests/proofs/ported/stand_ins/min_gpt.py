"""Trains minGPT's model with its own Trainer on sums of digits, as its demo does."""

import numpy as np
import torch
from mingpt.model import GPT
from mingpt.trainer import Trainer
from torch.utils.data import Dataset


class Sums(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        digits = np.random.default_rng(index).integers(0, 5, 12).cumsum() % 10
        return torch.tensor(digits[:-1], dtype=torch.long), torch.tensor(digits[1:], dtype=torch.long)


torch.manual_seed(3407)
config = GPT.get_default_config()
config.model_type, config.vocab_size, config.block_size = "gpt-nano", 10, 11
config.embd_pdrop = config.resid_pdrop = config.attn_pdrop = 0.0
model = GPT(config)
settings = Trainer.get_default_config()
settings.learning_rate, settings.max_iters, settings.num_workers, settings.batch_size = 5e-4, 100, 0, 16
Trainer(settings, model, Sums()).run()
