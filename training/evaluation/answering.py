"""Questions put to a model in PyTorch: greedy answers with a key-value cache, and log-probabilities of options.

Prompts of like length share a batch, padded on the left, where a mask hides the padding; an answer that has ended
leaves the batch. No sampling, no penalties, the likeliest token each time.

Legend: B prompts of a batch, T positions, V vocabulary, O options, S tokens of an option.
"""

from collections.abc import Iterator, Sequence

import torch

from training.core.errors import RunError
from training.evaluation.loading import Loaded

_PROMPTS_AT_ONCE = 16
_TOKENS_AT_ONCE = 16_384


class Answerer:
    """Asks one model.

    Args:
        stop_ids: ids that end an answer.
        max_answer_tokens: the most ids of an answer, the ending one apart.
    """

    def __init__(self, loaded: Loaded, stop_ids: frozenset[int], max_answer_tokens: int):
        self.model, self.device = loaded.model, loaded.device
        self.stop_ids, self.max_answer_tokens = stop_ids, max_answer_tokens
        self.context_tokens = getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30

    def answers(self, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[int, list[int]]]:
        """Yield each prompt's number and the ids of its answer, batch by batch, the shortest prompts first.

        A prompt that leaves no room in the model's context has no answer. Raises RunError where the model gives no
        numbers.
        """
        order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
        for number in [number for number in order if len(prompts[number]) >= self.context_tokens]:
            yield number, []
        for batch in self._batches([number for number in order if len(prompts[number]) < self.context_tokens], prompts):
            yield from zip(batch, self._greedy([prompts[number] for number in batch]), strict=True)

    def _batches(self, order: list[int], prompts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        batch: list[int] = []
        for number in order:
            length = len(prompts[number]) + self.max_answer_tokens
            is_full = len(batch) == _PROMPTS_AT_ONCE or (len(batch) + 1) * length > _TOKENS_AT_ONCE
            if batch and (is_full or length > self.context_tokens):  # near the end of the context nobody is padded
                yield batch
                batch = []
            batch.append(number)
        if batch:
            yield batch

    @torch.inference_mode()
    def _greedy(self, prompts: list[Sequence[int]]) -> list[list[int]]:
        width = max(map(len, prompts))
        ids_BT = torch.tensor([[0] * (width - len(one)) + list(one) for one in prompts], device=self.device)
        mask_BT = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in prompts], device=self.device)
        most = min(self.max_answer_tokens, self.context_tokens - width)
        answers: list[list[int]] = [[] for _ in prompts]
        alive, cache, positions_BT = list(range(len(prompts))), _new_cache(), (mask_BT.cumsum(1) - 1).clamp(min=0)
        for _ in range(most):
            logits_BV = self._last_logits(ids_BT, mask_BT, positions_BT, cache)
            highest_B, chosen_B = logits_BV.max(-1)
            if not torch.isfinite(highest_B).all():
                raise RunError("the model gives no probabilities", where="the next token of an answer",
                               found=highest_B.tolist(), expected="numbers; its weights have diverged")  # fmt: skip
            chosen = chosen_B.tolist()
            going = [place for place, token in enumerate(chosen) if token not in self.stop_ids]
            for place in going:
                answers[alive[place]].append(chosen[place])
            if not going:
                break
            if len(going) < len(alive):
                kept = torch.tensor(going, device=self.device)
                cache.batch_select_indices(kept)
                mask_BT, positions_BT = mask_BT[kept], positions_BT[kept]
                alive = [alive[place] for place in going]
            ids_BT = torch.tensor([[chosen[place]] for place in going], device=self.device)
            mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(going), 1)], 1)
            positions_BT = positions_BT[:, -1:] + 1
        return answers

    def _last_logits(self, ids_BT, mask_BT, positions_BT, cache) -> torch.Tensor:
        out = self.model(
            input_ids=ids_BT, attention_mask=mask_BT, position_ids=positions_BT, cache=cache, use_cache=True,
            logits_to_keep=1,
        )  # fmt: skip
        return out.logits[:, -1]

    @torch.inference_mode()
    def logprobs(self, prompt: Sequence[int], options: Sequence[Sequence[int]]) -> list[float]:
        """The log-probability in nats of each option after the prompt, which is read once."""
        ids_BT = torch.tensor([list(prompt)], device=self.device)
        cache = _new_cache()
        out = self.model(input_ids=ids_BT, cache=cache, use_cache=True, logits_to_keep=1)
        first_V = out.logits[0, -1].float().log_softmax(-1)
        found = [first_V[option[0]].item() for option in options]
        longest = max(map(len, options))
        if longest == 1:
            return found
        cache.batch_repeat_interleave(len(options))
        ids_OS = torch.tensor([[*option, *[0] * (longest - len(option))] for option in options], device=self.device)
        logits_OSV = self.model(input_ids=ids_OS[:, :-1], cache=cache, use_cache=True).logits.float()
        nats_OS = logits_OSV.log_softmax(-1).gather(2, ids_OS[:, 1:, None])[..., 0]
        return [start + nats_OS[row, : len(option) - 1].sum().item() for row, (start, option) in enumerate(
            zip(found, options, strict=True))]  # fmt: skip


def _new_cache():
    from transformers import DynamicCache

    return DynamicCache()
