"""An exam by another's judgement: EleutherAI's lm-eval, in an environment of its own, asks the served model.

The exam becomes a task of the harness, and the questions reach llama.cpp's chat route as conversations; the harness
scores them by its own exact match. Its answers are read by this exam's scorer too, so that the two can be compared.
What the harness needs besides (log-probabilities of a prompt's tokens) the server does not give: choices are refused.
Source: lm-evaluation-harness, `docs/task_guide.md`; `docker/lm-eval.lock` has the release and its hashes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from training.core import files, locks, paths
from training.core.errors import MachineError, RunError, UserError
from training.core.log import say
from training.core.report import again
from training.evaluation.exam import Exam

LOCK = paths.REPOSITORY / "docker" / "lm-eval.lock"
TASK = "trainyard_exam"
_DONE = "installed.lock"


def environment() -> Path:
    """The harness's own environment, made once for this machine from the lock file, and again where the Python that it
    was made of is gone. Raises MachineError."""
    folder = paths.roots().cache / "environments" / f"lm-eval-{files.short(files.sha256_file(LOCK))}"
    with locks.hold(folder.with_suffix(".lock"), "lm-eval's environment", resource="lm-eval's environment"):
        if not ((folder / _DONE).is_file() and _python(folder).exists()):
            say(f"setting up lm-eval from docker/{LOCK.name}, 160 MB to fetch, once for this machine")
            _run([sys.executable, "-m", "venv", "--clear", str(folder)])
            _run([str(_python(folder)), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--require-hashes",
                  "--no-deps", "-r", str(LOCK)])  # fmt: skip
            files.write_bytes(folder / _DONE, LOCK.read_bytes())
    return folder


def _python(environment: Path) -> Path:
    """Its Python, which finds what is beside it wherever the folder is: its scripts name where they were made."""
    return environment / "bin" / "python"


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=2, env=_environment())
    if done.returncode:
        raise MachineError(
            "lm-eval could not be set up", where=LOCK, found=f"{' '.join(command[1:3])} ended with {done.returncode}",
            expected="the packages of the lock file; README.md, 'If the set-up fails', names pip's settings",
            next_command=again(),
        )  # fmt: skip


def _environment(**added: str) -> dict[str, str]:
    """This process's variables without what would mix the two environments up."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | added


def require_askable(exam: Exam, instead: str) -> None:
    """Raise UserError, naming the command that can, where the harness cannot put a question as this exam does."""
    if exam.scorer.name == "choice":
        raise UserError(
            "the harness cannot ask a choice of llama.cpp's server", where=exam.name, found="the scorer choice",
            expected="answers in words: the server tells no log-probabilities of a text that it is given",
            next_command=instead,
        )  # fmt: skip
    for question in exam.questions:
        if question.messages is None or len(question.messages) > 1 or question.tools:
            raise UserError(
                "the harness asks in one turn", where=f"question {question.id} of {exam.name}",
                found="a bare prompt" if question.messages is None else "several messages, or tools",
                expected="a question of one message", next_command=instead,
            )  # fmt: skip


def sit(exam: Exam, url: str, folder: Path, program: Path) -> dict:
    """Let the harness ask a server every question; `{"exact_match", "agreement", "version", "answers"}`.

    Args:
        folder: where the task and what the harness writes are put.
        program: the harness's environment.

    Raises RunError where the harness fails or leaves a question out.
    """
    _write_task(exam, folder)
    command = [
        str(_python(program)), "-m", "lm_eval", "run", "--model", "local-chat-completions", "--model_args",
        f"base_url={url}/v1/chat/completions,model={TASK},num_concurrent=1,max_retries=1",
        "--include_path", str(folder), "--tasks", TASK, "--apply_chat_template", "--log_samples",
        "--gen_kwargs", "repeat_penalty=1.0,cache_prompt=false", "--output_path", str(folder / "out"),
    ]  # fmt: skip
    offline = {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(command, stdout=2, env=_environment(**offline, OPENAI_API_KEY="none"))
    results = sorted((folder / "out").rglob("results_*.json"))
    if done.returncode or not results:
        raise RunError("lm-eval failed", where=" ".join(command[:4]), found=f"exit code {done.returncode}",
                       expected="its own words are above")  # fmt: skip
    return _read(exam, results[-1])


def _write_task(exam: Exam, folder: Path) -> None:
    """The exam as the harness's task. JSON is YAML."""
    questions = folder / "questions.jsonl"
    lines = [{"id": one.id, "question": one.text, "answer": one.answer} for one in exam.questions]
    files.write_text(questions, "".join(json.dumps(line) + "\n" for line in lines))
    task = {
        "task": TASK, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(questions)}},
        "test_split": "test", "output_type": "generate_until", "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}", "metadata": {"version": 1},
        "generation_kwargs": {
            "until": [], "max_gen_toks": exam.max_answer_tokens, "do_sample": False, "temperature": 0.0
        },
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip
    files.write_json(folder / f"{TASK}.yaml", task)


def _read(exam: Exam, results: Path) -> dict:
    document = json.loads(results.read_text())
    answers = {}
    for path in results.parent.glob(f"samples_{TASK}_*.jsonl"):
        for line in path.read_text().splitlines():
            sample = json.loads(line)
            answers[sample["doc"]["id"]] = sample["resps"][0][0] or ""
    if missing := [one.id for one in exam.questions if one.id not in answers]:
        raise RunError("lm-eval left questions out", where=results, found=f"{len(missing)} without an answer",
                       expected=f"{len(exam.questions)} answers")  # fmt: skip
    read = exam.scorer
    right = sum(read.read(answers[one.id]) == read.reference(one.answer) for one in exam.questions)
    return {
        "exact_match": document["results"][TASK]["exact_match,none"], "agreement": right / len(exam.questions),
        "num_right": right, "num_questions": len(exam.questions), "version": document.get("lm_eval_version"),
        "answers": answers,
    }  # fmt: skip
