"""Tiny random models of the language models of Transformers, for fast tests."""

import dataclasses

import torch
import transformers
from torch import nn

transformers.logging.set_verbosity_error()

LARGE = 20_000_000  # a model with more parameters needs further fields in TINY

V, D = 97, 32
TINY = {
    "vocab_size": V, "hidden_size": D, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "embedding_size": D,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    # the same sizes under other names
    "n_embd": D, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4, "d_model": D,
    "n_heads": 4, "n_layers": 2, "ffn_dim": 48, "word_embed_proj_dim": D, "emb_dim": D,
    "num_layers": 2, "ffn_hidden_size": 48, "max_seq_len": 64, "sliding_window": 16,
    "sliding_window_size": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    # no dropout
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "dropout": 0.0, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    # experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_topk": 2, "moe_intermediate_size": 16, "expert_ffn_hidden_size": 16, "n_group": 1,
    "topk_group": 1, "shared_expert_intermediate_size": 16, "shared_intermediate_size": 16,
    "first_k_dense_replace": 1, "num_dense_layers": 1, "zero_expert_num": 2, "moe_num_experts": 4,
    # latent and indexed attention
    "kv_lora_rank": 8, "q_lora_rank": 8, "o_lora_rank": 8, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "index_topk": 4, "index_head_dim": 8,
    "index_n_heads": 4,
    # recurrent layers
    "state_size": 8, "mamba_n_heads": 8, "mamba_d_state": 8, "mamba_chunk_size": 4,
    "chunk_size": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_num_heads": 4,
    # images and audio
    "image_size": 16, "patch_size": 8, "depth": 1, "num_heads": 4, "out_hidden_size": D,
    "mlp_dim": 16, "output_channels": 8, "num_mel_bins": 8, "max_source_positions": 16,
}  # fmt: skip
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
SAME_HEADS = {"num_key_value_heads": 4}  # latent attention needs as many key heads as query heads
PER_LAYER = {"vocab_size_per_layer_input": V, "hidden_size_per_layer_input": 8}
PARAKEET = {"model_type": "parakeet_encoder", "layerdrop": 0.0, "activation_dropout": 0.0}
ENGLISH = {"default_language": "en_XX"}
DECODER = {"decoder_start_token_id": 0}  # some configurations have no default
T5 = DECODER | {"d_kv": 8, "d_ff": 48, "dropout_rate": 0.0}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
# the same fields, for an inner configuration
HYBRID_TEXT, SAME_HEADS_TEXT = {"text_config": HYBRID}, {"text_config": SAME_HEADS}
ROPE_TEXT = {"text_config": {"rope_parameters": ROPE}}
REFORMER = {
    "attn_layers": ["local", "lsh"],
    "axial_pos_shape": [3, 3],
    "axial_pos_embds_dim": [8, 24],
    "num_buckets": 2,
    "hash_seed": 0,
    "local_attention_probs_dropout_prob": 0.0,
    "feed_forward_size": 48,
    "attention_head_size": 8,
    "local_attn_chunk_length": 16,
    "lsh_attn_chunk_length": 16,
}
OWN: dict[str, dict] = {  # further fields of a class, which take precedence over TINY
    **dict.fromkeys(
        (
            "AXK1ForCausalLM", "AXK2ForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM",
            "DeepseekV32ForCausalLM", "Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM",
            "LongcatFlashForCausalLM", "MiniCPM3ForCausalLM", "YoutuForCausalLM",
        ),
        SAME_HEADS,
    ),
    **dict.fromkeys(("BailingHybridForCausalLM", "KimiLinearForCausalLM"), HYBRID | SAME_HEADS),
    **dict.fromkeys(
        ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"), HYBRID
    ),
    **dict.fromkeys(
        (
            "LongT5ForConditionalGeneration", "Pop2PianoForConditionalGeneration",
            "T5ForConditionalGeneration",
        ),
        T5,
    ),
    **dict.fromkeys(
        (
            "Glm46VForConditionalGeneration", "Glm4vForConditionalGeneration",
            "GlmOcrForConditionalGeneration", "PaddleOCRVLForConditionalGeneration",
            "Qwen2_5_VLForConditionalGeneration",
        ),
        ROPE_TEXT,
    ),
    **dict.fromkeys(
        (
            "MiniCPMOcrForConditionalGeneration", "MiniCPMV4_6ForConditionalGeneration",
            "MiniCPMV4_7ForConditionalGeneration", "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForConditionalGeneration",
        ),
        HYBRID_TEXT,
    ),
    **dict.fromkeys(
        ("Kimi_K25ForConditionalGeneration", "MistralLarge4ForConditionalGeneration"),
        SAME_HEADS_TEXT,
    ),
    "Mistral4ForCausalLM": SAME_HEADS,
    "Qwen2VLForConditionalGeneration": ROPE_TEXT | {"vision_config": {"embed_dim": D}},
    "UdopForConditionalGeneration": T5,
    "VisionEncoderDecoderModel": DECODER | {
        "pad_token_id": 0, "encoder": {"model_type": "vit"}, "decoder": {"model_type": "bert"},
    },
    "AudioFlamingo3ForConditionalGeneration": {
        "audio_token_id": 91, "text_config": {"model_type": "qwen2"},
        "audio_config": {"model_type": "audioflamingo3_encoder"},
    },
    "BambaForCausalLM": {"attn_layer_indices": [1]},
    "BltForCausalLM": {
        "num_hidden_layers": 2, "encoder_hash_byte_group_vocab": 50,
        "encoder_config": {"hidden_size_global": D}, "decoder_config": {"hidden_size_global": D},
    },
    "CohereCompassForCausalLM": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE},
    },
    "CanaryForConditionalGeneration": DECODER | {"encoder_config": PARAKEET},
    "CohereAsrForConditionalGeneration": DECODER | {"encoder_config": PARAKEET},
    "DbrxForCausalLM": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4}},
    "Dots1ForCausalLM": {"n_shared_experts": 1},
    "EncoderDecoderModel": DECODER | {
        "pad_token_id": 0, "encoder": {"model_type": "bert"}, "decoder": {"model_type": "bert"},
    },
    "Ernie4_5_MoeForCausalLM": {"moe_num_experts": 64},
    "EsmcForMaskedLM": SAME_HEADS,
    "FuyuForCausalLM": {"text_config": {"model_type": "persimmon"}, "image_token_id": 91},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    "Gemma3ForConditionalGeneration": {
        "image_token_index": 91, "mm_tokens_per_image": 4,
        "vision_config": {"model_type": "siglip_vision_model"},
    },
    "Gemma3nForCausalLM": PER_LAYER | {"num_kv_shared_layers": 0},
    "Gemma4AssistantForCausalLM": {
        "backbone_hidden_size": D, "num_centroids": 8,
        "text_config": {
            "model_type": "gemma4_text", "vocab_size_per_layer_input": 0,
            "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 2,
        },
    },
    "Gemma4ForCausalLM": PER_LAYER,
    "Gemma4ForConditionalGeneration": {
        "text_config": PER_LAYER,
        "image_token_id": 91, "video_token_id": 92, "audio_token_id": 93,
    },
    "Gemma4UnifiedAssistantForCausalLM": {
        "backbone_hidden_size": D, "num_centroids": 8,
        "text_config": {"model_type": "gemma4_unified_text"},
    },
    "GlmAsrForConditionalGeneration": {
        "audio_token_id": 91, "text_config": {"model_type": "llama"},
        "audio_config": {"model_type": "glmasr_encoder"},
    },
    "GotOcr2ForConditionalGeneration": {
        "image_token_index": 91, "text_config": {"model_type": "qwen2"},
    },
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"]},
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "LukeForMaskedLM": {"entity_vocab_size": 11, "entity_emb_size": 8},
    "Mamba2ForCausalLM": {"num_heads": 8},
    "MarianMTModel": DECODER,
    "ModernVBertForMaskedLM": {
        "image_token_id": 91, "text_config": {"model_type": "modernbert"},
        "vision_config": {"model_type": "siglip_vision_model"},
    },
    "MoonshineForConditionalGeneration": DECODER,
    "MoshiForCausalLM": {"audio_vocab_size": 16},
    "MossTranscribeDiarizeForConditionalGeneration": {
        "audio_token_id": 91, "text_config": {"model_type": "qwen3"},
        "audio_config": {"model_type": "whisper"},
    },
    "MptForCausalLM": {"attn_config": {"attn_pdrop": 0}},
    "MusicgenForCausalLM": DECODER,
    "MusicgenMelodyForCausalLM": DECODER,
    "MusicFlamingoForConditionalGeneration": {
        "audio_token_id": 91, "audio_bos_token_id": 92, "audio_eos_token_id": 93,
        "text_config": {"model_type": "qwen2"},
        "audio_config": {"model_type": "audioflamingo3_encoder"},
    },
    "NeoMMEForMaskedLM": {"head_dim": 16},
    "PerceiverForMaskedLM": {
        "num_latents": 4, "d_latents": D, "num_blocks": 1, "num_self_attends_per_block": 1,
        "num_self_attention_heads": 4, "num_cross_attention_heads": 4, "qk_channels": D,
        "v_channels": D,
    },
    "Qwen2AudioForConditionalGeneration": {
        "audio_token_index": 91, "text_config": {"model_type": "qwen2"},
        "audio_config": {"model_type": "qwen2_audio_encoder"},
    },
    "Qwen2_5OmniThinkerForConditionalGeneration": ROPE_TEXT | {"vision_start_token_id": 92},
    "Qwen3OmniMoeThinkerForConditionalGeneration": {"vision_start_token_id": 92},
    "Qwen3ASRForConditionalGeneration": {
        "audio_token_id": 91, "text_config": {"model_type": "qwen3"},
        "audio_config": {"model_type": "qwen3_asr_encoder"},
    },
    "Qwen4ExpForCausalLM": HYBRID | {
        "ngram_vocab_size_base": 100, "hc_lowrank": 8, "split_ngram_parts": 1,
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "ReformerForMaskedLM": REFORMER,
    "ReformerModelWithLMHead": REFORMER | {"is_decoder": True},
    "Speech2TextForConditionalGeneration": DECODER | {
        "input_feat_per_channel": 8, "conv_channels": 16, "max_target_positions": 64,
    },
    "SpeechEncoderDecoderModel": DECODER | {
        "pad_token_id": 0, "encoder": {"model_type": "wav2vec2"}, "decoder": {"model_type": "bert"},
    },
    "SpeechT5ForSpeechToText": DECODER | {"apply_spec_augment": False},
    "SwitchTransformersForConditionalGeneration": T5 | {"num_decoder_layers": 2},
    "UltraVBertForMaskedLM": {
        "image_token_id": 91, "text_config": {"model_type": "ultrabert"},
        "vision_config": {"model_type": "siglip_vision_model"},
    },
    "VoxtralForConditionalGeneration": {
        "audio_token_id": 91, "text_config": {"model_type": "llama"},
        "audio_config": {"model_type": "voxtral_encoder"},
    },
    "WhisperForConditionalGeneration": DECODER | {"max_target_positions": 64},
    "XmodForCausalLM": ENGLISH,
    "XmodForMaskedLM": ENGLISH,
    "Zamba2ForCausalLM": {
        "layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1, "n_mamba_heads": 8,
    },
    "ZambaForCausalLM": {
        "layers_block_type": ["mamba", "hybrid", "hybrid"], "num_hidden_layers": 3,
    },
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
    "xLSTMForCausalLM": {"hidden_size": 128, "chunk_size": 16},
}  # fmt: skip


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def _tokens(*shape: int) -> torch.Tensor:
    return torch.randint(3, 90, shape, generator=torch.Generator().manual_seed(4))


# Each of two sequences has four codebooks, with a head for each codebook.
CODEBOOKS = {"input_ids": _tokens(8, 9), "labels": _tokens(2, 9, 4)}
# Further inputs of a class. None leaves an input out.
INPUTS: dict[str, dict] = {
    "CanaryForConditionalGeneration": {"input_ids": None, "input_features": _noise(2, 40, 8)},
    "CohereAsrForConditionalGeneration": {"input_ids": None, "input_features": _noise(2, 40, 8)},
    "GitForCausalLM": {"pixel_values": torch.ones(2, 3, 16, 16)},
    "IdeficsForVisionText2Text": {
        "pixel_values": _noise(2, 1, 3, 16, 16),
        "image_attention_mask": torch.ones(2, 9, 1, dtype=torch.long),
    },
    "MusicgenForCausalLM": CODEBOOKS,
    "MusicgenMelodyForCausalLM": CODEBOOKS,
    "UdopForConditionalGeneration": {"bbox": torch.zeros(2, 9, 4)},
    "VisionEncoderDecoderModel": {"input_ids": None, "pixel_values": _noise(2, 3, 16, 16)},
    "MoonshineForConditionalGeneration": {"input_ids": None, "input_values": _noise(2, 4000)},
    "SeamlessM4TForSpeechToText": {"input_ids": None, "input_features": _noise(2, 10, 160)},
    "SeamlessM4Tv2ForSpeechToText": {"input_ids": None, "input_features": _noise(2, 10, 160)},
    "Speech2TextForConditionalGeneration": {"input_ids": None, "input_features": _noise(2, 32, 8)},
    "SpeechEncoderDecoderModel": {"input_ids": None, "input_values": _noise(2, 8000)},
    "SpeechT5ForSpeechToText": {"input_ids": None, "input_values": _noise(2, 2000)},
    "WhisperForConditionalGeneration": {"input_ids": None, "input_features": _noise(2, 8, 32)},
}  # fmt: skip


def config(name: str, **options):
    """A configuration for a tiny model of this class."""
    kind = getattr(transformers, name).config_class
    return kind(**_sizes(kind, OWN.get(name, {}) | options))


def _sizes(kind, own: dict) -> dict:
    """The fields of TINY that a configuration class has, also for its inner configurations."""
    names = {f.name for f in dataclasses.fields(kind)}
    inner, usual = {}, _usual(kind)
    for name, sub in (getattr(kind, "sub_configs", None) or {}).items():
        given = own.get(name, {})
        if given is None:
            continue
        if "model_type" in given:
            sub = transformers.CONFIG_MAPPING[given["model_type"]]
        elif sub is transformers.AutoConfig and dataclasses.is_dataclass(
            getattr(usual, name, None)
        ):
            sub = type(getattr(usual, name))
            given = given | {"model_type": sub.model_type}
        if dataclasses.is_dataclass(sub):
            inner[name] = _sizes(sub, given)
    sizes = {k: v for k, v in TINY.items() if k in names}
    rope = getattr(usual, "rope_parameters", None)
    if isinstance(rope, dict) and "mrope_section" in rope and "head_dim" not in own:
        sizes["rope_parameters"] = rope | {"mrope_section": ROPE["mrope_section"]}
    return sizes | own | inner


def _usual(kind):
    """Returns the default configuration of a class, or None if there is no default."""
    try:
        return kind()
    except Exception:  # each class raises its own error
        return None


def build(name: str, **options) -> nn.Module:
    """A random model of the class. Its size is first checked on the meta device."""
    kind = getattr(transformers, name)
    with torch.device("meta"):
        size = sum(p.numel() for p in kind(config(name, **options)).parameters())
    if size > LARGE:
        raise ValueError(f"{size:,} parameters are not tiny")
    torch.manual_seed(0)
    model = kind(config(name, **options)).float().train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            # A bias before a batch norm in training has the gradient 0, which is noise in fp32.
            module.eval().train = lambda mode=True, module=module: module
    return model


def batch(model: nn.Module) -> dict:
    """A batch of two rows of nine tokens. Three labels are ignored."""
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    labels[0, :3] = -100
    given = {"input_ids": ids, "labels": labels, **INPUTS.get(type(model).__name__, {})}
    return {name: t for name, t in given.items() if t is not None}
