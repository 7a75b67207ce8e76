"""The library's classifiers of images: real modules from transformers' configs, random weights."""

from __future__ import annotations

from torch import Tensor, nn

from rlplace.graph.models.hub import from_hub
from rlplace.graph.models.shapes import ResNet, Swin, Vit, numbers


class ImageLoss(nn.Module):
    """A classifier of images that returns its cross entropy."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        """Loss of pixels (batch, 3, height, width) and labels (batch,)."""
        loss: Tensor = self.model(pixel_values=pixel_values, labels=labels).loss
        return loss


def make_vit(shape: Vit) -> nn.Module:
    """A vision transformer with a classifier."""
    config = {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.ffn,
        "image_size": shape.image,
        "patch_size": shape.patch,
        "num_labels": shape.classes,
        "hidden_dropout_prob": shape.dropout,
        "attention_probs_dropout_prob": shape.dropout,
    }
    return ImageLoss(from_hub("ViT", "ViTForImageClassification", config))


def make_swin(shape: Swin) -> nn.Module:
    """A Swin transformer with a classifier."""
    config = {
        "embed_dim": shape.width,
        "depths": numbers(shape.depths),
        "num_heads": numbers(shape.heads),
        "window_size": shape.window,
        "mlp_ratio": float(shape.ratio),
        "image_size": shape.image,
        "patch_size": shape.patch,
        "num_labels": shape.classes,
        "hidden_dropout_prob": shape.dropout,
        "attention_probs_dropout_prob": shape.dropout,
        "drop_path_rate": 0.0,
    }
    return ImageLoss(from_hub("Swin", "SwinForImageClassification", config))


def make_resnet(shape: ResNet) -> nn.Module:
    """A ResNet with a classifier."""
    config = {
        "embedding_size": shape.stem,
        "hidden_sizes": numbers(shape.widths),
        "depths": numbers(shape.depths),
        "num_labels": shape.classes,
    }
    return ImageLoss(from_hub("ResNet", "ResNetForImageClassification", config, attends=False))
