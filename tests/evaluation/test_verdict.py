"""Verdicts on measurements made by hand, and the page that shows them."""

import re
from pathlib import Path

import pytest

from training.core.errors import UserError
from training.evaluation import page, sitting, verdict
from training.evaluation.conditions import Identity
from training.evaluation.exam import Exam, Question
from training.evaluation.scorers import Scorer

CONDITIONS = {"tokenizer": "t", "precision": "fp32"}


def answers(right: int, count: int = 60, said: str | None = None, **conditions: object) -> dict:
    """A measurement of an exam with so many right answers, the first ones."""
    texts = [said or (str(i) if i < right else f"no {i}") for i in range(count)]
    found = [
        {"id": str(i), "question": f"<b>{i}</b>?", "reference": str(i), "text": texts[i],
         "read": said or "", "right": i < right}
        for i in range(count)
    ]  # fmt: skip
    paper = {"kind": "exam", "name": "e", "sha256": "5" * 64, "num_questions": count}
    identity = Identity({"sha256": "m"}, paper, CONDITIONS | conditions)
    score = {"agreement": right / count, "collapse": sitting.collapse(found)}
    return {"identity": identity.to_json(), "answers": found, "score": score}


def rows(nats: list[float], tokenizer: str = "t", size: int = 10) -> dict:
    identity = Identity(
        {"sha256": "m"}, {"kind": "split", "split": "test", "dataset": "d" * 64}, {"tokenizer": tokenizer}
    )
    return {"identity": identity.to_json(), "rows": [[one, 5, size] for one in nats], "score": {}}


@pytest.mark.parametrize(
    ("before", "after", "word"),
    [(10, 40, "better"), (40, 10, "worse"), (20, 20, "same"), (20, 21, "same")],
)
def test_the_interval_decides(before: int, after: int, word: str):
    judgement = verdict.judge({"exam": answers(before)}, {"exam": answers(after)})
    assert judgement.verdict == word and judgement.is_win == (word == "better")
    found = judgement.of("exam")
    assert len(found.gained) == max(0, after - before) and len(found.lost) == max(0, before - after)


@pytest.mark.parametrize(
    ("count", "words"),
    [(2, "2 questions are too few to show any difference"), (5, "5 questions are too few"), (8, "no gain below 0.750")],
)
def test_few_questions_decide_nothing_and_the_verdict_says_so(count: int, words: str):
    """Two of two gained have an interval of +1 to +1, and nobody has shown anything."""
    judgement = verdict.judge({"exam": answers(0, count)}, {"exam": answers(min(count, 5), count)})
    assert judgement.of("exam").low > 0 and judgement.verdict == "same" and words in " ".join(judgement.reasons)
    assert verdict.judge({"exam": answers(0, 8)}, {"exam": answers(6, 8)}).verdict == "better"
    same = verdict.judge({"exam": answers(2, count)}, {"exam": answers(2, count)})
    assert (same.of("exam").low, same.of("exam").high) == (0, 0) and words in " ".join(same.reasons)


def test_few_rows_decide_nothing_either():
    judgement = verdict.judge({"test": rows([20.0] * 5)}, {"test": rows([10.0] * 5)})
    assert judgement.verdict == "same" and "5 rows are too few" in judgement.reasons[-1]
    assert verdict.judge({"test": rows([20.0] * 6)}, {"test": rows([10.0] * 6)}).verdict == "better"


def test_a_loss_is_judged_by_bits_per_byte_the_lower_the_better():
    judgement = verdict.judge({"test": rows([20.0, 30.0, 25.0] * 9)}, {"test": rows([10.0, 15.0, 12.5] * 9)})
    found = judgement.of("test")
    assert judgement.verdict == "better" and found.metric == "bits/byte"
    assert found.before == pytest.approx(2.5 / 0.693147, rel=1e-5) and found.improvement == pytest.approx(
        found.before / 2
    )
    assert found.low > 0 and found.probability_better == 1.0


def test_nothing_has_no_sign():
    """What two ways of adding up leave of no difference at all is told as nothing, and not as less than that."""
    told = verdict.judge({"test": rows([20.0] * 9)}, {"test": rows([20.000001] * 9)}).of("test").text()
    assert "better by +0.0000 (+0.0000 to +0.0000)" in told


def test_the_exam_decides_before_the_loss():
    before = {"test": rows([20.0] * 9), "exam": answers(30)}
    after = {"test": rows([10.0] * 9), "exam": answers(10)}
    assert verdict.judge(before, after).headline == "exam" and verdict.judge(before, after).verdict == "worse"


def test_an_exam_that_nobody_passes_hides_no_loss():
    def judged(exam: int, nats: float) -> verdict.Judgement:
        return verdict.judge(
            {"test": rows([20.0] * 9), "exam": answers(0)}, {"test": rows([nats] * 9), "exam": answers(exam)}
        )

    assert judged(0, 30.0).verdict == "worse" and "test: bits/byte is worse" in judged(0, 30.0).reasons[-1]
    assert judged(0, 20.0).verdict == judged(0, 10.0).verdict == "same" and judged(40, 30.0).verdict == "better"


def test_what_the_guard_set_lost_is_forgot_unless_it_is_little():
    def judged(guard: int, exam: int = 40) -> str:
        return verdict.judge(
            {"exam": answers(10), "guard": answers(50)}, {"exam": answers(exam), "guard": answers(guard)}
        ).verdict

    assert judged(30) == "forgot" and judged(50) == "better" and judged(49) == "better"
    assert judged(30, exam=10) == "forgot" and judged(30, exam=0) == "worse"


def test_a_collapse_is_worse_whatever_the_figures():
    judgement = verdict.judge({"exam": answers(10)}, {"exam": answers(60, said="4")})
    assert judgement.verdict == "worse" and "collapsed: 100 % of the answers are '4'" in judgement.reasons


def test_what_was_allowed_to_differ_is_marked():
    before, after = {"exam": answers(10)}, {"exam": answers(40, precision="bf16")}
    with pytest.raises(UserError, match="different conditions"):
        verdict.judge(before, after)
    assert verdict.judge(before, after, {"precision"}).marked == ("precision",)


def test_of_conditions_with_parts_those_that_differ_are_shown():
    """Both sides printed whole and cut off would read the same."""
    server = {"note": "x" * 80, "ctx_size": 256}
    with pytest.raises(UserError) as error:
        verdict.judge({"exam": answers(1, server=server)}, {"exam": answers(1, server=server | {"ctx_size": 512})})
    assert (error.value.found, error.value.expected) == ("server: ctx_size 512", "server: ctx_size 256")
    assert "--allow server" in error.value.next_command


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(UserError, match="no measurement in common"):
        verdict.judge({"exam": answers(1)}, {"test": rows([1.0])})
    with pytest.raises(UserError, match="no measurement in common"):
        verdict.judge({"guard": answers(1)}, {"guard": answers(1)})
    with pytest.raises(UserError, match="other texts in their rows"):
        verdict.judge({"test": rows([1.0])}, {"test": rows([1.0], "other", size=12)}, {"tokenizer"})


def record(name: str, score: dict) -> dict:
    return {"model": {"label": name, "form": "base", "sha256": "a" * 64}, "exam": score, "guard": None}


def test_the_page_shows_all_of_it_without_a_network(tmp_path: Path):
    """Both forms say the same; what a model wrote is text, never markup."""
    judgement = verdict.judge(
        {"exam": answers(10), "test": rows([3.0] * 9)}, {"exam": answers(40), "test": rows([2.0] * 9)}
    )
    exam = Exam("e", Scorer("choice"), 1, tuple(Question(str(i), None, "p", "a", ("a", "b")) for i in range(9)))
    chosen = [
        {"id": str(i), "text": "a", "read": "a", "reference": "a", "right": True, "options": ["a", "b"],
         "logprobs": [-0.1 * i, -2.0]}
        for i in range(9)
    ]  # fmt: skip
    score = sitting.score(exam, chosen)
    shown = page.Page(
        record("before", score), record("after", score), judgement, (("train", [(1, 2.0), (2, 1.5)]),),
        (("data", "d" * 12),),
    )  # fmt: skip
    page.write(tmp_path / "p.html", shown)
    html, text = (tmp_path / "p.html").read_text(), (tmp_path / "p.txt").read_text()
    assert html.count("<svg") == 4 and "<b>" not in html and "&lt;b&gt;10&lt;/b&gt;?" in html
    assert not re.search(r"(src|href)=\"(https?:)?//", html.replace("xlink:href", "")) and "<script" not in html
    for words in ("better", "30 now right", "0 no longer right", "+0.5000", "d" * 12, "calibration error"):
        assert words in html and words in text
    assert "step 2: 1.5000" in text
    with pytest.raises(UserError):
        page.write(tmp_path / "p.pdf", shown)
