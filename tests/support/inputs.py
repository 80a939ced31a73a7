"""Random logits and targets, and options on a device."""

import torch

V = 75  # two blocks of 32 and a shorter block; rows are not 16-byte aligned
ROWS = 4


def make(rows=(ROWS,), vocab=V, dtype=torch.float32, device="cpu", scale=3.0):
    x = (torch.randn(*rows, vocab, dtype=torch.float64) * scale).to(dtype).to(device)
    target = torch.randint(0, vocab, rows).to(device)
    return x, target


def on(options, device):
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
