"""A recipe and a shape as the quantities that the equations use.

Legend: T tokens of a micro-batch, B sequences, S sequence length, h width, f feed-forward width, L layers,
V vocabulary, nq and nk query and key-value heads, d head dimension; bytes of an element: e of a linear's output, z of
the residual stream and the norms (4 after a k-bit preparation or under autocast), a of an adapter.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from training.calculator.calibration import Calibration, find
from training.calculator.shapes import Linear, Shape, of_model
from training.core.errors import UserError
from training.core.report import again
from training.recipe.model import Recipe, chunk_tokens

if TYPE_CHECKING:
    from training.calculator.parallel import Parallel

_CUBLAS_BYTES = {"H100": 32 << 20, "H200": 32 << 20}
_CUBLAS_BEFORE_HOPPER_BYTES = 8_519_680
_ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "nf4": 2}


@dataclass(frozen=True)
class Plan:
    """What one micro-batch of a recipe is made of."""

    recipe: Recipe
    shape: Shape | None  # None where the model is traced because the formula does not know it
    on_cpu: bool = False
    gpu: str | None = None  # its name, where it is known
    parallel: Parallel | None = None  # None for one process
    calibration: Calibration | None = None  # what was measured of the GPU, where it was

    @classmethod
    def of(
        cls, recipe: Recipe, *, on_cpu: bool = False, gpu: str | None = None, parallel: Parallel | None = None,
        calibration: Calibration | None = None,
    ) -> Plan:  # fmt: skip
        """The plan of a recipe. Raises where the model's architecture or an adapter's target is not known."""
        known = calibration or (None if on_cpu else find(gpu))
        plan = cls(recipe, of_model(recipe.model), on_cpu, gpu, parallel, known)
        _ = plan.targets  # raises on one that matches nothing
        if plan.shape.score_cap and recipe.memory.attention == "sdpa":
            raise UserError(
                f"{plan.shape.family} caps its scores, which SDPA cannot", where="memory.attention", found="sdpa",
                expected="eager", next_command=again("memory.attention=eager"),
            )  # fmt: skip
        return plan

    @classmethod
    def without_shape(cls, recipe: Recipe, *, on_cpu: bool = False, gpu: str | None = None) -> Plan:
        """The plan of a recipe whose model the formula does not know: enough for a trace."""
        return cls(recipe, None, on_cpu, gpu, calibration=None if on_cpu else find(gpu))

    # ---- sizes

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of an element of the weights as they are held; of an NF4 base's, those of its other weights."""
        return 4 if self.lifts_to_float32 else _ELEMENT_BYTES[self.recipe.memory.weights]

    @cached_property
    def e(self) -> int:
        """Bytes of an element that a linear gives: a 4-bit one answers in its input's type."""
        return 2 if self.recipe.memory.autocast else self.weight_bytes

    @cached_property
    def z(self) -> int:
        """Bytes of an element of the residual stream: autocast leaves norms and sums in the embedding's type."""
        return self.weight_bytes

    @cached_property
    def a(self) -> int:
        """Bytes of an element of an adapter."""
        return _ELEMENT_BYTES[self.recipe.memory.adapter_dtype]

    @property
    def B(self) -> int:
        return self.recipe.data.micro_batch

    @property
    def S(self) -> int:
        return self.recipe.data.seq_len

    @cached_property
    def T(self) -> int:
        return self.B * self.S

    @cached_property
    def logit_tokens(self) -> int:
        """Positions whose logits exist at once; the hf profile's plain step has chunks where they are asked for."""
        memory = self.recipe.memory
        is_whole = self.is_hf and memory.loss_chunk == "auto"
        chunk = 0 if is_whole else chunk_tokens(memory.loss_chunk, self.shape.vocab_size)
        return min(self.T, chunk or self.T)

    @property
    def has_chunks(self) -> bool:
        """Whether the loss goes in chunks, whose gradients are made going forward."""
        return self.logit_tokens < self.T

    @cached_property
    def logit_bytes(self) -> int:
        """Bytes of a logit as the head gives it: a k-bit preparation lifts the head to float32."""
        return self.e

    @cached_property
    def kept_logit_bytes(self) -> int:
        """Bytes of a logit that stays alive with the outputs, which accelerate's autocast lifts to float32."""
        if not self.keeps_outputs:
            return 0
        return 4 if self.recipe.memory.autocast else self.logit_bytes

    @cached_property
    def capped_logit_bytes(self) -> int:
        """Bytes of a logit that a soft cap keeps: its tanh."""
        return self.logit_bytes if self.shape.logit_cap else 0

    @cached_property
    def workspace_bytes(self) -> int:
        """cuBLAS's scratch memory of one thread, as it was measured on the GPU, else as PyTorch's source has it."""
        if self.calibration:
            return self.calibration.workspace_bytes
        known = (size for name, size in _CUBLAS_BYTES.items() if name in (self.gpu or ""))
        return next(known, _CUBLAS_BEFORE_HOPPER_BYTES)

    # ---- choices

    @property
    def is_eager(self) -> bool:
        return self.recipe.memory.attention == "eager"

    @property
    def is_flash(self) -> bool:
        return self.recipe.memory.attention == "flash_attention_2"

    @property
    def is_hf(self) -> bool:
        return self.recipe.memory.profile == "hf"

    @property
    def is_adapter(self) -> bool:
        return self.recipe.lora is not None

    @property
    def is_nf4(self) -> bool:
        return self.recipe.memory.weights == "nf4"

    @cached_property
    def lifts_to_float32(self) -> bool:
        """Whether everything beside the 4-bit linears is float32: by a k-bit preparation, or on a CPU."""
        wanted = self.recipe.memory.kbit_upcast
        return self.is_nf4 and (self.is_hf or self.on_cpu if wanted == "auto" else wanted)

    @cached_property
    def keeps_outputs(self) -> bool:
        wanted = self.recipe.memory.keep_outputs
        return self.is_hf if wanted == "auto" else wanted

    @property
    def has_mask(self) -> bool:
        """Whether attention takes a mask as a tensor: documents share a row, or a window is no longer than the row."""
        return self.num_masked_layers > 0

    @cached_property
    def num_masked_layers(self) -> int:
        """Layers whose attention takes one: without it, SDPA's kernels are causal by themselves."""
        if self.is_flash:
            return 0
        if self.recipe.data.packing:
            return self.shape.num_layers
        return self.shape.num_sliding if (self.shape.window or 0) <= self.S else 0

    @property
    def num_masks(self) -> int:
        """Masks that eager attention is given: one, and one more where some layers have a window."""
        return 2 if (self.shape.kind.slides or 0) > 1 else 1

    @property
    def accumulates(self) -> bool:
        return self.recipe.batch.accumulate > 1

    # ---- what is trained

    @cached_property
    def targets(self) -> tuple[str, ...]:
        """Names of the linears and of the embedding that get an adapter. Raises UserError for one that matches none."""
        if self.recipe.lora is None:
            return ()
        shape, targets = self.shape, self.recipe.lora.targets
        inside = [linear.name for linear in shape.linears]
        if isinstance(targets, str):
            return tuple(inside if targets == "all-linear" else (*shape.kind.qkv, shape.kind.output))
        names = [*inside, shape.head.name, shape.embedding.name]
        if unknown := [name for name in targets if name not in names]:
            raise UserError(
                "a LoRA target matches no layer",
                where="lora.targets",
                found=", ".join(unknown),
                expected=", ".join(names),
            )
        return tuple(targets)

    @cached_property
    def adapted(self) -> tuple[Linear, ...]:
        """The linear layers of a block that get an adapter."""
        return tuple(linear for linear in self.shape.linears if linear.name in self.targets)

    @cached_property
    def adapted_outside(self) -> tuple[Linear, ...]:
        """The embedding and the head, where they get one."""
        return tuple(one for one in (self.shape.embedding, self.shape.head) if one.name in self.targets)

    @property
    def adapts_embedding(self) -> bool:
        return self.shape.embedding.name in self.targets

    @property
    def adapts_head(self) -> bool:
        return self.shape.head.name in self.targets

    @property
    def layer_trainable(self) -> int:
        """Parameters of one block that get a gradient."""
        if self.recipe.lora is None:
            return self.shape.layer_parameters
        return sum(self._adapter_parameters(one) for one in self.adapted)

    @property
    def trainable(self) -> int:
        """Parameters that get a gradient."""
        if self.recipe.lora is None:
            return self.shape.parameters
        outside = sum(self._adapter_parameters(one) for one in self.adapted_outside)
        return self.shape.num_layers * self.layer_trainable + outside

    def _adapter_parameters(self, one: Linear) -> int:
        return self.recipe.lora.rank * (one.in_features + one.out_features)

    @property
    def trainable_bytes(self) -> int:
        """Bytes of what is trained, in the type that it is kept in."""
        return self.trainable * self._trained_bytes

    @property
    def layer_trainable_bytes(self) -> int:
        return self.layer_trainable * self._trained_bytes

    @property
    def _trained_bytes(self) -> int:
        return self.a if self.is_adapter else self.weight_bytes
