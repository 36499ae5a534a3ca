# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Another value of each field of a configuration that changes what a model computes."""

HYBRID = {"layer_types": ["linear_attention", "sliding_attention"], "sliding_window": 4}
SLIDING = {"layer_types": ["linear_attention", "sliding_attention"], "sliding_window": 5}
EXPERTS = {"num_experts": 4}
SIZES = {"qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
LATENT = {"layer_types": ["linear_attention", "full_attention"], "kv_lora_rank": 6} | SIZES


# another value of each field with an effect, and, where that depends on other fields, those
CHANGES = {"vocab_size": 60, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
CHANGES |= {"num_key_value_heads": 2, "intermediate_size": 96, "hidden_act": "gelu", "key_expansion": 0.5}
CHANGES |= {"value_expansion": 1.0, "decay_schedule": "log_linear"}
CHANGES |= {"decay_range": ((3, 512), {"decay_schedule": "geometric"})}
CHANGES |= {"layer_types": (["linear_attention", "full_attention"], {}), "sliding_window": (5, HYBRID)}
CHANGES |= {"attention_sinks": (2, SLIDING), "attention_sink_distance": (9, SLIDING | {"attention_sinks": 2})}
CHANGES |= {"attention_num_heads": (8, HYBRID), "attention_num_key_value_heads": (2, HYBRID)}
CHANGES |= {"attention_head_dim": (6, HYBRID), "attention_gate_act": ("sigmoid", HYBRID)}
CHANGES |= {"attention_qkv_bias": (True, HYBRID), "attention_use_qk_norm": (True, HYBRID)}
CHANGES |= {"attention_rope_theta": (500.0, HYBRID), "attention_max_length": (50, HYBRID), "kv_lora_rank": (8, LATENT)}
CHANGES |= {"q_lora_rank": (8, LATENT), **dict.fromkeys(SIZES, (8, LATENT))}
CHANGES |= {"qk_norm_eps": (0.5, {"use_qk_norm": True}), "logits_scaling": 4.0, "attention_log_base": (500.0, HYBRID)}
CHANGES |= {"attention_residual_multiplier": (2.0, HYBRID), "mlp_residual_multiplier": 2.0}
CHANGES |= {"rotary_layers": ("linear_attention", HYBRID), "learned_rotary_layers": [0], "head_norm_groups": 1}
CHANGES |= {"head_norm_eps": 1e-3, "value_act": "silu", "norm_affine": False, "num_experts": 4}
CHANGES |= {"num_experts_per_tok": (3, EXPERTS), "moe_intermediate_size": (24, EXPERTS)}
CHANGES |= {"first_k_dense_replace": (1, EXPERTS), "n_shared_experts": (1, EXPERTS)}
CHANGES |= {"router_act": ("sigmoid", EXPERTS), "use_router_bias": (True, EXPERTS)}
CHANGES |= {"n_group": (2, EXPERTS | {"topk_group": 1, "num_experts_per_tok": 1})}
CHANGES |= {"topk_group": (2, EXPERTS | {"n_group": 2}), "norm_topk_prob": (False, EXPERTS)}
CHANGES |= {"routed_scaling_factor": (2.5, EXPERTS), "use_rotary": False, "rotary_endpoint": True}
CHANGES |= {"rope_parameters": ({"rope_type": "default", "rope_theta": 500.0}, {}), "qkv_bias": True}
CHANGES |= {"use_qk_norm": True, "use_output_gate": False, "output_gate_act": "gelu", "use_head_norm": False}
CHANGES |= {"head_norm_affine": False, "use_gated_mlp": False, "feature_map": "relu", "embedding_multiplier": 5.0}
CHANGES |= {"use_embedding_norm": True, "norm_position": "post", "residual_multiplier": 2.0, "bidirectional": True}
CHANGES |= {"rms_norm_eps": 1e-5}
