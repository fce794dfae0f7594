"""The output head alone: forward and backward of the labelled tokens by each loss kernel that runs here.

    python benchmarks/loss.py                       # heads of the 1B and the 8B shape, one GPU
    python benchmarks/loss.py --device cpu          # the script itself, in small

Prints milliseconds (median), memory beyond weights and inputs at the peak, the loss, and how far the head's gradient is
from that of `torch`. A kernel that waits for the device is an error, but for the compiled one, which compiles.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measuring import Table, versions
from internvl_pack.model.loss import DEFAULT_CHUNK_TOKENS, LabelledHead, fusible_loss_and_gradient, loss_and_gradient
from internvl_pack.model.loss.kernels import liger_loss_and_gradient, liger_problem


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=1670, help="labelled ones, about those of a row of 16,384")
    parser.add_argument("--chunk", type=int, default=DEFAULT_CHUNK_TOKENS)
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16
    shapes = ((896, 151_674), (3584, 151_674)) if on_gpu else ((64, 1_003),)
    backend = "inductor" if on_gpu else "aot_eager"
    kernels = {"torch": loss_and_gradient, "liger": liger_loss_and_gradient}
    kernels["compiled"] = torch.compile(fusible_loss_and_gradient, dynamic=True, backend=backend)
    if problem := liger_problem(device, dtype):
        print(f"without liger: {problem}")
        del kernels["liger"]
    print(versions(device))
    columns = (("width", 6), ("kernel", 9), ("ms", 8), ("peak GB", 8), ("loss", 14), ("gradient apart", 14))
    table = Table(*columns)
    for width, vocabulary in shapes:
        torch.manual_seed(0)
        linear = torch.nn.Linear(width, vocabulary, bias=False, device=device, dtype=dtype)
        hidden = torch.randn(args.tokens, width, device=device, dtype=dtype, requires_grad=True)
        targets = torch.randint(vocabulary, (args.tokens,), device=device)
        weights = torch.rand(args.tokens, device=device)
        expected = None
        for name, kernel in kernels.items():
            head = LabelledHead(lambda linear=linear: linear, args.chunk)
            head.loss_kernel = kernel

            def step(head=head, hidden=hidden, linear=linear, targets=targets, weights=weights) -> torch.Tensor:
                hidden.grad = linear.weight.grad = None
                weighted, _ = head(hidden, targets, weights)
                weighted.backward()
                return weighted.detach()

            seconds = []
            for repeat in range(args.repeats + 2):
                measured = repeat >= 2
                if on_gpu:
                    torch.cuda.synchronize()
                    if repeat == 2:
                        hidden.grad = linear.weight.grad = None
                        torch.cuda.reset_peak_memory_stats()
                        base = torch.cuda.memory_allocated()
                    torch.cuda.set_sync_debug_mode("error" if measured and name != "compiled" else "default")
                started = time.perf_counter()
                loss = step()
                if on_gpu:
                    torch.cuda.set_sync_debug_mode("default")
                    torch.cuda.synchronize()
                if measured:
                    seconds.append(time.perf_counter() - started)
            peak = (torch.cuda.max_memory_allocated() - base) / 1e9 if on_gpu else 0.0
            gradient = linear.weight.grad.float()
            expected = gradient if expected is None else expected
            apart = (gradient - expected).norm() / expected.norm()
            milliseconds = statistics.median(seconds) * 1e3
            table.row(width, name, f"{milliseconds:.2f}", f"{peak:.2f}", f"{loss.item():.4f}", f"{apart.item():.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
