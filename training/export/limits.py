"""What a served file may be off its checkpoint, type by type: one table, from three measurements.

F32 and F16 are held to nats. The others round so much that near ties flip, so they are held to the KL divergence as a
share of what a position tells (the mean divergence of the model's own distributions from their average), which is the
same for a model that tells much and one that tells little, and to the share of equal first choices: each limit is twice
the worst of what SmolLM2-135M-Instruct showed in three measurements, 292 positions of built-in passages and of
conversations, 263 of the docstrings' validation split, and 262 of short questions in German; none is raised without a
new one. They are limits of the median and the 90th percentile: after a few beginnings that a model is sensitive to,
rounding moves a handful of positions by nats, and the mean and the 99th percentile of a right file by twenty times.

A limit of rounding leaves room for a wrong model: two rows of one matrix in each other's place cost 0.0001 of what a
position tells, a thirtieth of Q8_0's own rounding. So whatever the type, the one that loses nothing is proved too.
"""

from dataclasses import dataclass

NATS = {
    "F32": {"max_nats": 0.005, "median_nats": 0.001},
    "F16": {"p90_nats": 0.025, "median_nats": 0.005},
}
"""The largest gap and the median one over the top 5 of all positions; the 90th percentile of the positions' largest.

F32 showed 0.0003 at most and 0.00013 to 0.00016 in the median, all of it the server's sum over the vocabulary; F16,
whose kernels round what they multiply, 0.0113 at the 90th percentile, 0.0026 in the median and 0.34 at one position.
"""
LOSSLESS = (*NATS, "BF16")
"""What a checkpoint is proved in, as it is trained in them: one that is off is another model, and not a rounded one."""
LEAST_TOLD_NATS = 1.88
"""What a position tells is taken as no less, which is what one of the base's tells in the German measurement: rounding
moves a model that has hardly trained, or learnt to answer all alike, by nats as it moves others, and the share of next
to nothing is no measure."""


@dataclass(frozen=True)
class Measured:
    """What the base showed: median and 90th percentile of the divergence as shares, and equal first choices."""

    kl_median_share: float
    kl_p90_share: float
    same_first_choice: float


MEASURED = {
    "BF16": (
        Measured(0.0000345, 0.000113, 0.9897),
        Measured(0.0000604, 0.000193, 0.9886),
        Measured(0.0000759, 0.000216, 0.9771),
    ),
    "Q8_0": (Measured(0.00113, 0.00263, 0.9589), Measured(0.00197, 0.00503, 0.924), Measured(0.00242, 0.00705, 0.9351)),
    "Q6_K": (Measured(0.00275, 0.00945, 0.9178), Measured(0.00534, 0.0161, 0.9125), Measured(0.00571, 0.0189, 0.8893)),
    "Q5_K_M": (Measured(0.0147, 0.0478, 0.8288), Measured(0.0285, 0.0805, 0.7605), Measured(0.0265, 0.0632, 0.8282)),
    "Q4_K_M": (Measured(0.012, 0.0388, 0.8425), Measured(0.0213, 0.053, 0.8137), Measured(0.0213, 0.0805, 0.7939)),
}
"""On the built-in texts, on docstrings, and on questions in German."""


def of(quant: str) -> dict[str, float]:
    """The limits of a type by the names of the figures: each a most, but for `same_first_choice`, a least."""
    if quant in NATS:
        return dict(NATS[quant])
    seen = MEASURED[quant]
    return {
        "kl_median_share": 2 * max(one.kl_median_share for one in seen),
        "kl_p90_share": 2 * max(one.kl_p90_share for one in seen),
        "same_first_choice": 1 - 2 * (1 - min(one.same_first_choice for one in seen)),
    }  # fmt: skip


def exceeded(figures: dict, limits: dict[str, float]) -> list[str]:
    """The names of the figures that are over their limits. A figure that is no number is."""
    within = {
        name: figures[name] >= limit if name == "same_first_choice" else figures[name] <= limit
        for name, limit in limits.items()
    }
    return [name for name, holds in within.items() if not holds]
