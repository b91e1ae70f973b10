"""An Ollama Modelfile for a GGUF: its template in Ollama's own language, where it stops, and its context.

Owns the translation of a chat template. Ollama's language is Go's, so what stands around each role's text is read off
the rendered template, and the translation is kept only where it gives the same text for every conversation that the
export is proved on; else the file says so and leaves Ollama to what it knows. Source: Ollama `docs/modelfile.md`.
"""

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from training.core import files
from training.core.errors import MachineError, RunError, UserError
from training.export import turns
from training.export.checkpoint import Checkpoint
from training.tokenizer.template import normalised

_MARK, _OTHER = "\x02content\x02", "\x02other\x02"
_ROLES = ("system", "user", "assistant")
_SECONDS = 600


@dataclass(frozen=True)
class Frame:
    """What a template writes around each role's text, where no system message opens, and where an answer begins."""

    around: dict[str, tuple[str, str]]
    without_system: str
    answer: str

    def render(self, messages: tuple[dict, ...]) -> str:
        """The text of a conversation up to its answer, as the Modelfile's template writes it."""
        has_system = any(message["role"] == "system" for message in messages)
        parts = [self.around[one["role"]][0] + one["content"] + self.around[one["role"]][1] for one in messages]
        return ("" if has_system else self.without_system) + "".join(parts) + self.answer

    def to_go(self) -> str:
        """The same in Go's template language."""
        cases = [
            f'{{{{ {"if" if number == 0 else "else if"} eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}'
            for number, (role, (before, after)) in enumerate(self.around.items())
        ]
        opening = f"{{{{ if not .System }}}}{self.without_system}{{{{ end }}}}" if self.without_system else ""
        return f"{opening}{{{{ range .Messages }}}}{''.join(cases)}{{{{ end }}}}{{{{ end }}}}{self.answer}"


def path_of(gguf: Path) -> Path:
    """`tiny-Q8_0.Modelfile` of `tiny-Q8_0.gguf`."""
    return gguf.with_name(f"{gguf.name.removesuffix('.gguf')}.Modelfile")


def write(checkpoint: Checkpoint, gguf: Path, context_tokens: int) -> Path:
    """Write the Modelfile of a GGUF beside it."""
    lines = [f"FROM ./{gguf.name}"]
    frame = frame_of(checkpoint)
    if frame is not None:
        lines.append(f'TEMPLATE """{frame.to_go()}"""')
    elif checkpoint.chat_template is None:
        lines += ["# The model has no chat template: it continues text.", 'TEMPLATE "{{ .Prompt }}"']
    else:
        lines.append("# The chat template is more than Ollama's language says; Ollama takes what it knows of it.")
    stops = [checkpoint.special_id("eos"), checkpoint.turn_end_id]
    texts = dict.fromkeys(checkpoint.encoder.id_to_token(one) for one in stops if one is not None)
    lines += [f"PARAMETER stop {json.dumps(text, ensure_ascii=False)}" for text in texts]
    lines.append(f"PARAMETER num_ctx {context_tokens}")
    path = path_of(gguf)
    files.write_text(path, "\n".join(lines) + "\n")
    return path


def frame_of(checkpoint: Checkpoint) -> Frame | None:
    """What stands around each role's text; None without a template, or for one that is more than that."""
    if checkpoint.chat_template is None:
        return None
    template = turns.template_of(checkpoint)

    def render(*messages: tuple[str, str], prompt: bool = False) -> str:
        return template.render(
            normalised([{"role": role, "content": text} for role, text in messages]), prompt=prompt, thinking=True
        )

    try:
        frame = _read_off(render)
        own = [
            template.render(normalised(conversation), prompt=True, thinking=True)
            for conversation in turns.CONVERSATIONS
        ]
    except (UserError, ValueError):
        return None
    bos = checkpoint.special_text("bos") if checkpoint.add_bos else None
    same = all(
        text.removeprefix(bos or "") == frame.render(conversation).removeprefix(bos or "")
        for text, conversation in zip(own, turns.CONVERSATIONS, strict=True)
    )
    parts = [frame.without_system, frame.answer, *(text for pair in frame.around.values() for text in pair)]
    return frame if same and not any(bad in text for text in parts for bad in ("{{", "}}", '"""')) else None


def _read_off(render) -> Frame:
    """Take a template apart. Raises ValueError where a text does not stand in it as it is."""
    alone = render(("user", _MARK))
    before_alone, after_user = _split(alone)
    try:
        between = _split(render(("user", _OTHER), ("user", _MARK)))[0].partition(_OTHER)[2]
        before_user = between.removeprefix(after_user)
    except UserError:  # it wants turns: what stands between an answer and a question is the question's
        before_user = _split(render(("user", "U"), ("assistant", _OTHER), ("user", _MARK)))[0].partition(_OTHER)[2]
    before_system, rest = _split(render(("system", _MARK), ("user", _OTHER)))
    after_system = rest.partition(_OTHER)[0].removesuffix(before_user)
    before, after = _split(render(("user", _OTHER), ("assistant", _MARK), ("user", "U")))
    answer = (
        before.partition(_OTHER)[2].removeprefix(after_user),
        after[: after.rindex("U")].removesuffix(before_user),
    )
    around = {"system": (before_system, after_system), "user": (before_user, after_user), "assistant": answer}
    opening = render(("user", _MARK), prompt=True)[len(alone) :]
    return Frame(around, before_alone.removesuffix(before_user), opening)


def _split(text: str) -> tuple[str, str]:
    before, mark, after = text.partition(_MARK)
    if not mark:
        raise ValueError("a text does not stand in the template as it is")
    return before, after


def register(name: str, modelfile: Path) -> None:
    """Have Ollama take the model under a name. Raises MachineError where there is none that answers."""
    if shutil.which("ollama") is None:
        raise MachineError(
            "there is no Ollama on this machine", where="PATH", found="no ollama", expected="Ollama, and its server",
            next_command=f"ollama create {name} -f {modelfile}",
        )  # fmt: skip
    command = ["ollama", "create", name, "-f", modelfile.name]
    try:
        done = subprocess.run(
            command, cwd=modelfile.parent, capture_output=True, text=True, errors="replace", timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise RunError("Ollama did not answer in time", where=" ".join(command), found=f"{_SECONDS} s") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise MachineError(
            "Ollama did not take the model", where=" ".join(command), found=lines[-1] if lines else "no word",
            expected="a server of Ollama that answers", next_command="ollama serve",
        )  # fmt: skip
