"""Merge an adapter into its base: a plain checkpoint that transformers loads without peft."""

import torch
from peft import PeftModel

from rlhf.models.loading import load_base, load_codec
from rlhf.run import Run, RunError
from rlhf.stages import Result
from rlhf.telemetry import Telemetry


def run_stage(run: Run, device: torch.device) -> Result:
    recipe = run.loaded.recipe
    if device.type == "cuda":
        device = torch.device("cpu")  # the base in full precision need not fit the card, and nothing is slow here
    telemetry = Telemetry(device)
    codec = load_codec(run)
    with telemetry.phase("merge"):
        # Merging into 4-bit weights would round the adapter away, so the full-precision base is merged.
        base = load_base(run, device, quantize=False)
        ids = torch.tensor([[codec.eos_id, *range(8)]], device=device)
        with torch.no_grad():
            alone = base(input_ids=ids).logits.float()
            model = PeftModel.from_pretrained(base, run.root / recipe.merge.stage / "adapter")
            expected = model(input_ids=ids).logits.float()
            merged = model.merge_and_unload()
            difference = (merged(input_ids=ids).logits.float() - expected).abs().max()
            effect = (expected - alone).abs().max()
        if not difference <= 0.1 * effect:
            raise RunError(f"merging lost the adapter: logits are off by {difference:.3g}, its effect is {effect:.3g}")
        merged.save_pretrained(run.path / "model")
        codec.tokenizer.save_pretrained(run.path / "model")
    size = sum(f.stat().st_size for f in (run.path / "model").glob("*.safetensors"))
    metrics = {"largest_logit_difference": difference.item(), "adapter_effect": effect.item(), "model_bytes": size}
    return Result(metrics, telemetry.costs())
