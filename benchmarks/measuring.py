"""What the programs here share: tables, times of ways that take turns, and how far values are apart."""

from __future__ import annotations

import gc
import platform
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from internvl_pack.errors import UserError
from internvl_pack.model.attention import KERNELS, select_kernel


class Table:
    """Prints aligned rows as they come and remembers failures."""

    def __init__(self, *columns: tuple[str, int]) -> None:
        self.widths = [width for _, width in columns]
        self.failures = 0
        self.row(*(name for name, _ in columns))

    def row(self, *cells: object) -> None:
        print("  ".join(f"{c!s:<{w}}" for c, w in zip(cells, self.widths, strict=False)), flush=True)

    def verdict(self, ok: bool) -> str:
        self.failures += not ok
        return "ok" if ok else "FAILED"


def versions(device: torch.device) -> str:
    import transformers

    card = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    words = [card, f"python {platform.python_version()}", f"torch {torch.__version__}"]
    words.append(f"transformers {transformers.__version__}")
    try:
        import flash_attn

        words.append(f"flash_attn {getattr(flash_attn, '__version__', '?')}")
    except ImportError:
        words.append("no flash_attn")
    return ", ".join(words)


def kernels_here(names: Sequence[str] | None, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> list[str]:
    """The attention kernels that run here, of all or of these names (`auto` among them), which must."""
    found = []
    for name in names or KERNELS:
        try:
            found.append(select_kernel(name, device, dtype).name)
        except UserError as error:
            print(f"left out: {error}")
            if names:
                raise SystemExit(1) from None
    return found


# --- the device -----------------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def release(device: torch.device) -> None:
    """Give back the memory of what was deleted."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def peak_gb(device: torch.device, reset: bool = False) -> float:
    if device.type != "cuda":
        return 0.0
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated() / 1e9


def pinned(batch: dict[str, Any]) -> dict[str, Any]:
    if not torch.cuda.is_available():
        return batch
    return {k: v.pin_memory() if isinstance(v, Tensor) else v for k, v in batch.items()}


# --- times ----------------------------------------------------------------------------------------


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    started = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - started


@dataclass
class Times:
    """Of one way: seconds and the peak of memory of its passes but the first."""

    seconds: list[float] = field(default_factory=list)
    peak_gb: float = 0.0

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> str:
        return f"{(max(self.seconds) - min(self.seconds)) / self.median:.1%}"


def in_turns(
    passes: Mapping[str, Callable[[], float | None]], repeats: int, device: torch.device, once: Collection[str] = ()
) -> dict[str, Times]:
    """Ways take turns in each repetition, after a first pass of each, which compiles.

    Args:
        passes: of each way a function that gives its seconds, None where memory ran out: such a way is left out.
        once: ways that are repeated once only.
    """
    found = {name: Times() for name in passes}
    for repeat in range(repeats + 1):
        for name in [name for name in found if repeat < 2 or name not in once]:
            peak_gb(device, reset=True)
            spent = passes[name]()
            if spent is None:
                del found[name]
                continue
            if repeat:
                found[name].seconds.append(spent)
                found[name].peak_gb = max(found[name].peak_gb, peak_gb(device))
            else:
                print(f"    {name}: first pass {spent:.1f} s", flush=True)
    return found


KINDS = {
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "convolution": ("conv", "dgrad", "wgrad"),
    "matrix products": ("gemm", "nvjet", "cutlass", "sm90_xmma", "cublas", "splitk"),
    "compiled pointwise and reductions": ("triton",),
    "copies": ("memcpy", "memset", "copy"),
}


def print_kernels(recorded: Any, rows: int) -> None:
    """The device's time in a torch profile, by KINDS and by the dearest `rows` kernels."""
    kernels = [e for e in recorded.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    print(f"    kernels {sum(e.self_device_time_total for e in kernels) / 1e3:.0f} ms")
    kinds: dict[str, float] = {}
    for e in kernels:
        kind = next((k for k, words in KINDS.items() if any(w in e.key.lower() for w in words)), "other")
        kinds[kind] = kinds.get(kind, 0.0) + e.self_device_time_total
    for kind, microseconds in sorted(kinds.items(), key=lambda item: -item[1]):
        print(f"    {microseconds / 1e3:8.1f} ms  {kind}")
    for e in sorted(kernels, key=lambda e: -e.self_device_time_total)[:rows]:
        print(f"    {e.self_device_time_total / 1e3:8.2f} ms {e.count:5d} x  {e.key[:110]}")


# --- values ---------------------------------------------------------------------------------------


def relative(got: Tensor, expected: Tensor) -> float:
    """The norm of the difference over that of what is expected."""
    return ((got.float() - expected).norm() / expected.norm()).item()


def relative_of_all(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """`relative` of the tensors of `expected` as one vector."""
    total = torch.stack([e.norm() for e in expected.values()]).norm()
    return (torch.stack([(got[n] - e).norm() for n, e in expected.items()]).norm() / total).item()


def take_gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Its gradients in float32; it has none afterwards."""
    gradients = {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return gradients
