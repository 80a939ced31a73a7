"""For developers: counts the files and functions of the library that one call runs on the host.

    python benchmarks/call_path.py [CHECKOUT] [--names]

The script counts the distinct Python functions of the package that run in forward and in backward.
Comprehensions and code that runs on the GPU are not counted. Three calls before the count fill the
caches. Without a GPU, the script counts both backends, and the kernels run under Triton's
interpreter. CHECKOUT is the checkout to measure, by default the checkout of this script.
"""

import argparse
import contextlib
import os
import sys
import threading
import warnings
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("checkout", nargs="?", default=Path(__file__).parents[1], type=Path)
parser.add_argument("--names", action="store_true", help="list the functions")
args = parser.parse_args()
sys.path.insert(0, str(args.checkout.resolve()))
warnings.simplefilter("ignore")
import torch  # noqa: E402

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
import logitless as ll  # noqa: E402

ROOT = str(Path(ll.__file__).parent)


def crossed(f) -> tuple[object, set[tuple[str, str]]]:
    """Returns the result of f(), and the (file, function) pairs of the package that f called."""
    seen: set[tuple[str, str]] = set()

    def look(frame, event, _):
        code = frame.f_code
        ours = event == "call" and code.co_filename.startswith(ROOT) and code.co_name[0] != "<"
        if ours and not hasattr(frame.f_globals.get(code.co_name), "fn"):  # not a kernel
            name = getattr(code, "co_qualname", code.co_name)
            seen.add((os.path.relpath(code.co_filename, ROOT), name))

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        return f(), seen
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def calls():
    """Yields the name and the forward function of each measured call."""
    rows, vocab = (64, 1024) if device == "cuda" else (4, 64)  # the interpreter is slow
    x = torch.randn(rows, vocab, device=device, requires_grad=True)
    target = torch.randint(0, vocab, (rows,), device=device)
    hidden = torch.randn(rows, 32, device=device, requires_grad=True)
    weight = torch.randn(vocab, 32, device=device, requires_grad=True)
    targets = ll.capture_topk(torch.randn(rows, vocab, device=device), 8)
    options = {"divergence": "forward_kl", "support": "tail", "labels": target, "ce_weight": 0.5}
    yield "cross_entropy", lambda: ll.cross_entropy(x, target)
    yield "topk_distill", lambda: ll.topk_distill(x, targets, **options)
    yield "a head", lambda: ll.cross_entropy(ll.LinearLogits(hidden, weight), target)


for impl in ("kernels",) if device == "cuda" else ("triton", "eager"):
    with ll.impl(impl) if device == "cpu" else contextlib.nullcontext():
        for name, forward in calls():
            for _ in range(3):
                forward().backward()
            loss, forth = crossed(forward)
            _, back = crossed(loss.backward)
            files = {file for file, _ in forth | back}
            counts = f"{len(forth):4} + {len(back)} functions"
            print(f"{impl:7} {name:14} {len(files):3} files {counts}")
            if args.names:
                print("   files   ", *sorted(files))
                print("   forward ", *sorted(function for _, function in forth))
                print("   backward", *sorted(function for _, function in back))
