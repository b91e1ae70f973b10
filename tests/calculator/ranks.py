"""One rank of a real training step on the CPU under DDP or FSDP2, counted by PyTorch's profiler.

`python -m tests.calculator.ranks KIND RANK RANKS STORE OVERRIDES...` prints the bytes of its weights and the peak of a
later step, as JSON. STORE is a file that the ranks meet in through gloo, which takes copies of what it sends; `none` is
torch's fake process group, in which one rank runs alone and nothing is sent, as without such copies.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile
from transformers import AutoConfig, AutoModelForCausalLM

from training.recipe.load import load
from training.recipe.model import Recipe

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def model_of(recipe: Recipe, kind: str) -> torch.nn.Module:
    """A model with random weights, shared among the ranks."""
    arch = dict(recipe.model.arch)
    family, _ = arch.pop("family"), arch.pop("rope_theta")
    config = AutoConfig.for_model(family, **arch, use_cache=False)
    model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[recipe.memory.weights]).train()
    if recipe.memory.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    if kind == "ddp":
        return DistributedDataParallel(model)
    for block in model.model.layers:
        fully_shard(block)
    return fully_shard(model)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def measured(recipe: Recipe, kind: str) -> dict[str, int]:
    """Bytes of this rank's weights, and the peak of its third step."""
    model = model_of(recipe, kind)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    shape = (recipe.data.micro_batch, recipe.data.seq_len)
    ids_BT = torch.randint(0, recipe.model.arch["vocab_size"], shape)
    positions_BT = torch.arange(shape[1]).expand_as(ids_BT) % (shape[1] // 2)

    def step() -> None:
        loss = model(input_ids=ids_BT, position_ids=positions_BT, labels=ids_BT).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    step()
    weights = sum(local(one).untyped_storage().nbytes() for one in model.parameters())
    states = sum(local(tensor).nbytes for state in optimizer.state.values() for tensor in state.values())
    with profile(profile_memory=True) as profiled:
        step()
    buckets = weights if kind == "ddp" else 0  # made before the step that is watched
    now = peak = weights + states + buckets
    events = profiled.profiler.kineto_results.events()
    for _, num_bytes in sorted((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]"):
        now += num_bytes
        peak = max(peak, now)
    return {"weights_bytes": weights, "peak_bytes": peak}


def main() -> None:
    kind, rank, ranks, store, path, *overrides = sys.argv[1:]
    torch.set_num_threads(1)
    if store == "none":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=int(rank), world_size=int(ranks))
    else:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks))
    found = measured(load(Path(path), overrides).recipe, kind)
    dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
