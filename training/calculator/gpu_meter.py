"""What a GPU's memory does while a block runs: PyTorch's two counts, and the device's own by NVML.

The device's count is NVML's used memory of the whole device less what was in use before this process came: a thread
reads it every two milliseconds, and it is read once more at the end, when the device has finished. Nobody else may use
the device meanwhile. `cuda` is `torch.cuda`, of which only documented calls are made.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

_EVERY_SECONDS = 0.002


@dataclass(frozen=True)
class Reading:
    """The peaks of a block, in three counts that contain each other."""

    allocated_bytes: int = 0
    reserved_bytes: int = 0
    device_bytes: int = 0

    def highest(self, other: Reading) -> Reading:
        return Reading(*(max(pair) for pair in zip(asdict(self).values(), asdict(other).values(), strict=True)))


class GpuMeter:
    """Peaks by the name of a block, and what the device's context takes after each.

    Args:
        used_bytes: reads the device's used memory.
        idle_bytes: what it read before this process had a context.
    """

    def __init__(self, cuda: object, used_bytes: Callable[[], int], idle_bytes: int):
        self._cuda, self._used_bytes, self._idle_bytes = cuda, used_bytes, idle_bytes
        self.readings: dict[str, Reading] = {}
        self.contexts: dict[str, int] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a block; of blocks of one name the highest counts."""
        self._cuda.synchronize()
        self._cuda.reset_peak_memory_stats()
        with _Sampler(self._used_bytes) as sampler:
            yield
            self._cuda.synchronize()
        now = Reading(
            self._cuda.max_memory_allocated(), self._cuda.max_memory_reserved(), sampler.highest - self._idle_bytes
        )
        self.readings[name] = self.readings.get(name, Reading()).highest(now)
        self.contexts[name] = sampler.last - self._idle_bytes - self._cuda.memory_reserved()

    def grown(self, work: Callable[[], object]) -> int:
        """The tensors' bytes that are held when `work` is done and its answer is dropped, beyond those before."""
        self._cuda.synchronize()
        before = self._cuda.memory_allocated()
        work()
        self._cuda.synchronize()
        return self._cuda.memory_allocated() - before

    def forget(self) -> None:
        """Give what the allocator holds for nobody back to the device."""
        self._cuda.empty_cache()

    @property
    def peak(self) -> Reading:
        """The highest of all blocks."""
        highest = Reading()
        for reading in self.readings.values():
            highest = highest.highest(reading)
        return highest


class _Sampler:
    """Reads a number again and again in a thread of its own; `last` is read when the block has ended."""

    def __init__(self, read: Callable[[], int]):
        self._read, self._over = read, threading.Event()
        self.highest = self.last = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._over.wait(_EVERY_SECONDS):
            self.highest = max(self.highest, self._read())

    def __enter__(self) -> _Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.last = self._read()
        self.highest = max(self.highest, self.last)


def warm_up(meter: GpuMeter, device: object, dtype: object) -> dict[str, int]:
    """Make the context grow as training does, stage by stage; returns the workspaces in bytes.

    They are cuBLAS's and, where a bias joins the product, cuBLASLt's of this thread, and those of the autograd thread.
    The stages are the names `init`, `matmul`, `backward` and `attention` of the meter.
    """
    import torch

    with meter.phase("init"):
        a, bias = (torch.ones(size, device=device, dtype=dtype) for size in ((512, 512), (512,)))
        leaf = torch.ones(512, 512, device=device, dtype=dtype, requires_grad=True)
        leaf.grad = torch.zeros_like(leaf)
        heads = torch.ones(1, 8, 128, 64, device=device, dtype=dtype, requires_grad=True)
    with meter.phase("matmul"):
        cublas = meter.grown(lambda: a @ a)
        cublaslt = meter.grown(lambda: torch.nn.functional.linear(a, a, bias))
    with meter.phase("backward"):
        autograd = meter.grown(lambda: torch.nn.functional.linear(leaf, a, bias).sum().backward())
    with meter.phase("attention"):
        torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).sum().backward()
    return {"cublas": cublas, "cublaslt": cublaslt, "autograd": autograd}
