"""A checkpoint turned into GGUF files by the pinned converter, in a process of its own.

The bytes depend on the weights, the configuration, the tokenizer, the model's name and the pin, on nothing else: the
converter sees a folder of a fixed name with only the files that it needs (no README, no generation settings), a
fixed hash seed and no network. Where the checkpoint lies, when and by whom it is converted does not enter.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from training.core import files
from training.core.errors import RunError
from training.llamacpp import source as sources

OUTTYPES = ("F32", "F16", "BF16", "Q8_0")
_DRIVER = Path(__file__).with_name("driver.py")
_STAGED = "model"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_TOKENIZER = ("tokenizer.json", "chat_template.jinja")
_PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "OMP_NUM_THREADS")


def architectures(source: Path) -> frozenset[str]:
    """The names of `config.json` that the converter takes, read from its table without running it."""
    return frozenset(_table(source))


def _table(source: Path) -> dict[str, str]:
    module = ast.parse((source / "conversion" / "__init__.py").read_text())
    for node in module.body:
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", None) == "TEXT_MODEL_MAP":
            return ast.literal_eval(node.value)
    raise RunError("the converter has no table of architectures", where=source)


def architecture_of(source: Path, name: str) -> str | None:
    """llama.cpp's own name for an architecture of `config.json`, `llama` for LlamaForCausalLM; None where unknown."""
    import gguf

    module = _table(source).get(name)
    tree = ast.parse((source / "conversion" / f"{module}.py").read_text()) if module else ast.Module([], [])
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    found = next((one for one in classes.values() if name in _registered(one)), None)
    while found is not None:
        for node in found.body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "model_arch":
                number = getattr(gguf.MODEL_ARCH, node.value.attr, None)
                return gguf.MODEL_ARCH_NAMES.get(number)
        found = next((classes[base.id] for base in found.bases if getattr(base, "id", None) in classes), None)
    return None


def tensor_names(architecture: str, num_layers: int):
    """llama.cpp's map from the names that weights have elsewhere to those in a GGUF: a `gguf.TensorNameMap`."""
    import gguf

    known = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(known[architecture], num_layers)


def _registered(node: ast.ClassDef) -> set[str]:
    calls = (one for one in node.decorator_list if isinstance(one, ast.Call))
    return {part.value for call in calls for part in call.args if isinstance(part, ast.Constant)}


class Conversion:
    """A running conversion; a context manager that ends it. `wait()` returns when the files are complete."""

    def __init__(self, process: subprocess.Popen, log: Path):
        self._process, self._log = process, log

    @classmethod
    def start(
        cls,
        folder: Path,
        outputs: Mapping[str, Path],
        *,
        tokenizer: Path,
        pre_tokenizer: str,
        add_bos: bool,
        name: str,
        workspace: Path,
        bos_id: int | None = None,
        turn_end_id: int | None = None,
        source: Path | None = None,
    ) -> "Conversion":
        """Start converting a Hugging Face folder and return at once.

        Args:
            folder: holds config.json and the safetensors.
            tokenizer: the folder of the tokenizer's files, the same one or another.
            outputs: the file to write for each type of `OUTTYPES`.
            pre_tokenizer: llama.cpp's name of the tokenizer's split rule; the caller has proved it.
            add_bos: whether the served model puts BOS in front of a prompt.
            name: the display name inside the file.
            workspace: a folder for the staged checkpoint and the converter's log, removed by the caller.
            bos_id: what the configuration says of BOS, for a tokenizer that names none.
            turn_end_id: a token at which the served model stops beside EOS.
            source: llama.cpp's, where it is not to be the pinned one.

        Raises MachineError or IntegrityError where the pinned source is missing or changed.
        """
        source = source or sources.require_source()
        staged = _stage(folder, tokenizer, workspace / _STAGED, add_bos, bos_id)
        pairs = [f"{quant}={output}" for quant, output in outputs.items()]
        command = [sys.executable, "-B", "-P", str(_DRIVER), str(os.getpid()), str(source), str(staged)]
        command += [pre_tokenizer, name, "" if turn_end_id is None else str(turn_end_id), *pairs]
        return cls._spawn(command, workspace)

    @classmethod
    def start_adapter(
        cls, adapter: Path, config: dict, quant: str, output: Path, *, alpha: float, workspace: Path
    ) -> "Conversion":
        """Start converting an adapter in PEFT's form; of its base the configuration is enough.

        Args:
            alpha: what the server, which scales by alpha over rank alone, is to be told.
        """
        source, base, staged = sources.require_source(), workspace / "base", workspace / "adapter"
        for folder in (base, staged):
            folder.mkdir()
        files.write_json(base / "config.json", config)
        (staged / "adapter_model.safetensors").symlink_to((adapter / "adapter_model.safetensors").resolve())
        settings = files.read_json(adapter / "adapter_config.json")
        settings |= {"lora_alpha": alpha, "base_model_name_or_path": None}
        files.write_json(staged / "adapter_config.json", settings)
        command = [sys.executable, "-B", "-P", str(_DRIVER), str(os.getpid()), str(source), "--adapter"]
        return cls._spawn([*command, str(base), str(staged), f"{quant}={output}"], workspace)

    @classmethod
    def _spawn(cls, command: list[str], workspace: Path) -> "Conversion":
        log = workspace / "convert.log"
        with open(log, "wb") as output:
            process = subprocess.Popen(
                command, cwd=workspace, env=_environment(workspace), stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
        return cls(process, log)

    def wait(self) -> None:
        """Wait for the end. Raises RunError with the converter's last lines, or MachineError where the disk is full."""
        if self._process.wait() != 0:
            files.refuse_full_disk(self._log)
            raise RunError(
                "the converter failed",
                where="llama.cpp convert_hf_to_gguf.py",
                found=f"status {self._process.returncode}; its last lines:\n{sources.last_lines(self._log)}",
                expected="a GGUF file",
            )

    def __enter__(self) -> "Conversion":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def _environment(workspace: Path) -> dict[str, str]:
    kept = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return kept | {
        "HOME": str(workspace), "TMPDIR": str(workspace), "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
    }  # fmt: skip


def _stage(folder: Path, tokenizer: Path, staged: Path, add_bos: bool, bos_id: int | None) -> Path:
    """Lay out what the converter may see: links to the large files, and the two settings files with what must count.

    `_name_or_path` would put a folder's name into the GGUF. Without `add_bos_token` llama.cpp falls back to what the
    pre-tokenizer's name implies.
    """
    staged.mkdir()
    patterns = [(folder, pattern) for pattern in _WEIGHTS] + [(tokenizer, pattern) for pattern in _TOKENIZER]
    for place, pattern in patterns:
        for path in place.glob(pattern):
            (staged / path.name).symlink_to(path.resolve())
    config = files.read_json(folder / "config.json")
    config.pop("_name_or_path", None)
    if bos_id is not None:
        config["bos_token_id"] = bos_id
    settings = files.read_json(tokenizer / "tokenizer_config.json") | {"add_bos_token": add_bos}
    files.write_json(staged / "config.json", config)
    files.write_json(staged / "tokenizer_config.json", settings)
    return staged
