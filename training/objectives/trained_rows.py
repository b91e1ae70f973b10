"""Rows of an embedding and its head that are trained beside a frozen rest: those of tokens that a tokenizer has added.

Owns the two layers and the names under which PEFT keeps such rows. A tied head shares the embedding's rows. What is
frozen stays bit for bit; the rows begin as they stand in the grown base.

Legend: K added tokens, D width.
"""

from __future__ import annotations

import torch
from torch import nn

from training.calculator.wrapper import Wrapper
from training.objectives.contract import Tensors

_NAME = "base_model.model.{}.token_adapter.trainable_tokens_delta"


class _WithRows(Wrapper):
    """A layer some of whose rows are trained."""

    def __init__(self, base: nn.Module, rows_KD: nn.Parameter, first: int):
        super().__init__(base)
        self.rows_KD, self.first = rows_KD, first


class EmbeddingWithRows(_WithRows):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out, own = self.base(ids), ids - self.first
        is_own = (own >= 0) & (own < len(self.rows_KD))
        rows = nn.functional.embedding(own.clamp(0, len(self.rows_KD) - 1), self.rows_KD)
        return torch.where(is_own[..., None], rows.to(out.dtype), out)


class HeadWithRows(_WithRows):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.base(hidden)
        own = nn.functional.linear(hidden.to(self.rows_KD.dtype), self.rows_KD)
        logits[..., self.first : self.first + len(self.rows_KD)] = own.to(logits.dtype)
        return logits


class TrainedRows:
    """The trained rows of a model, put in place.

    Args:
        first: the id of the first added token.
        count: how many were added; their ids follow each other.
    """

    def __init__(self, model: nn.Module, first: int, count: int, dtype: torch.dtype):
        self.first, self.count = first, count
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        is_tied = model.config.get_text_config().tie_word_embeddings
        names = {id(module): name for name, module in model.named_modules()}
        rows = self._rows(embedding, dtype)
        with_rows = EmbeddingWithRows(embedding, rows, first)
        head_with_rows = HeadWithRows(head, rows if is_tied else self._rows(head, dtype), first)
        self._layers = {names[id(embedding)]: with_rows} | ({} if is_tied else {names[id(head)]: head_with_rows})
        model.set_input_embeddings(with_rows)
        model.set_output_embeddings(head_with_rows)

    @property
    def by_name(self) -> dict[str, nn.Parameter]:
        """The rows by the names of their layers: as the layers hold them now, which may be in shards."""
        return {name: layer.rows_KD for name, layer in self._layers.items()}

    def _rows(self, layer: nn.Module, dtype: torch.dtype) -> nn.Parameter:
        return nn.Parameter(layer.weight.data[self.first : self.first + self.count].to(dtype, copy=True))

    def weights(self) -> Tensors:
        """The rows by PEFT's names."""
        return {_NAME.format(name): rows.detach() for name, rows in self.by_name.items()}

    def settings(self) -> dict:
        """What `adapter_config.json` says of them."""
        ids = list(range(self.first, self.first + self.count))
        return {"trainable_token_indices": {name.rpartition(".")[2]: ids for name in self.by_name}}
