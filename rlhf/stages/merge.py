"""Merge an adapter into its base: a plain checkpoint that transformers loads without peft."""

import torch
from peft import PeftModel

from rlhf.models.loading import load_base, load_codec, require_adapter
from rlhf.run import Run, RunError
from rlhf.stages import Result
from rlhf.telemetry import Telemetry


def run_stage(run: Run, device: torch.device) -> Result:
    recipe = run.loaded.recipe
    telemetry = Telemetry(device)
    codec = load_codec(run)
    adapter = require_adapter(run.parent(recipe.merge.stage))
    with telemetry.phase("merge"):
        # Merging into 4-bit weights would round the adapter away, so the full-precision base is merged.
        model = PeftModel.from_pretrained(load_base(run, device, quantize=False), adapter)
        ids = torch.tensor([[codec.eos_id, *range(8)]], device=device)
        with torch.no_grad():
            expected = model(input_ids=ids).logits.float()
            merged = model.merge_and_unload()
            difference = (merged(input_ids=ids).logits.float() - expected).abs().max().item()
        if not difference < 0.1 * expected.abs().max().item():
            raise RunError(f"the merged model's logits differ by {difference:.3g} from those of base + adapter")
        merged.save_pretrained(run.path / "model")
        codec.tokenizer.save_pretrained(run.path / "model")
    size = sum(f.stat().st_size for f in (run.path / "model").glob("*.safetensors"))
    return Result({"largest_logit_difference": difference, "model_bytes": size}, telemetry.costs())
