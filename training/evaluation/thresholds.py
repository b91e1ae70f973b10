"""Every number that a judgement depends on, each with where it comes from. Nothing else in the program holds one.

"train-round" and "training reference" are the project's source documents; where they name a rule and no number, the
number is the field's convention and its source says so.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Threshold:
    """A number, what it decides, and its source."""

    value: float
    decides: str
    source: str


DRAWS = Threshold(
    1000, "resamples of the paired bootstrap", "Efron and Tibshirani 1993, section 13.3; the seed is fixed"
)
BOOTSTRAP_SEED = Threshold(7, "which resamples are drawn", "train-round: the evaluation's seed stays fixed")
SIGN_FLIPS = Threshold(
    9999, "patterns of signs of the paired randomization test; all of them where there are no more",
    "Edgington and Onghena 2007, chapter 3; a random set counts the observed one too (Phipson and Smyth 2010)",
)  # fmt: skip
CONFIDENCE = Threshold(0.95, "the share of the draws inside an interval", "convention")
BETTER_ABOVE = Threshold(
    0.0, "the whole interval of the difference lies above it: better; below it: worse; else the same; and no pattern "
    "of signs is as far from it but one in twenty (1 - CONFIDENCE)",
    "train-round: finishing is not winning, a round that cannot show a win is not promoted",
)  # fmt: skip
FORGOTTEN_SHARE = Threshold(
    0.02, "the most of the guard set's agreement that may be lost; more, beyond the interval, is forgot",
    "decision trainer: the answers of a served model may differ by less than 0.02",
)  # fmt: skip
FORGOTTEN_BITS = Threshold(
    0.05, "the same for a guard set of texts, as a share of its bits per byte", "convention: five per cent"
)
COLLAPSED_SHARE = Threshold(
    0.9, "one answer at this share of the questions is a collapse, where the right answers are more various",
    "train-round: no answer may become the answer to everything",
)  # fmt: skip
FEWEST_ANSWERS = Threshold(8, "questions below which no collapse is told", "convention")
ANSWER_TOKENS = Threshold(320, "tokens of an answer where the exam names no number", "train-round: the answer cap")
QUESTIONS_GPU = Threshold(500, "questions of an exam on a GPU", "train-round: the exam's turns")
QUESTIONS_CPU = Threshold(150, "questions of an exam on a CPU", "train-round: the exam's turns")
GUARD_QUESTIONS = Threshold(60, "questions of a guard set that is drawn", "convention: a loss of a tenth shows")
BINS = Threshold(10, "bins of the expected calibration error", "Guo et al. 2017, section 2")
HEADLINE_SPLITS = ("test_postcutoff", "test", "validation")
"""The first that holds records is the headline. Source: training reference, evaluation guidance."""
