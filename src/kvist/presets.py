"""The four named configurations. Owns their numbers and nothing else; `preset` hands them out.

`v41-flash` are the released values (facts section 1); `v41-flash-slim` keeps every width and has 128 experts a layer, so
that one large GPU holds it; `nano` is trained and shipped; `tiny` serves tests (the toy of the fault collection).
"""

from __future__ import annotations

from collections.abc import Callable

from kvist.config import ConfigError, ModelConfig, VisionConfig, replace


def v41_flash() -> ModelConfig:
    """The released model."""
    return ModelConfig(
        vocab_size=129280,
        dim=5120,
        n_layers=40,
        n_heads=64,
        head_dim=512,
        rope_head_dim=64,
        q_lora_rank=1280,
        o_lora_rank=1024,
        o_groups=8,
        window_size=128,
        compress_ratios=(0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3,
        kv_source_layers=(2, 8, 14, 20),
        index_source_layers=(2, 8, 14, 20, 24, 28, 32, 36),
        candidate_source_layers=(20,),
        candidate_topk_blocks=2048,
        candidate_block_size=8,
        index_n_heads=32,
        index_head_dim=128,
        index_topk=512,
        moe_inter_dim=2304,
        n_routed_experts=384,
        n_activated_experts=6,
        engram_layer_ids=(1, 14),
        engram_num_embeddings=(384006168, 384016682),
        engram_compressed_vocab_size=99092,
        n_mtp_layers=3,
        dspark_block_size=5,
        dspark_noise_token_id=128799,
        dspark_markov_rank=256,
        dspark_target_layer_ids=(37, 38, 39),
        dspark_n_routed_experts=128,
        dspark_n_activated_experts=3,
        image_token_id=129264,
        vision=VisionConfig(num_hidden_layers=32, hidden_size=1024, num_attention_heads=16, intermediate_size=2816),
    )


def v41_flash_slim() -> ModelConfig:
    """Released widths with 128 of 384 experts a layer: the same active bytes a token, on one card."""
    return replace(v41_flash(), n_routed_experts=128)


def nano() -> ModelConfig:
    """The shipped model: the full role structure in 12 layers, trained on permissive text.

    22.3M parameters in 23.3 MB of tensors; 10.0M active in decode, 4.6M in prefill (`kvist plan nano`). Vocabulary, query
    rank and Markov rank are small because BF16 and FP8 bytes buy fewer parameters than FP4 experts do.
    """
    return ModelConfig(
        vocab_size=7168,
        dim=256,
        n_layers=12,
        n_heads=8,
        head_dim=64,
        rope_head_dim=32,
        q_lora_rank=96,
        o_lora_rank=64,
        o_groups=2,
        window_size=64,
        compress_ratios=(0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0, 0),
        kv_source_layers=(2, 4, 6),
        index_source_layers=(2, 4, 6, 8, 10),
        candidate_source_layers=(6,),
        candidate_topk_blocks=64,
        candidate_block_size=8,
        index_n_heads=4,
        index_head_dim=64,
        index_topk=64,
        moe_inter_dim=96,
        n_routed_experts=12,
        n_activated_experts=4,
        original_seq_len=4096,
        rope_factor=8.0,
        max_seq_len=32768,
        engram_layer_ids=(1, 4),
        engram_num_embeddings=(19590, 20752),
        engram_n_heads=4,
        engram_head_dim=32,
        engram_vocab_size=1600,
        engram_compressed_vocab_size=5367,
        n_mtp_layers=3,
        dspark_block_size=5,
        dspark_noise_token_id=3,
        dspark_markov_rank=16,
        dspark_target_layer_ids=(9, 10, 11),
        dspark_n_routed_experts=4,
        dspark_n_activated_experts=2,
    )


def tiny() -> ModelConfig:
    """A toy with the topology of the release, for tests on random weights."""
    return ModelConfig(
        vocab_size=256,
        dim=64,
        n_layers=8,
        n_heads=4,
        head_dim=32,
        rope_head_dim=16,
        q_lora_rank=32,
        o_lora_rank=32,
        o_groups=2,
        window_size=8,
        compress_ratios=(0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0),
        kv_source_layers=(2, 4),
        index_source_layers=(2, 4, 6),
        candidate_source_layers=(4,),
        candidate_topk_blocks=2,
        candidate_block_size=4,
        index_n_heads=2,
        index_head_dim=32,
        index_topk=4,
        moe_inter_dim=32,
        n_routed_experts=8,
        n_activated_experts=2,
        original_seq_len=64,
        rope_factor=4.0,
        max_seq_len=1024,
        engram_layer_ids=(1, 3),
        engram_num_embeddings=(660, 900),
        engram_n_heads=2,
        engram_head_dim=32,
        engram_vocab_size=101,
        engram_compressed_vocab_size=200,
        n_mtp_layers=3,
        dspark_block_size=5,
        dspark_noise_token_id=3,
        dspark_markov_rank=32,
        dspark_target_layer_ids=(5, 6, 7),
        dspark_n_routed_experts=4,
        dspark_n_activated_experts=2,
    )


PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "v41-flash": v41_flash,
    "v41-flash-slim": v41_flash_slim,
    "nano": nano,
    "tiny": tiny,
}


def preset(name: str) -> ModelConfig:
    """A configuration by name. Raises `ConfigError` that lists the known names."""
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}; known: {', '.join(sorted(PRESETS))}")
    return PRESETS[name]()
