"""A frozen base in 4 bits: NF4 with its scales in 8 bits, by bitsandbytes (Dettmers et al. 2023, QLoRA, section 3).

Every linear but the head is packed; embedding, head and norms keep their type, in which the products are computed too.
bitsandbytes has kernels for GPUs, and for a CPU, where it is slow.
"""

import logging
import warnings

import torch

from training.core.errors import MachineError
from training.core.report import again
from training.objectives import targets
from training.recipe.model import Recipe

_PLAIN = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def pack(model: torch.nn.Module, device: torch.device, dtype: torch.dtype, instead: str | None = None) -> None:
    """Replace the model's linears, in place, by packed ones on the device, whose products are in `dtype`.

    Raises MachineError where bitsandbytes cannot pack there, with `instead` as the next command.
    """
    bnb = _bitsandbytes(device, instead)
    for name, linear in targets.inner_linears(model).items():
        packed = bnb.nn.Linear4bit(
            linear.in_features, linear.out_features, linear.bias is not None, compute_dtype=dtype,
            compress_statistics=True, quant_type="nf4", device="meta",
        )  # fmt: skip
        packed.weight = bnb.nn.Params4bit(
            linear.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True, module=packed
        ).to(device)
        packed.support_avx512bf16_for_cpu = False  # it repacks a matrix when it evaluates, for another product
        if linear.bias is not None:
            packed.bias = torch.nn.Parameter(linear.bias.data.to(device), requires_grad=False)
        targets.replace(model, name, packed)
        linear.weight = None  # the plain matrix goes at once
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dtype != torch.uint8 and tensor.device.type == "cpu":
            tensor.data = tensor.data.clone()  # else one of them would keep the whole file mapped


def without(recipe: Recipe, dtype: torch.dtype) -> str:
    """The command that trains a recipe without NF4, in the type that the products have on this very machine."""
    method = ["method=lora"] if recipe.method == "qlora" else []
    return again(*method, f"memory.weights={_PLAIN[dtype]}")


def _bitsandbytes(device: torch.device, instead: str | None):
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it tells of kernels that it could load, and need not
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import bitsandbytes
    except (ImportError, OSError, RuntimeError) as error:
        raise MachineError(
            "bitsandbytes cannot be used here, so there is no NF4", where="method", found=str(error)[:200],
            expected="bitsandbytes with its library for this machine", next_command=instead,
        ) from error  # fmt: skip
    if device.type not in ("cpu", "cuda"):
        raise MachineError(
            "bitsandbytes packs nothing on this device", where="method", found=device, expected="a CPU or a CUDA GPU",
            next_command=instead,
        )  # fmt: skip
    return bitsandbytes
