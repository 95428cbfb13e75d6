"""Division of a model's frozen layers among ranks (FSDP2)."""

from torch import nn


def shard_layers(decoder: nn.Module, unsharded: set[nn.Parameter]) -> None:
    """Shard a decoder's frozen layers over the ranks (FSDP2); every rank keeps adapters and `unsharded` complete.

    No sharded weight has a gradient, so gradients are reduced as without sharding.
    """
    from torch.distributed.fsdp import fully_shard

    assert isinstance(decoder.layers, nn.ModuleList)
    for layer in decoder.layers:
        fully_shard(layer, ignored_params=unsharded)
    fully_shard(decoder, ignored_params=set(decoder.parameters()))  # shards nothing more; layers are fetched ahead


def keep_layers_whole(model: nn.Module, whole: bool) -> None:
    """Fetch all shards of the layers and keep them (`whole`), or free them and fetch layer by layer again."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_forward(not whole, recurse=False)
            if whole:
                module.unshard()
            else:
                module.reshard()
