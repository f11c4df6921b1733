"""Tiny models of many families of Transformers, with random weights: which classes, which sizes, which inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

VOCABULARY = 61


class Family(NamedTuple):
    """A model class of Transformers and what makes a small one of it.

    Attributes:
        model: the name of the class; its configuration's is that of its `config_class`.
        config: arguments of the configuration.
        inputs: makes the arguments of the model, `labels` among them if it computes a loss.
        everyday: whether `make test` runs it, as one of its kind; `make families` runs all.
        whole: whether Dynamo can capture it as one graph, for whatever device.
    """

    model: str
    config: dict[str, Any]
    inputs: Callable[[], dict[str, torch.Tensor]]
    everyday: bool = False
    whole: bool = True


def build(family: Family) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model in evaluation mode, in which nothing is random, and its inputs."""
    import transformers

    model_class = getattr(transformers, family.model)
    config = model_class.config_class(**family.config)
    torch.manual_seed(0)
    return model_class(config).eval(), family.inputs()


def loss_of(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model's own loss, or a number that depends on its first result, normalised or not."""
    results = model(**inputs)
    loss = getattr(results, "loss", None)
    return results[0].sin().mean() if loss is None else loss


def _ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def _text() -> dict[str, torch.Tensor]:
    ids = _ids(2, 10)
    return {"input_ids": ids, "labels": ids}


def _padded_text() -> dict[str, torch.Tensor]:
    mask = torch.ones(2, 10, dtype=torch.int64)
    mask[1, 7:] = 0
    return {"input_ids": _ids(2, 10), "attention_mask": mask, "labels": torch.tensor([2, 0])}


def _pair() -> dict[str, torch.Tensor]:
    return {"input_ids": _ids(2, 10), "labels": _ids(2, 6)}


def _image(size: int = 32) -> dict[str, torch.Tensor]:
    return {"pixel_values": _noise(2, 3, size, size), "labels": torch.tensor([1, 0])}


def _image_and_text() -> dict[str, torch.Tensor]:
    return {"input_ids": _ids(2, 8), "pixel_values": _noise(2, 3, 32, 32)}


_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_ENCODER = {**_SIZES, "num_labels": 3}
_EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "batched_mm"}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 1,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_SEQUENCE_TO_SEQUENCE = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_VISION = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_labels": 3,
}
_SPEECH = {
    **_SIZES,
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2,
    "mask_time_prob": 0.0,
    "apply_spec_augment": False,
}
_TOWERS = {"text_config": {**_SIZES, "projection_dim": 16}, "vision_config": {**_VISION, "projection_dim": 16}}

FAMILIES: dict[str, Family] = {
    # Decoders.
    "llama": Family("LlamaForCausalLM", _GROUPED, _text),
    "qwen2": Family("Qwen2ForCausalLM", _GROUPED, _text),
    "qwen3": Family("Qwen3ForCausalLM", {**_GROUPED, "head_dim": 8}, _text, everyday=True),
    "gemma": Family("GemmaForCausalLM", {**_GROUPED, "head_dim": 8}, _text),
    "gemma2": Family(
        "Gemma2ForCausalLM", {**_GROUPED, "head_dim": 8, "num_hidden_layers": 2, "sliding_window": 4}, _text
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        {
            **_GROUPED,
            "head_dim": 8,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 4,
        },
        _text,
        everyday=True,
    ),
    "mistral": Family("MistralForCausalLM", {**_GROUPED, "sliding_window": 4}, _text),
    "mixtral": Family("MixtralForCausalLM", {**_GROUPED, "num_local_experts": 4, **_EXPERTS}, _text, everyday=True),
    "phi": Family("PhiForCausalLM", _SIZES, _text),
    "phi3": Family("Phi3ForCausalLM", _GROUPED, _text),
    "olmo2": Family("Olmo2ForCausalLM", _GROUPED, _text),
    "cohere": Family("CohereForCausalLM", _GROUPED, _text),
    "granite": Family("GraniteForCausalLM", _GROUPED, _text),
    "starcoder2": Family("Starcoder2ForCausalLM", _GROUPED, _text),
    "stablelm": Family("StableLmForCausalLM", _GROUPED, _text),
    "smollm3": Family("SmolLM3ForCausalLM", _GROUPED, _text),
    "gpt2": Family(
        "GPT2LMHeadModel",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 32},
        lambda: {"input_ids": _ids(2, 10)},
        everyday=True,
    ),
    "gpt_neo": Family(
        "GPTNeoForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
            "max_position_embeddings": 32,
        },
        _text,
    ),
    "gpt_neox": Family("GPTNeoXForCausalLM", _SIZES, _text),
    "gptj": Family(
        "GPTJForCausalLM",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 32, "rotary_dim": 4},
        _text,
    ),
    "opt": Family("OPTForCausalLM", {**_SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32}, _text),
    "bloom": Family(
        "BloomForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 1, "n_head": 4}, _text
    ),
    "falcon": Family("FalconForCausalLM", {**_SIZES, "alibi": False}, _text),
    # No attention.
    "mamba": Family(
        "MambaForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4, "time_step_rank": 2},
        _text,
        everyday=True,
    ),
    "mamba2": Family(
        "Mamba2ForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "state_size": 8,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 2,
            "chunk_size": 4,
        },
        _text,
    ),
    "rwkv": Family(
        "RwkvForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "attention_hidden_size": 32,
            "num_hidden_layers": 2,
            "use_cache": False,
        },
        lambda: {"input_ids": _ids(2, 4)},  # a step of Python for each token
    ),
    # Encoders.
    "bert": Family("BertForSequenceClassification", _ENCODER, _padded_text),
    "roberta": Family("RobertaForSequenceClassification", {**_ENCODER, "pad_token_id": 1}, _padded_text),
    "distilbert": Family(
        "DistilBertForSequenceClassification",
        {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 48, "n_layers": 1, "n_heads": 4, "num_labels": 3},
        _padded_text,
    ),
    "albert": Family("AlbertForSequenceClassification", {**_ENCODER, "embedding_size": 16}, _padded_text),
    "electra": Family("ElectraForSequenceClassification", {**_ENCODER, "embedding_size": 16}, _padded_text),
    "deberta_v2": Family(
        "DebertaV2ForSequenceClassification",
        {
            **_ENCODER,
            "relative_attention": True,
            "position_buckets": 4,
            "pos_att_type": ["p2c", "c2p"],
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
        },
        _padded_text,
        whole=False,
    ),
    "modernbert": Family(
        "ModernBertForSequenceClassification", {**_ENCODER, "cls_token_id": 1, "sep_token_id": 2}, _padded_text
    ),
    # Encoders with decoders.
    "t5": Family("T5ForConditionalGeneration", _T5, _pair, everyday=True),
    "mt5": Family("MT5ForConditionalGeneration", _T5, _pair),
    "bart": Family("BartForConditionalGeneration", _SEQUENCE_TO_SEQUENCE, _pair),
    "marian": Family("MarianMTModel", _SEQUENCE_TO_SEQUENCE, _pair),
    "pegasus": Family("PegasusForConditionalGeneration", _SEQUENCE_TO_SEQUENCE, _pair),
    # Images.
    "vit": Family("ViTForImageClassification", _VISION, _image),
    "deit": Family("DeiTForImageClassification", _VISION, _image),
    "dinov2": Family("Dinov2ForImageClassification", _VISION, _image),
    "swin": Family(
        "SwinForImageClassification",
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 16,
            "depths": [1, 2],
            "num_heads": [2, 2],
            "window_size": 4,
            "num_labels": 3,
        },
        _image,
        everyday=True,
    ),
    "convnext": Family(
        "ConvNextForImageClassification",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": 3},
        _image,
        everyday=True,
    ),
    "resnet": Family(
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": 3},
        _image,
    ),
    "segformer": Family(
        "SegformerForImageClassification",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [8, 16],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
            "num_labels": 3,
        },
        _image,
    ),
    "detr": Family(
        "DetrModel",
        {
            "use_timm_backbone": False,
            "use_pretrained_backbone": False,
            "backbone": None,
            "backbone_config": {
                "model_type": "resnet",
                "embedding_size": 8,
                "hidden_sizes": [8, 16],
                "depths": [1, 1],
                "out_features": ["stage2"],
            },
            "d_model": 16,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "num_queries": 4,
        },
        lambda: {"pixel_values": _noise(1, 3, 32, 32)},
    ),
    # Images and text.
    "clip": Family(
        "CLIPModel",
        {**_TOWERS, "projection_dim": 16},
        lambda: {**_image_and_text(), "return_loss": True},
        everyday=True,
    ),
    "siglip": Family("SiglipModel", _TOWERS, lambda: {**_image_and_text(), "return_loss": True}),
    # Sound.
    "whisper": Family(
        "WhisperForConditionalGeneration",
        {
            **_SEQUENCE_TO_SEQUENCE,
            "num_mel_bins": 8,
            "max_source_positions": 10,
            "max_target_positions": 16,
        },
        lambda: {"input_features": _noise(2, 8, 20), "labels": _ids(2, 6)},
    ),
    "wav2vec2": Family("Wav2Vec2ForCTC", _SPEECH, lambda: {"input_values": _noise(2, 400)}, everyday=True),
    "hubert": Family("HubertForCTC", _SPEECH, lambda: {"input_values": _noise(2, 400)}),
}
