"""A method of another kind, as somebody else would bring it: which of a question's options is right."""

import numpy as np
import torch

from training.objectives.contract import Batch
from training.objectives.method import Method
from training.objectives.trainee import Trainee


class Questions:
    """A row is a record; its label is the length of its answer, by the number of options.

    Legend: B questions, T tokens of the longest, O options.
    """

    def __init__(self, split, num_options: int):
        self._split, self._num_options = split, num_options
        self._offsets = np.asarray(split.offsets).astype(np.int64)
        self.lengths = np.diff(self._offsets)
        self.num_rows = len(self.lengths)

    def batch(self, rows: np.ndarray) -> Batch:
        ids_BT = np.zeros((len(rows), int(self.lengths[rows].max())), np.int64)
        labels_B = np.zeros(len(rows), np.int64)
        for place, row in enumerate(rows):
            start, end = self._offsets[row : row + 2]
            ids_BT[place, : end - start] = self._split.tokens[start:end]
            labels_B[place] = self._split.trained[start:end].sum() % self._num_options
        tensors = {"ids_BT": torch.from_numpy(ids_BT), "labels_B": torch.from_numpy(labels_B)}
        return Batch(tensors, len(rows), 0)

    def lines(self, rows: np.ndarray) -> list[int]:
        return sorted(int(self._split.records[row]) + 1 for row in rows)

    def loss(self, model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        scores_BO = model(tensors["ids_BT"])
        return torch.nn.functional.cross_entropy(scores_BO, tensors["labels_B"], reduction="sum")


class Scorer(torch.nn.Sequential):
    """The mean of a question's embeddings, and a score for each option."""

    def __init__(self, vocab_size: int, num_options: int):
        super().__init__(torch.nn.Embedding(vocab_size, 8), torch.nn.Linear(8, num_options, bias=False))

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        return self[1](self[0](ids_BT).mean(1))


class ScorerTrainee(Trainee):
    """Its weights lie in a file by their own names."""

    def weights(self):
        return {name: tensor.detach() for name, tensor in self.model.state_dict().items()}

    def settings(self):
        return {"options": self.model[1].out_features}


class Ask(Method):
    """Trains a scorer of options."""

    def require_dataset(self, recipe, dataset): ...

    def require_tokenizer(self, recipe, tokenizer): ...

    def rows(self, recipe, split, tokenizer):
        return Questions(split, recipe.sections["ask"]["options"])

    def build(self, recipe, tokenizer, device, dtype):
        torch.manual_seed(recipe.seeds.train)
        return ScorerTrainee(Scorer(tokenizer.vocab_size, recipe.sections["ask"]["options"]).to(device, dtype))
