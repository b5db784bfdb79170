"""apex's data parallelism: torch's."""

from torch.nn.parallel import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
