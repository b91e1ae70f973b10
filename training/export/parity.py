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
_LEAST_LOGPROB = -104.0  # below the smallest float32: what the server cannot tell from zero
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

        top_N5 = np.argsort(-self.reference_NV, axis=1)[:, :TOP]
        gaps_N5 = np.take_along_axis(self.reference_NV - self.served_NV, top_N5, axis=1)
        return np.nan_to_num(np.abs(gaps_N5), nan=-_LEAST_LOGPROB)  # not even among the server's likeliest

    @cached_property
    def divergence_N(self) -> "np.ndarray":
        """KL(reference || served) of each position, `[N]` nats; tokens that were not asked for count as one."""
        import numpy as np

        reference_NV = np.exp(self.reference_NV.astype(np.float64))
        served_NV = np.exp(self.served_NV.astype(np.float64))
        asked_NV = ~np.isnan(served_NV)
        if not asked_NV.all():
            reference_NV, served_NV = (_with_rest(side_NV, asked_NV) for side_NV in (reference_NV, served_NV))
        reference_NV /= reference_NV.sum(1, keepdims=True)  # a rounding of the seventh digit is no divergence
        served_NV /= served_NV.sum(1, keepdims=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(reference_NV > 0, reference_NV * np.log(reference_NV / served_NV), 0.0).sum(1)


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
    information = _information(comparison.reference_NV)
    same = comparison.reference_NV.argmax(1) == np.nan_to_num(comparison.served_NV, nan=-np.inf).argmax(1)
    num_tokens = comparison.reference_NV.shape[1]
    asked = min(num_tokens, MAX_ASKED_TOKENS)
    figures = {
        "positions": len(comparison.prefixes), "top": TOP,
        "max_nats": _rounded(gaps_N5.max()), "median_nats": _rounded(np.median(gaps_N5)),
        "kl_mean_nats": _rounded(divergence_N.mean()), "kl_p99_nats": _rounded(np.quantile(divergence_N, 0.99)),
        "kl_share": _rounded(divergence_N.mean() / information),
        "kl_p99_share": _rounded(np.quantile(divergence_N, 0.99) / information),
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


def _with_rest(probabilities_NV: "np.ndarray", asked_NV: "np.ndarray") -> "np.ndarray":
    """The probabilities of the tokens asked for, zero for the others, and in one more column what they leave."""
    import numpy as np

    asked = np.where(asked_NV, probabilities_NV, 0.0)
    rest = np.maximum(1.0 - asked.sum(1, keepdims=True), 1e-12)
    return np.concatenate([asked, rest], axis=1)


def _information(reference_NV: "np.ndarray") -> float:
    """What a position tells, in nats: the mean KL divergence of the positions' distributions from their average."""
    import numpy as np

    weights_NV = np.exp(reference_NV.astype(np.float64))
    return float((weights_NV * (reference_NV - np.log(weights_NV.mean(0)))).sum(1).mean())


def _failure(comparison: Comparison, quant: str, figures: dict, limits: dict, over: list[str]) -> RunError:
    import numpy as np

    gaps_N5 = comparison.gaps_N5
    limit = limits.get("max_nats", 4 * float(np.median(gaps_N5.max(1))))
    first = int((gaps_N5.max(1) > min(limit, gaps_N5.max() / 2)).argmax())
    prefix = comparison.prefixes[first]
    best = int(comparison.reference_NV[first].argmax())
    served = float(np.nan_to_num(comparison.served_NV[first, best], nan=_LEAST_LOGPROB))
    bounds = [f"{name} at {'least' if name == 'same_first_choice' else 'most'} {limits[name]:g}" for name in over]
    return RunError(
        f"the served {quant} model is not the one that was trained",
        where=f"first after the {len(prefix)} ids {prefix[:8]}{' ...' if len(prefix) > 8 else ''}: token {best} has "
        f"{comparison.reference_NV[first, best]:.3f} nats in PyTorch, {served:.3f} served",
        found=", ".join(f"{name} {figures[name]:g}" for name in over)
        + f" over {figures['positions']} positions; likely cause: {_cause(comparison)}",
        expected=", ".join(bounds) + "; F16 tells rounding from a wrong model",
        next_command=again("--quant", "F16"),
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
