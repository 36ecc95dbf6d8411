"""Matrix products as torch runs them."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)


class Products(TorchDispatchMode):
    """Notes the precision of each product while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Run the operation; an addmm's first argument is what is added."""
        if func.overloadpacket in KINDS:
            self.dtypes += {args[-2].dtype, args[-1].dtype}
        return func(*args, **(kwargs or {}))
