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
from training.recipe.model import Recipe

if TYPE_CHECKING:
    from training.calculator.parallel import Parallel

_ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "nf4": 2}
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


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
        _ = plan.adapted  # raises on a target that matches nothing
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
    def query_width(self) -> int:
        return self.shape.num_heads * self.shape.head_dim

    @cached_property
    def key_width(self) -> int:
        """Width of the keys that attention keeps: expanded to the query heads on every path but FlashAttention 2."""
        heads = self.shape.num_key_value_heads if self.is_flash else self.shape.num_heads
        return heads * self.shape.head_dim

    @cached_property
    def logit_tokens(self) -> int:
        """Positions whose logits exist at once. `auto` is the whole batch."""
        chunk = self.recipe.memory.loss_chunk
        return min(self.T, chunk) if isinstance(chunk, int) and chunk > 0 else self.T

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
        """Whether a k-bit preparation made everything beside the 4-bit linears float32."""
        wanted = self.recipe.memory.kbit_upcast
        return self.is_nf4 and (self.is_hf if wanted == "auto" else wanted)

    @cached_property
    def keeps_outputs(self) -> bool:
        wanted = self.recipe.memory.keep_outputs
        return self.is_hf if wanted == "auto" else wanted

    @property
    def has_mask(self) -> bool:
        """Whether a block-diagonal mask is built: documents share a row, and attention takes a mask."""
        return self.recipe.data.packing and not self.is_flash

    @property
    def accumulates(self) -> bool:
        return self.recipe.batch.accumulate > 1

    # ---- what is trained

    @cached_property
    def adapted(self) -> tuple[Linear, ...]:
        """The linear layers of a block that get an adapter. Raises UserError for a name that matches none."""
        if self.recipe.lora is None:
            return ()
        targets, linears = self.recipe.lora.targets, self.shape.linears
        names = [linear.name for linear in linears]
        if isinstance(targets, str):
            targets = names if targets == "all-linear" else _ATTENTION
        if unknown := [name for name in targets if name not in names]:
            raise UserError(
                "a LoRA target matches no layer",
                where="lora.targets",
                found=", ".join(unknown),
                expected=", ".join(names),
            )
        return tuple(linear for linear in linears if linear.name in targets)

    @property
    def trainable(self) -> int:
        """Parameters that get a gradient."""
        if self.recipe.lora is None:
            return self.shape.parameters
        rank = self.recipe.lora.rank
        return self.shape.num_layers * sum(rank * (one.in_features + one.out_features) for one in self.adapted)

    @property
    def trainable_bytes(self) -> int:
        """Bytes of what is trained, in the type that it is kept in."""
        return self.trainable * (self.a if self.is_adapter else self.weight_bytes)
