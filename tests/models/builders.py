"""Small models of the families people use, each with random weights and a loss on fixed inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Inputs = dict[str, torch.Tensor]
Loss = Callable[[nn.Module, Inputs], torch.Tensor]


def _ids(vocabulary: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(1))


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def _transformers_loss(model: nn.Module, inputs: Inputs) -> torch.Tensor:
    loss: torch.Tensor = model(**inputs).loss
    return loss


def llama() -> tuple[nn.Module, Inputs, Loss]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    ids = _ids(97, 2, 16)
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}, _transformers_loss


def mixtral() -> tuple[nn.Module, Inputs, Loss]:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    ids = _ids(97, 2, 12)
    return MixtralForCausalLM(config), {"input_ids": ids, "labels": ids}, _transformers_loss


def bert() -> tuple[nn.Module, Inputs, Loss]:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=97,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    mask = torch.ones(3, 12, dtype=torch.int64)
    mask[1, 7:] = 0
    inputs = {"input_ids": _ids(97, 3, 12), "attention_mask": mask, "labels": torch.tensor([0, 2, 1])}
    return BertForSequenceClassification(config), inputs, _transformers_loss


def vit() -> tuple[nn.Module, Inputs, Loss]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=32,
        patch_size=8,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        num_labels=5,
    )
    inputs = {"pixel_values": _noise(2, 3, 32, 32), "labels": torch.tensor([1, 4])}
    return ViTForImageClassification(config), inputs, _transformers_loss


def whisper() -> tuple[nn.Module, Inputs, Loss]:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=97,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        num_mel_bins=16,
        max_source_positions=20,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    inputs = {"input_features": _noise(2, 16, 40), "labels": _ids(97, 2, 8)}
    return WhisperForConditionalGeneration(config), inputs, _transformers_loss


class _Residual(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.skip = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.skip(x))


def resnet() -> tuple[nn.Module, Inputs, Loss]:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 7, 2, 3, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        _Residual(16, 16, 1),
        _Residual(16, 32, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )
    inputs = {"x": _noise(4, 3, 32, 32), "y": torch.tensor([0, 3, 9, 5])}
    return model, inputs, lambda m, i: F.cross_entropy(m(i["x"]), i["y"])


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 16, 3, padding=1)
        self.down = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.norm, self.middle_norm = nn.GroupNorm(4, 16), nn.GroupNorm(8, 32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.up = nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1)
        self.time = nn.Linear(16, 32)
        self.exit = nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        frequencies = torch.exp(torch.arange(8, device=x.device) * -0.5)
        angles = t[:, None].float() * frequencies
        embedded = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        entered = F.silu(self.norm(self.enter(x)))
        h = F.silu(self.middle_norm(self.down(entered) + embedded[:, :, None, None]))
        tokens = h.flatten(2).transpose(1, 2)
        h = h + self.attention(tokens, tokens, tokens, need_weights=False)[0].transpose(1, 2).reshape(h.shape)
        smooth = F.interpolate(h, scale_factor=2, mode="nearest")[:, :16]
        return self.exit(torch.cat([self.up(h) + smooth, entered], 1))


def unet() -> tuple[nn.Module, Inputs, Loss]:
    inputs = {"x": _noise(2, 3, 16, 16), "t": torch.tensor([3, 70])}
    return _UNet(), inputs, lambda m, i: F.mse_loss(m(i["x"], i["t"]), i["x"])


class _Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 24)
        self.lstm = nn.LSTM(24, 32, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(64, 16, batch_first=True)
        self.head = nn.Linear(16, 7)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(self.lstm(self.embedding(ids))[0])[0])


def lstm() -> tuple[nn.Module, Inputs, Loss]:
    inputs = {"ids": _ids(50, 3, 9), "tags": _ids(7, 3, 9)}
    return _Tagger(), inputs, lambda m, i: F.cross_entropy(m(i["ids"]).flatten(0, 1), i["tags"].flatten())


MODELS: dict[str, Callable[[], tuple[nn.Module, Inputs, Loss]]] = {
    "llama": llama,
    "bert": bert,
    "vit": vit,
    "whisper": whisper,
    "resnet": resnet,
    "unet": unet,
    "lstm": lstm,
    "mixtral": mixtral,
}


# One of each kind a user picks. A large eps keeps Adam from dividing a gradient of rounding errors by its own size,
# which would make the sign of noise a whole step.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, eps=1e-2),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-2, fused=True),
}
