"""A layer around another, to which it hands on what it does not have itself. This module imports torch."""

from __future__ import annotations

from torch import nn


class Wrapper(nn.Module):
    """A layer in the place of its `base`: what a model reads of that, such as `weight`, is the base's."""

    def __init__(self, base: nn.Module):
        super().__init__()
        self.base = base

    def __getattr__(self, name: str) -> object:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)
