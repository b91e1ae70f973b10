"""What a served file may be off its checkpoint, type by type: one table, from two measurements.

F32 and F16 are held to nats. The others round so much that near ties flip, so they are held to the KL divergence as a
share of what a position tells (the mean divergence of the model's own distributions from their average), which is the
same for a model that tells much and one that tells little, and to the share of equal first choices. Each limit is twice
the worse of what SmolLM2-135M-Instruct showed in two measurements: 264 positions of the built-in passages and
conversations, and 271 of the docstrings' validation split; none is raised without a new one. A zeroed layer, or query
and key rows in the wrong order, cost 0.04 and more in F32.
"""

from dataclasses import dataclass

MAX_NATS, MEDIAN_NATS = 0.05, 0.005
"""Of F32 and F16, over positions and the top 5. Measured on the built-in texts: F32 0.024 and 0.0010, F16 0.042
and 0.0028; on docstrings F16 0.023 and 0.0028, F32 0.0010 and one value at 0.0503, over the limit by rounding."""
FLOOR_NATS = 2e-4
"""A model that has hardly trained tells next to nothing, and the share of nothing is no measure: less is rounding."""


@dataclass(frozen=True)
class Measured:
    """What the base showed: mean and 99th percentile of the divergence as shares, and equal first choices."""

    kl_share: float
    kl_p99_share: float
    same_first_choice: float


MEASURED = {
    "BF16": (Measured(0.0000643, 0.000383, 0.9924), Measured(0.000115, 0.000661, 0.9889)),
    "Q8_0": (Measured(0.00153, 0.00737, 0.9356), Measured(0.00316, 0.0111, 0.9410)),
    "Q6_K": (Measured(0.00444, 0.0211, 0.8977), Measured(0.00874, 0.0441, 0.9041)),
    "Q5_K_M": (Measured(0.0251, 0.164, 0.7879), Measured(0.0456, 0.289, 0.7860)),
    "Q4_K_M": (Measured(0.0155, 0.0707, 0.8636), Measured(0.0331, 0.171, 0.8376)),
}
"""On the built-in texts, and on docstrings."""


def of(quant: str) -> dict[str, float]:
    """The limits of a type by the names of the figures: each a most, but for `same_first_choice`, a least."""
    if quant in ("F32", "F16"):
        return {"max_nats": MAX_NATS, "median_nats": MEDIAN_NATS}
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
