"""Counters of a device that is not there, for what reads `torch.cuda`."""


class Counts:
    """A device's counters, moved by hand; it answers to the calls of `torch.cuda` that the meter makes."""

    def __init__(self):
        self.allocated = self.reserved = self.peak = self.reserved_peak = 0
        self.synchronized = 0

    def use(self, allocated: int, reserved: int) -> None:
        self.allocated, self.reserved = allocated, reserved
        self.peak, self.reserved_peak = max(self.peak, allocated), max(self.reserved_peak, reserved)

    def synchronize(self) -> None:
        self.synchronized += 1

    def reset_peak_memory_stats(self) -> None:
        self.peak, self.reserved_peak = self.allocated, self.reserved

    def max_memory_allocated(self) -> int:
        return self.peak

    def max_memory_reserved(self) -> int:
        return self.reserved_peak

    def memory_allocated(self) -> int:
        return self.allocated

    def memory_reserved(self) -> int:
        return self.reserved

    def empty_cache(self) -> None:
        self.reserved = self.allocated
