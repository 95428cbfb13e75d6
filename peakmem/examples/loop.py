"""A plain loop of transformers with AdamW: run with 2 and 4 layers, deepened to 24, and replayed for a card.

`python peakmem/examples/loop.py` needs torch and transformers, and no GPU.
"""

import torch
from torch.profiler import record_function
from transformers import AutoModelForCausalLM, LlamaConfig

from peakmem import StandIn, cards, deepen, highest_at_depth, replay

LAYERS, VOCABULARY = 24, 32000


def run(layers: int) -> StandIn:
    """Follow two steps of a model with so many layers on a stand-in for an RTX 4090."""
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=VOCABULARY,
    )
    with StandIn("cuda", ("forward", "backward", "optimizer"), VOCABULARY, cards.CARDS["4090"].gpu) as followed:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            ids = torch.ones(4, 256, dtype=torch.int64).to("meta")
            with record_function("forward"):
                loss = model(input_ids=ids, labels=ids).loss
            with record_function("backward"):
                loss.backward()
            with record_function("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
    return followed


def main() -> None:
    """Print the peak of each phase, and what is alive at the highest."""
    shallow, deeper = run(2), run(4)
    deep = deepen(shallow.events(), deeper.events(), LAYERS)
    for name, phase in replay(
        deep.events, expandable=False, workspace=cards.workspace(cards.CARDS["4090"].gpu)
    ).items():
        print(f"{name or 'whole':<10} {phase.allocated / 1e9:.3f} GB allocated, {phase.reserved / 1e9:.3f} reserved")
    for component, size in highest_at_depth(deep, LAYERS, deeper.components())[""].items():
        print(f"  {component:<12} {size / 1e9:.3f} GB")


if __name__ == "__main__":
    main()
