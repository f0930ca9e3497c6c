"""Drawing tokens from logits: argmax, or Gumbel-max with counter-based noise over the processed distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eyas.errors import invalid_argument
from eyas.v1 import common_pb2
from eyas_kernels.noise import exponential_noise


@dataclass(frozen=True)
class SamplingLaw:
    """How one sequence's tokens are drawn: temperature (0 is greedy), then top_k (0 keeps all), then top_p (1
    keeps all), then one draw with the noise of (seed, choice, position)."""

    temperature: float
    top_p: float
    top_k: int
    seed: int
    choice: int


def read_law(message: common_pb2.SamplingParams, field: str) -> SamplingLaw:
    """The law that a message asks for. Raises StatusError naming the part of `field` that is out of range."""
    if not 0 <= message.temperature <= 100:
        raise invalid_argument(f"{field}.temperature", f"is {message.temperature}, not in [0, 100]")
    if not 0 < message.top_p <= 1:
        raise invalid_argument(f"{field}.top_p", f"is {message.top_p}, not in (0, 1]")
    return SamplingLaw(message.temperature, message.top_p, message.top_k, message.seed, message.choice_index)


def draw(
    logits: torch.Tensor,
    laws: Sequence[SamplingLaw],
    positions: Sequence[int],
    token_ids: torch.Tensor | None = None,
) -> list[int]:
    """logits float32 [rows, width]; row r draws the token for positions[r] by laws[r] -> columns [rows].

    `token_ids` int64 [width] names the token of each column where that is not its number (a head with a reduced
    vocabulary). The draw is argmax(log p + G), G standard Gumbel noise (Gumbel, 1954; Maddison et al., 2014): the
    same noise and the same p give the same token, however the row came to be scored, and a head that draws with
    the target's noise agrees with it more often (Daliri et al., 2024).
    """
    columns: list[int] = logits.argmax(-1).tolist()
    for row, (law, position) in enumerate(zip(laws, positions, strict=True)):
        if law.temperature > 0:
            columns[row] = _draw_row(logits[row], law, position, token_ids)
    return columns


def _draw_row(logits: torch.Tensor, law: SamplingLaw, position: int, token_ids: torch.Tensor | None) -> int:
    num_tokens = logits.shape[-1] if token_ids is None else int(token_ids.max()) + 1
    noise = exponential_noise(law.seed, law.choice, position, num_tokens).to(logits.device)
    if token_ids is not None:
        noise = noise[token_ids]
    return int(process(logits, law).sub_(noise.log_()).argmax())


def process(logits: torch.Tensor, law: SamplingLaw) -> torch.Tensor:
    """logits float32 [vocab] -> the processed logits: divided by the temperature, -inf where top_k and top_p cut.

    Ties at the border of top_k are kept; top_p keeps the smallest set of most probable tokens that reaches it, at
    least one.
    """
    scaled = logits / law.temperature
    if 0 < law.top_k < scaled.shape[-1]:
        border = scaled.topk(law.top_k).values[-1]
        scaled.masked_fill_(scaled < border, float("-inf"))
    if law.top_p < 1:
        ordered, order = scaled.sort(descending=True)
        mass = ordered.softmax(-1)
        beyond = mass.cumsum(-1).sub_(mass) >= law.top_p
        scaled[order[beyond]] = float("-inf")
    return scaled
