"""A small model that `fuse` can find the head of."""

import torch
from torch import nn

V, D = 23, 6


class Model(nn.Module):
    """An embedding and a head, which is a linear layer by default."""

    def __init__(self, head=None):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(V, D)
        self.lm_head = nn.Linear(D, V) if head is None else head

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, ids):
        return self.lm_head(self.embed(ids))
