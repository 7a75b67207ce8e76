"""Models of images and text: CLIP's two towers, and a language model that reads patches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlplace.graph.models.hub import from_hub
from rlplace.graph.models.shapes import Clip, Llava


class ContrastiveLoss(nn.Module):
    """Which text belongs to an image and the other way round, among those of a queue.

    The loop that trains fills the queues with the embeddings of earlier batches.
    """

    images: Tensor
    texts: Tensor

    def __init__(self, model: nn.Module, width: int, queue: int) -> None:
        super().__init__()
        self.model: Any = model
        for name in ("images", "texts"):
            self.register_buffer(name, F.normalize(torch.randn(queue, width), dim=-1))

    def forward(self, pixel_values: Tensor, input_ids: Tensor) -> Tensor:
        """Loss of pixels (batch, 3, height, width) and ids (batch, length), pair by pair."""
        out = self.model.vision_model(pixel_values=pixel_values)
        image = F.normalize(self.model.visual_projection(out.pooler_output), dim=-1)
        out = self.model.text_model(input_ids=input_ids)
        text = F.normalize(self.model.text_projection(out.pooler_output), dim=-1)
        own = (image * text).sum(dim=-1, keepdim=True)
        scale = self.model.logit_scale.exp()
        first = torch.zeros(input_ids.shape[0], dtype=torch.long, device=input_ids.device)
        losses = [
            F.cross_entropy(scale * torch.cat([own, one @ queue.t()], dim=1), first)
            for one, queue in ((image, self.texts), (text, self.images))
        ]
        return (losses[0] + losses[1]) / 2


class SeeingLoss(nn.Module):
    """Patches through the tower and the projector, before the tokens of a language model."""

    def __init__(self, vision: nn.Module, model: nn.Module, width: int, hidden: int) -> None:
        super().__init__()
        self.vision: Any = vision
        self.projector = nn.Sequential(
            nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, hidden)
        )
        self.model: Any = model

    def forward(self, pixel_values: Tensor, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Loss of pixels (batch, 3, height, width), ids and labels (batch, length), text only."""
        seen = self.vision.pre_layrnorm(self.vision.embeddings(pixel_values))
        seen = self.vision.encoder(inputs_embeds=seen).last_hidden_state
        patches = self.projector(seen[:, 1:])
        words = self.model.get_input_embeddings()(input_ids)
        states = self.model.model(inputs_embeds=torch.cat([patches, words], dim=1))
        logits = self.model.lm_head(states.last_hidden_state[:, patches.shape[1] : -1])
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def make_clip(shape: Clip) -> nn.Module:
    """CLIP with its contrastive loss."""
    text = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.text_hidden,
        "num_hidden_layers": shape.text_layers,
        "num_attention_heads": shape.text_heads,
        "intermediate_size": shape.text_ffn,
        "max_position_embeddings": shape.seq_len,
        "bos_token_id": 0,
        "eos_token_id": 2,  # the place of the largest id is read, as in the published weights
        "pad_token_id": 1,
    }
    vision = _vision(shape.layers, shape.hidden, shape.heads, shape.ffn, shape.image, shape.patch)
    config = {"text_config": text, "vision_config": vision, "projection_dim": shape.width}
    return ContrastiveLoss(from_hub("CLIP", "CLIPModel", config), shape.width, shape.queue)


def make_llava(shape: Llava) -> nn.Module:
    """LLaVA: CLIP's vision tower, a projector, and Llama."""
    config = {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.ffn,
        "max_position_embeddings": shape.seq_len + (shape.image // shape.patch) ** 2,
        "vocab_size": shape.vocab,
        "use_cache": False,
    }
    sizes = (shape.vision_layers, shape.vision_hidden, shape.vision_heads, shape.vision_ffn)
    vision: Any = from_hub(
        "CLIPVision", "CLIPVisionModel", _vision(*sizes, shape.image, shape.patch)
    )
    vision.post_layernorm = nn.Identity()  # for the pooled output, which nothing reads
    vision.requires_grad_(not shape.freeze_vision)
    model = from_hub("Llama", "LlamaForCausalLM", config)
    return SeeingLoss(vision, model, shape.vision_hidden, shape.hidden)


def _vision(
    layers: int, hidden: int, heads: int, ffn: int, image: int, patch: int
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
        "image_size": image,
        "patch_size": patch,
    }
