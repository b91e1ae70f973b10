"""Next-token log-probabilities of the checkpoint in PyTorch against the GGUF as a server serves it.

Owns the figures of a comparison and what a failure is told as; how large they may be is `limits`' table.
Legend: N compared positions, V vocabulary entries, K tokens asked of the server.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from training.core.errors import RunError
from training.core.report import again
from training.export import limits as type_limits
from training.export.probes import Prompt
from training.llamacpp.client import Client

if TYPE_CHECKING:
    import numpy as np

TOP = 5
MAX_ASKED_TOKENS = 1024
_NEAR_TOKENS = 8
_LEAST_LOGPROB = -87.0  # of a smaller probability float32, in which the server has it, keeps few digits, then none
_LEAST_PROBABILITY = 1e-12
_SUM_ERROR_A_TOKEN = 1e-8  # of V summands; of the 49,152 of SmolLM2 it was 0.6e-8
_GONE_NATS = 4.0  # a token that is this far off is gone; how far it went says nothing of the cause


@dataclass(frozen=True)
class Comparison:
    """Both sides of every position: `reference_NV`, and `served_NV` with NaN where the server was not asked."""

    prefixes: list[list[int]]
    reference_NV: "np.ndarray"
    served_NV: "np.ndarray"

    @cached_property
    def gaps_N5(self) -> "np.ndarray":
        """How far the reference's top tokens are from their served log-probabilities, `[N, TOP]` nats."""
        import numpy as np

        gaps_N5 = np.empty((len(self.prefixes), min(TOP, self.reference_NV.shape[1])))
        for gaps_5, reference_V, served_V in zip(gaps_N5, self.reference_NV, self.served_NV, strict=True):
            top_5 = np.argpartition(-reference_V, len(gaps_5) - 1)[: len(gaps_5)]
            gaps_5[:] = np.abs(np.maximum(reference_V[top_5], _LEAST_LOGPROB) - served_V[top_5])
        return np.nan_to_num(gaps_N5, nan=-_LEAST_LOGPROB)  # not even among the server's likeliest

    @cached_property
    def divergence_N(self) -> "np.ndarray":
        """KL(reference || served) of each position, `[N]` nats; tokens that were not asked for count as one."""
        import numpy as np

        return np.array([_divergence(*sides) for sides in zip(self.reference_NV, self.served_NV, strict=True)])


def _divergence(reference_V: "np.ndarray", served_V: "np.ndarray") -> float:
    """By the chain rule: of the tokens asked for among themselves, and of what they leave to the rest, nats.

    What they leave is no difference while the server's own sum over the vocabulary, in float32, cannot tell it.
    """
    import numpy as np

    asked_V = ~np.isnan(served_V)
    reference, served = (np.exp(side_V[asked_V].astype(np.float64)) for side_V in (reference_V, served_V))
    left, left_served = (max(0.0, 1.0 - side.sum()) for side in (reference, served))
    if asked_V.all() or abs(left - left_served) <= _SUM_ERROR_A_TOKEN * len(asked_V):
        left_served = left
    split, split_served = ([1.0 - one, max(one, _LEAST_PROBABILITY)] for one in (left, left_served))
    with np.errstate(divide="ignore", invalid="ignore"):  # a side that has nothing is no number, which no limit takes
        among = _kl(reference / reference.sum(), served / served.sum())
        return _kl(np.array(split), np.array(split_served)) + (1.0 - left) * among


def _kl(reference: "np.ndarray", served: "np.ndarray") -> float:
    import numpy as np

    some = reference > 0
    return float((reference[some] * np.log(reference[some] / served[some])).sum())


def compare(client: Client, prompts: list[Prompt], reference_NV: "np.ndarray") -> Comparison:
    """Ask the server for the next token's log-probabilities after every prefix."""
    import numpy as np

    prefixes = [prefix for prompt in prompts for prefix in prompt.prefixes()]
    num_tokens = reference_NV.shape[1]
    served_NV = np.full(reference_NV.shape, np.nan, np.float32)
    for row, prefix in zip(served_NV, prefixes, strict=True):
        for token, logprob in client.top_logprobs(prefix, min(num_tokens, MAX_ASKED_TOKENS), reuse=True):
            row[token] = max(logprob, _LEAST_LOGPROB)
    return Comparison(prefixes, reference_NV, served_NV)


def judge(comparison: Comparison, quant: str) -> dict:
    """Return the figures of a comparison. Raises RunError, naming the worst position, where they are over the limit."""
    import numpy as np

    gaps_N5, divergence_N = comparison.gaps_N5, comparison.divergence_N
    information = max(_information(comparison.reference_NV), type_limits.LEAST_TOLD_NATS)
    same = comparison.reference_NV.argmax(1) == np.nan_to_num(comparison.served_NV, nan=-np.inf).argmax(1)
    num_tokens = comparison.reference_NV.shape[1]
    asked = min(num_tokens, MAX_ASKED_TOKENS)
    figures = {
        "positions": len(comparison.prefixes), "top": TOP,
        "max_nats": _rounded(gaps_N5.max()), "p90_nats": _rounded(np.quantile(gaps_N5.max(1), 0.9)),
        "median_nats": _rounded(np.median(gaps_N5)),
        "kl_mean_nats": _rounded(divergence_N.mean()), "kl_p99_nats": _rounded(np.quantile(divergence_N, 0.99)),
        "kl_median_share": _rounded(np.median(divergence_N) / information),
        "kl_p90_share": _rounded(np.quantile(divergence_N, 0.9) / information),
        "kl_over": "the whole vocabulary" if asked == num_tokens else f"the {asked} likeliest tokens and the rest",
        "same_first_choice": _rounded(same.mean()),
    }  # fmt: skip
    limits = type_limits.of(quant)
    over = type_limits.exceeded(figures, limits)
    if over:
        raise _failure(comparison, quant, figures, limits, over)
    return figures | {"limits": limits}


def _rounded(value: float) -> float:
    return float(f"{float(value):.4g}")


def _information(reference_NV: "np.ndarray") -> float:
    """What a position tells, in nats: the mean KL divergence of the positions' distributions from their average."""
    import numpy as np

    mean_V, certainty = np.zeros(reference_NV.shape[1]), 0.0
    for reference_V in reference_NV:
        weights_V = np.exp(reference_V.astype(np.float64))
        mean_V += weights_V / len(reference_NV)
        certainty += float(weights_V @ reference_V) / len(reference_NV)
    return certainty - float(mean_V[mean_V > 0] @ np.log(mean_V[mean_V > 0]))


def _failure(comparison: Comparison, quant: str, figures: dict, limits: dict, over: list[str]) -> RunError:
    import numpy as np

    gaps_N5 = comparison.gaps_N5
    limit = limits.get("max_nats", limits.get("p90_nats", 4 * float(np.median(gaps_N5.max(1)))))
    first = int((gaps_N5.max(1) > min(limit, gaps_N5.max() / 2)).argmax())
    prefix = comparison.prefixes[first]
    best = int(comparison.reference_NV[first].argmax())
    served = float(np.nan_to_num(comparison.served_NV[first, best], nan=_LEAST_LOGPROB))
    is_rounded = quant not in type_limits.LOSSLESS
    cause = f"{'' if quant == 'F32' else 'rounding where its F32 is right, else '}{_cause(comparison)}"
    bounds = [f"{name} at {'least' if name == 'same_first_choice' else 'most'} {limits[name]:g}" for name in over]
    return RunError(
        f"the served {quant} model is {'too far from' if is_rounded else 'not'} the one that was trained",
        where=f"first after the {len(prefix)} ids {prefix[:8]}{' ...' if len(prefix) > 8 else ''}: token {best} has "
        f"{comparison.reference_NV[first, best]:.3f} nats in PyTorch, {served:.3f} served",
        found=", ".join(f"{name} {figures[name]:g}" for name in over)
        + f" over {figures['positions']} positions; likely cause: {cause}",
        expected=", ".join(bounds),
        next_command=None if quant == "F32" else again("--quant", "F16" if is_rounded else "F32"),
    )


def _cause(comparison: Comparison) -> str:
    """Read the kind of fault off where it shows: with one key seen, with a few, or far away only."""
    import numpy as np

    lengths_N = np.array([len(prefix) for prefix in comparison.prefixes])
    worst_N = np.minimum(comparison.gaps_N5.max(1), _GONE_NATS)
    single, longer = worst_N[lengths_N == 1], worst_N[lengths_N > 1]
    near, far = worst_N[(lengths_N > 1) & (lengths_N <= _NEAR_TOKENS)], worst_N[lengths_N > _NEAR_TOKENS]
    if single.size and np.median(single) >= 0.2 * np.median(longer):
        return "the weights of a layer, a norm, the embedding or the head (single tokens differ already)"
    if near.size and far.size and near.max() < 0.2 * far.max():
        return "rope or a window (short prompts agree, longer ones do not)"
    return "query and key rows in another order, or rope (single tokens agree, longer prompts do not)"


def gap(reference_NV: "np.ndarray", other_NV: "np.ndarray") -> dict:
    """What one way of computing the model is off another, over the same positions."""
    divergence_N = Comparison([], reference_NV, other_NV).divergence_N
    same = (reference_NV.argmax(1) == other_NV.argmax(1)).mean()
    return {"kl_mean_nats": _rounded(divergence_N.mean()), "same_first_choice": _rounded(same)}


def positions(comparison: Comparison) -> list[dict]:
    """What each compared position was off: its prompt's length, the largest gap of the top, and the divergence."""
    each = zip(comparison.prefixes, comparison.gaps_N5, comparison.divergence_N, strict=True)
    return [
        {"tokens": len(prefix), "max_nats": _rounded(gaps.max()), "kl_nats": _rounded(max(divergence, 0.0))}
        for prefix, gaps, divergence in each
    ]
