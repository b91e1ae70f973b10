"""What a served file may be off its checkpoint, type by type: one table, from two measurements.

F32 and F16 are held to nats. The others round so much that near ties flip, so they are held to the KL divergence as a
share of what a position tells (the mean divergence of the model's own distributions from their average), which is the
same for a model that tells much and one that tells little, and to the share of equal first choices: each limit is twice
the worse of what SmolLM2-135M-Instruct showed in two measurements, 264 positions of built-in passages and of
conversations, and 271 of the docstrings' validation split; none is raised without a new one.

A wrong model must be told from rounding: query and key rows in the wrong order diverge by 0.35 of what a position
tells, a zeroed layer of the base by 0.029 at least (26 of its 30 were tried). BF16, Q8_0 and Q6_K find each of them; 11
of the 26 stay within the limits of Q5_K_M, 3 within those of Q4_K_M, so what K-quants are made of is proved as well.
"""

from dataclasses import dataclass

NATS = {
    "F32": {"max_nats": 0.005, "median_nats": 0.001},
    "F16": {"p99_nats": 0.05, "median_nats": 0.005},
}
"""Over the top 5 of all positions, and over positions of the worst of their top 5. F32 showed TODO"""
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
    "BF16": (Measured(0.0000614, 0.000227, 0.9924), Measured(0.000147, 0.00127, 0.9926)),
    "Q8_0": (Measured(0.00149, 0.00542, 0.9394), Measured(0.00336, 0.0191, 0.9262)),
    "Q6_K": (Measured(0.00477, 0.0215, 0.8977), Measured(0.00937, 0.0524, 0.8967)),
    "Q5_K_M": (Measured(0.0245, 0.156, 0.8106), Measured(0.0482, 0.273, 0.7897)),
    "Q4_K_M": (Measured(0.0159, 0.0803, 0.8409), Measured(0.0325, 0.159, 0.8192)),
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
