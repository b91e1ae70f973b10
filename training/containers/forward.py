"""The trial of the train image, run inside it: `python -m training.containers.forward` prints one JSON line.

The packages are imported, and a tiny model does one step forward and backward, on the GPU where there is one.
"""

import json
import math
import sys


def main() -> int:
    import bitsandbytes  # noqa: F401
    import peft  # noqa: F401
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from training.core import version

    torch.manual_seed(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes)).to(device)
    ids_BT = torch.arange(32, device=device).reshape(2, 16)
    loss = model(input_ids=ids_BT, labels=ids_BT).loss
    loss.backward()
    said = {"loss_nats": loss.item(), "device": device, "packages": version.packages()}
    print(json.dumps(said))
    return 0 if math.isfinite(loss.item()) else 1


if __name__ == "__main__":
    sys.exit(main())
