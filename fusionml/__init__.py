"""FusionML: faster prompts for MLX-LM, on the CPU and the GPU at once.

`import fusionml; fusionml.patch()` before `mlx_lm.load` is all that is needed.
"""

from .blocks import GatedBlock
from .gate import Gate
from .layers import SplitLinear
from .patching import patch, patched, status, unpatch
from .split import split_linear

__version__ = "0.1.0"

__all__ = ["Gate", "GatedBlock", "SplitLinear", "patch", "patched", "split_linear", "status", "unpatch"]
