"""What a served file may be off its checkpoint, type by type: one table, from two measurements.

F32 and F16 are held to nats. The others round so much that near ties flip, so they are held to the KL divergence as a
share of what a position tells (the mean divergence of the model's own distributions from their average), which is the
same for a model that tells much and one that tells little, and to the share of equal first choices: each limit is twice
the worse of what SmolLM2-135M-Instruct showed in two measurements, 292 positions of built-in passages and of
conversations, and 271 of the docstrings' validation split; none is raised without a new one.

A limit of rounding leaves room for a wrong model: two rows of one matrix in each other's place cost 0.0001 of what a
position tells, a thirtieth of Q8_0's own rounding. So whatever the type, the one that loses nothing is proved too.
"""

from dataclasses import dataclass

NATS = {
    "F32": {"max_nats": 0.005, "median_nats": 0.001},
    "F16": {"p99_nats": 0.05, "median_nats": 0.005},
}
"""The largest gap and the median one over the top 5 of all positions; the 99th percentile of the positions' largest.

F32 showed 0.0003 at most and 0.00013 in the median on the built-in texts, 0.0003 and 0.00017 on docstrings, all of it
the server's sum over the vocabulary; F16, whose kernels round what they multiply, 0.017 and 0.0021, and 0.021 and
0.0028. After a few odd tokens they round a single position by 0.2, which a checkpoint's F32 does not share.
"""
LOSSLESS = (*NATS, "BF16")
"""What a checkpoint is proved in, as it is trained in them: one that is off is another model, and not a rounded one."""
FLOOR_NATS = 2e-4
"""A model that has hardly trained tells next to nothing, and the share of nothing is no measure: less is rounding."""


@dataclass(frozen=True)
class Measured:
    """What the base showed: mean and 99th percentile of the divergence as shares, and equal first choices."""

    kl_share: float
    kl_p99_share: float
    same_first_choice: float


MEASURED = {
    "BF16": (Measured(0.0000569, 0.000346, 0.9897), Measured(0.000145, 0.00126, 0.9926)),
    "Q8_0": (Measured(0.00147, 0.00814, 0.9623), Measured(0.00336, 0.0191, 0.9262)),
    "Q6_K": (Measured(0.00455, 0.0286, 0.9144), Measured(0.00937, 0.0524, 0.8967)),
    "Q5_K_M": (Measured(0.0262, 0.251, 0.8288), Measured(0.0482, 0.273, 0.7897)),
    "Q4_K_M": (Measured(0.0193, 0.147, 0.8425), Measured(0.0325, 0.159, 0.8192)),
}
"""On the built-in texts, and on docstrings."""


def of(quant: str) -> dict[str, float]:
    """The limits of a type by the names of the figures: each a most, but for `same_first_choice`, a least."""
    if quant in NATS:
        return dict(NATS[quant])
    seen = MEASURED[quant]
    return {
        "kl_share": 2 * max(one.kl_share for one in seen), "kl_p99_share": 2 * max(one.kl_p99_share for one in seen),
        "same_first_choice": 1 - 2 * (1 - min(one.same_first_choice for one in seen)),
    }  # fmt: skip


def exceeded(figures: dict, limits: dict[str, float]) -> list[str]:
    """The names of the figures that are over their limits. A figure that is no number is."""
    if "kl_share" in limits and figures["kl_mean_nats"] <= FLOOR_NATS:
        return []
    within = {
        name: figures[name] >= limit if name == "same_first_choice" else figures[name] <= limit
        for name, limit in limits.items()
    }
    return [name for name, holds in within.items() if not holds]
