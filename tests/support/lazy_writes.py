"""Parts of logits, and ways to write to them."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.lazy_models import V

WHERE = {
    "the logits": lambda z: z,
    "a clone": lambda z: z.clone(),
    "scaled": lambda z: z * 2,
    "some rows": lambda z: z[:, :-1],
    "the last row": lambda z: z[:, -1],
    "a view": lambda z: z.detach().view(-1, V),
    "data": lambda z: z.data,
    "a column": lambda z: z[..., 3],
    "a column of rows": lambda z: z[:, 1:][..., 3],
    "a diagonal": lambda z: z.diagonal(dim1=0, dim2=1),
    "all values": lambda z: z.view(-1),
    "an expansion": lambda z: z.expand(3, *z.shape),
    "a strided view": lambda z: torch.as_strided(z, (2, 2), (1, 2)),
    "a piece": lambda z: z.unbind(-1)[2],
    "pieces of columns": lambda z: z.split(4, -1)[1],
    "probabilities": lambda z: z.softmax(-1),
    "log-probabilities": lambda z: z.log_softmax(-1),
    "transposed": lambda z: z.transpose(0, -1),
    "view of a view": lambda z: z[..., 3].view(-1)[2:],
    "bits": lambda z: z.view(torch.int64) if z.dtype == torch.float64 else z.view(torch.int32),
}
WRITES = {
    "[...]": lambda z: z.__setitem__(..., 0),
    "[0]": lambda z: z.__setitem__(0, -30),
    "add_": lambda z: z.add_(1),
    "+=": lambda z: z.__iadd__(1),
    "copy_": lambda z: z.copy_(torch.zeros_like(z)),
    "fill_": lambda z: z.fill_(1),
    "masked_fill_": lambda z: z.masked_fill_(torch.ones(z.shape, dtype=torch.bool), 1),
    "index_fill_": lambda z: z.index_fill_(0, torch.tensor([0]), 1),
    "data =": lambda z: setattr(z, "data", torch.zeros_like(z)),
    "data +=": lambda z: z.data.add_(1),
    "out=": lambda z: torch.add(torch.ones(()), 1, out=z),
    "_foreach": lambda z: torch._foreach_mul_([z], 2),
    "set_": lambda z: z.set_(torch.zeros_like(z)),
    "resize_": lambda z: z.resize_(1),
    "unsqueeze_": lambda z: z.unsqueeze_(0),
    "share_memory_": lambda z: z.share_memory_(),
    "apply_": lambda z: z.apply_(float),
    "map_": lambda z: z.map_(torch.zeros(z.shape), lambda a, b: b),
    "taken by set_": lambda z: torch.zeros_like(z).set_(z),
    "from_dlpack": lambda z: torch.from_dlpack(z),
    "nn.init": lambda z: nn.init.zeros_(z),
    "inplace=": lambda z: F.threshold(z, 0, 0, inplace=True),
}
