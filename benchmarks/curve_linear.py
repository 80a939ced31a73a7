"""Compares the loss curves of a model trained in bf16 with and without materialised logits.

The demo's transformer is trained three times from the same seed on the same batches. The first
training uses logits and PyTorch's loss in fp32. The second training uses a LinearLogits in 16
chunks. The third training repeats the first with initial weights that differ in their last bits.
The third curve shows how much rounding alone changes a curve. The script writes a plot and prints
the largest differences.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

import logitless as ll
from examples import demo

CHUNKS = 16
WINDOW = 10  # number of steps over which losses are averaged


class InBf16(demo.Learner):
    """Computes the model in bf16, and the loss of its logits in fp32."""

    def loss_of(self, tokens: Tensor, target: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
            logits = self.model(tokens)
        return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


class WithoutLogits(InBf16):
    """Computes the loss from hidden states and weight, in CHUNKS chunks."""

    def loss_of(self, tokens: Tensor, target: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
            hidden, weight = self.model.hidden(tokens), self.model.token.weight
            workspace = tokens.numel() // CHUNKS * demo.VOCAB * 2
            return ll.cross_entropy(ll.LinearLogits(hidden, weight, workspace=workspace), target)


def smooth(learner: demo.Learner) -> Tensor:
    return torch.tensor(learner.curve).unfold(0, min(WINDOW, len(learner.curve)), 1).mean(-1)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
parser.add_argument("--out", type=Path, default=Path("curve-linear.png"))
args = parser.parse_args()
scale = demo.SCALES[args.device]
options = (F.cross_entropy, scale, args.device, 0)
learners = [
    InBf16("logits, PyTorch's loss in fp32", *options),
    WithoutLogits(f"LinearLogits, {CHUNKS} chunks", *options),
    InBf16("logits, weights nudged by a bit", *options),
]
with torch.no_grad():
    for weight in learners[2].model.parameters():  # changes about the last bit of bf16
        weight.mul_(1 + 2.0**-9 * torch.randn_like(weight))
text = demo.encode(demo.read_sources(demo.MAX_CHARS))
demo.train_with_progress(learners, demo.draw_batches(text, scale, args.device, 0), args.steps)

figure = Figure(figsize=(8, 6), layout="constrained")
above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
print(
    f"largest difference from the first curve, means of {WINDOW} steps, torch {torch.__version__}:"
)
for learner, color in zip(learners, ("0.7", "C0", "C1"), strict=True):
    difference = smooth(learner) - smooth(learners[0])
    print(f"  {learner.name}: {difference.abs().max():.4f}")
    above.plot(learner.curve, color=color, label=learner.name)
    below.plot(difference.tolist(), color=color)
above.set(ylabel="cross-entropy, nats per token", title="One model in bf16, without its logits")
above.legend()
below.set(xlabel="step", ylabel=f"difference,\nmeans of {WINDOW} steps")
figure.savefig(args.out, format="png", dpi=120)
