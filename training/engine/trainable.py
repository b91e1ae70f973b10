"""What this trainer can train, told before anything heavy is loaded. It imports no torch."""

import importlib.util

from training.calculator import devices
from training.calculator.parallel import Parallel
from training.core.errors import MachineError, Problems, TrainyardError, UserError
from training.core.report import again
from training.data.dataset import Dataset
from training.engine import torchrun
from training.engine.backends import contract as backends
from training.objectives import registry
from training.recipe.load import Resolved
from training.recipe.model import Recipe
from training.recipe.rules import training_problems


def problems(resolved: Resolved) -> list[TrainyardError]:
    """Everything that stands between a valid recipe and a run of it here."""
    recipe = resolved.recipe
    limits = (
        ("memory.profile", recipe.memory.profile, ("trainyard",)),
        ("memory.double_quant", recipe.memory.double_quant, (True,)),
        ("memory.kbit_upcast", recipe.memory.kbit_upcast, ("auto", False)),
        ("memory.keep_outputs", recipe.memory.keep_outputs, ("auto", False)),
        ("memory.autocast", recipe.memory.autocast, (False,)),
    )
    found = [
        UserError(
            f"{key}: {value} can be planned with memfit, and not be trained by this version",
            where=resolved.origins.get(key), found=value, expected=", ".join(str(one) for one in known),
        )
        for key, value, known in limits
        if value not in known
    ]  # fmt: skip
    return (
        found
        + _paged(resolved)
        + _float16(resolved)
        + _liger(resolved)
        + training_problems(resolved)
        + registry.of(recipe.method).problems(resolved)
        + backends.of(recipe.backend).problems(resolved)
    )


def _paged(resolved: Resolved) -> list[TrainyardError]:
    if resolved.recipe.optimizer.name != "paged_adamw8bit" or devices.gpus():
        return []
    return [
        MachineError(
            "paged optimizer states are moved by a CUDA GPU's driver, and there is none here",
            where=resolved.origins.get("optimizer.name"), found="optimizer.name: paged_adamw8bit",
            expected="adamw or adamw8bit", next_command=again("optimizer.name=adamw8bit"),
        )
    ]  # fmt: skip


def _liger(resolved: Resolved) -> list[TrainyardError]:
    """What Liger's kernel needs: a plain loss, chunks of its own, a CUDA GPU and its package."""
    recipe, where = resolved.recipe, resolved.origins.get("memory.loss_kernel")
    if recipe.memory.loss_kernel != "liger":
        return []
    wrong = [
        f"{key}: {value}"
        for key, value, is_right in (
            ("method", recipe.method, recipe.method != "distill"),
            ("memory.loss_chunk", recipe.memory.loss_chunk, recipe.memory.loss_chunk == "auto"),
        )
        if not is_right
    ]
    if wrong:
        found = UserError(
            "Liger's kernel sums the labels' cross-entropy alone, in chunks of its own", where=where,
            found=", ".join(wrong), expected="another method than distill, and memory.loss_chunk: auto",
        )  # fmt: skip
    elif not devices.gpus():
        found = MachineError(
            "Liger's kernels are written in Triton for CUDA GPUs, and there is none here", where=where,
            found="memory.loss_kernel: liger", expected="memory.loss_kernel: torch",
            next_command=again("memory.loss_kernel=torch"),
        )  # fmt: skip
    elif importlib.util.find_spec("liger_kernel") is None:
        found = MachineError(
            "Liger's kernels are a package of their own", where=where, found="no liger_kernel",
            expected="liger-kernel", next_command=f"make setup EXTRA=liger && RUNTIME=local {again()}",
        )  # fmt: skip
    else:
        return []
    return [found]


def _float16(resolved: Resolved) -> list[TrainyardError]:
    """What is trained is not held in float16, whose updates vanish; a frozen base may be, with a loss scale."""
    recipe = resolved.recipe
    held = ("memory.weights", recipe.memory.weights) if recipe.lora is None else None
    held = held or ("memory.adapter_dtype", recipe.memory.adapter_dtype)
    if held[1] != "fp16":
        return []
    return [
        UserError(
            "trained weights cannot be held in float16: small updates vanish in it",
            where=resolved.origins.get(held[0]), found=f"{held[0]}: fp16", expected="bf16 or fp32",
        )
    ]  # fmt: skip


def parallel_problems(resolved: Resolved, parallel: Parallel) -> list[TrainyardError]:
    """Everything that keeps several processes of this machine from training a recipe together."""
    recipe, ranks, found = resolved.recipe, parallel.ranks, []
    if recipe.batch.accumulate < ranks:
        found.append(
            UserError(
                "there are more processes than micro-batches in a window", where="NPROC", found=ranks,
                expected=f"at most {recipe.batch.accumulate}, batch.accumulate",
                next_command=again(
                    f"batch.accumulate={ranks}",
                    f"data.micro_batch={max(1, recipe.data.micro_batch * recipe.batch.accumulate // ranks)}",
                ),
            )
        )  # fmt: skip
    if recipe.backend != "native":
        found.append(
            UserError(
                f"backend {recipe.backend} trains in one process", where=resolved.origins.get("backend"),
                found=f"{ranks} processes", expected="NPROC=1, or backend: native",
                next_command=again("backend=native"),
            )
        )  # fmt: skip
    num_gpus, num_here = len(devices.gpus()), torchrun.num_here(parallel)
    if 0 < num_gpus < num_here:
        found.append(
            MachineError(
                "there are more processes than GPUs", where="NPROC", found=num_here, expected=f"at most {num_gpus}",
                next_command=again("--ranks", str(num_gpus)),
            )
        )  # fmt: skip
    if recipe.memory.compile == "auto" or (recipe.memory.compile and parallel.kind == "fsdp2"):
        found.append(
            UserError(
                f"several processes under {parallel.kind} do not try what compiling brings",
                where=resolved.origins.get("memory.compile"), found=f"memory.compile: {recipe.memory.compile}",
                expected="false" if parallel.kind == "fsdp2" else "true or false",
                next_command=again("memory.compile=false"),
            )
        )  # fmt: skip
    if parallel.kind == "fsdp2":
        whole = again("--parallel", "ddp")
        if recipe.memory.weights == "nf4":
            found.append(
                UserError(
                    "weights in 4 bits are not sharded", where=resolved.origins.get("memory.weights"),
                    found="memory.weights: nf4 under fsdp2", expected="ddp, or weights in 16 bits", next_command=whole,
                )
            )  # fmt: skip
        if recipe.optimizer.name != "adamw":
            found.append(
                UserError(
                    "optimizer states in 8 bits are not sharded", where=resolved.origins.get("optimizer.name"),
                    found=f"optimizer.name: {recipe.optimizer.name} under fsdp2", expected="ddp, or adamw",
                    next_command=whole,
                )
            )  # fmt: skip
    return found


def require(resolved: Resolved, parallel: Parallel | None = None) -> None:
    """Raise Problems with all of them, where there are any."""
    found = problems(resolved) + (parallel_problems(resolved, parallel) if parallel else [])
    if found:
        raise Problems("the recipe cannot be trained as it is", found)


def require_dataset(recipe: Recipe, dataset: Dataset) -> None:
    """Raise UserError where the data set has not what the recipe trains and validates on."""
    registry.of(recipe.method).require_dataset(recipe, dataset)
    for split in ("train", "validation") if recipe.evaluate.is_wanted else ("train",):
        if split not in dataset.splits:
            raise UserError(
                f"the data set has no {split} split",
                where=dataset.reference,
                found=", ".join(dataset.splits),
                expected="train and validation",
                next_command=again("evaluate.every_steps=null") if split == "validation" else None,
            )
