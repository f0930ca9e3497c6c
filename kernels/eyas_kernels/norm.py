"""RMSNorm (Zhang and Sennrich, 2019)."""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., width] / sqrt(mean(x^2) + eps) * weight [width], computed in float32, in x's dtype."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)
