"""Small random models of each kind of transformers, and how they are run."""

import torch
import transformers

B, N, VOCAB, WINDOW = 2, 13, 48, 5

NO_DROPOUT = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
SMALL = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
GQA = {"num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
           "shared_expert_intermediate_size": 16}  # fmt: skip
GEMMA4 = SMALL | {"num_key_value_heads": 2, "head_dim": 256, "global_head_dim": 512, "sliding_window": WINDOW,
                  "vocab_size_per_layer_input": VOCAB}  # fmt: skip
# Multi-head latent attention: 128 dimensions and 64 with positions for queries and keys, 128 for values. No experts.
MLA = SMALL | {"num_key_value_heads": 4, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
               "kv_lora_rank": 16, "first_k_dense_replace": 2, "n_group": 1, "topk_group": 1}  # fmt: skip

# kind: (name of the model, of its config, the config)
KINDS = {
    "bert": ("BertModel", "BertConfig", SMALL | NO_DROPOUT),
    "roberta": ("RobertaModel", "RobertaConfig", SMALL | NO_DROPOUT),  # its positions begin at 1, after that of padding
    "bert decoder": ("BertLMHeadModel", "BertConfig", SMALL | NO_DROPOUT | {"is_decoder": True}),
    "modernbert": ("ModernBertModel", "ModernBertConfig",
                   SMALL | {"local_attention": 2 * WINDOW, "layer_types": ["full_attention", "sliding_attention"],
                            "cls_token_id": 1, "sep_token_id": 2, "eos_token_id": 2}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config",
             {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.0,
              "resid_pdrop": 0.0, "embd_pdrop": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", SMALL | GQA),
    "mistral": ("MistralForCausalLM", "MistralConfig", SMALL | GQA | {"sliding_window": WINDOW}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config",
               SMALL | GQA | {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4,
                              "layer_types": ["full_attention", "sliding_attention"]}),
    # Its layers do not pass the window on: the mask alone says which of them have one.
    "qwen2_moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig",
                  SMALL | GQA | EXPERTS | {"sliding_window": WINDOW, "use_sliding_window": True,
                                           "layer_types": ["full_attention", "sliding_attention"]}),
    "llama4": ("Llama4ForCausalLM", "Llama4TextConfig",
               SMALL | GQA | {"attention_chunk_size": WINDOW, "intermediate_size_mlp": 32, "num_local_experts": 2,
                              "layer_types": ["full_attention", "chunked_attention"]}),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig",
                SMALL | GQA | {"sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 2,
                               "layer_types": ["full_attention", "sliding_attention"]}),
    # Of 31B: one projection for keys and values of the global layers, without embeddings of each layer.
    "gemma4": ("Gemma4ForCausalLM", "Gemma4TextConfig",
               GEMMA4 | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
                         "layer_types": ["sliding_attention", "full_attention"]}),
    # Of E2B and E4B: such embeddings, and last layers that share the keys of earlier ones.
    "gemma4 shared": ("Gemma4ForCausalLM", "Gemma4TextConfig",
                      GEMMA4 | {"hidden_size_per_layer_input": 8, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
                                "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", "DeepseekV2Config", MLA | {"q_lora_rank": None}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", MLA | {"q_lora_rank": 16}),
    "t5": ("T5ForConditionalGeneration", "T5Config",
           {"vocab_size": VOCAB, "d_model": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 32,
            "dropout_rate": 0.0, "pad_token_id": 0, "eos_token_id": None, "decoder_start_token_id": 0}),
}  # fmt: skip
# Models that make a position bias of queries and keys, as `use_bias_terms` knows them.
T5_SMALL = KINDS["t5"][2]
INKLING = SMALL | GQA | {
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "sliding_window_size": WINDOW,
    "d_rel": 3, "rel_extent": 7, "log_scaling_n_floor": 4, "layer_types": ["hybrid_sliding", "hybrid"],
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
MPT = {"vocab_size": VOCAB, "d_model": 48, "n_heads": 6, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": 256,
       "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}  # fmt: skip
BLOOM = {"vocab_size": VOCAB, "hidden_size": 48, "n_layer": 2, "n_head": 6, "hidden_dropout": 0.0,
         "attention_dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}  # fmt: skip
DEBERTA = SMALL | NO_DROPOUT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0,
                                "position_biased_input": False}  # fmt: skip
BIAS_KINDS = {
    "t5": KINDS["t5"],
    "mt5": ("MT5ForConditionalGeneration", "MT5Config", T5_SMALL),
    "umt5": ("UMT5ForConditionalGeneration", "UMT5Config", T5_SMALL),
    "pop2piano": ("Pop2PianoForConditionalGeneration", "Pop2PianoConfig", T5_SMALL),
    "switch": ("SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig",
               T5_SMALL | {"num_decoder_layers": 2, "num_experts": 2, "num_sparse_encoder_layers": 1,
                           "num_sparse_decoder_layers": 1, "router_jitter_noise": 0.0}),
    "inkling": ("InklingForCausalLM", "InklingTextConfig",
                INKLING | {"mlp_layer_types": ["dense", "sparse"], "n_shared_experts": 1}),
    "inkling2": ("Inkling2ForCausalLM", "Inkling2TextConfig",
                 INKLING | {"unpadded_vocab_size": VOCAB, "n_layers_per_attn_res_block": 1}),
    "mpnet": ("MPNetModel", "MPNetConfig", SMALL | NO_DROPOUT | {"max_position_embeddings": 256, "pad_token_id": 1}),
    "mpt": ("MptForCausalLM", "MptConfig", MPT),
    "bloom": ("BloomForCausalLM", "BloomConfig", BLOOM),
    # DeBERTa-v3's: logarithmic buckets, and the content's projections for positions too.
    "deberta": ("DebertaV2Model", "DebertaV2Config",
                DEBERTA | {"position_buckets": 4, "max_relative_positions": 9, "share_att_key": True,
                           "norm_rel_ebd": "layer_norm"}),
    "deberta without buckets": ("DebertaV2Model", "DebertaV2Config",
                                DEBERTA | {"max_relative_positions": 5, "conv_kernel_size": 3}),
    "deberta c2p": ("DebertaV2Model", "DebertaV2Config",
                    DEBERTA | {"position_buckets": 4, "max_relative_positions": 40, "pos_att_type": ["c2p"]}),
    "deberta without positions": ("DebertaV2Model", "DebertaV2Config",
                                  SMALL | NO_DROPOUT | {"max_position_embeddings": 256}),
}  # fmt: skip
T5_KINDS = ["t5", "mt5", "umt5", "pop2piano", "switch"]
NO_SDPA = {"gemma2", "gpt_oss"}  # transformers' sdpa has no softcap, and no sinks
NO_LEFT_PADDING_IN_EAGER = {
    "llama4"
}  # its eager mask hides other pairs than its sdpa mask where padding is on the left
LARGE_HEADS = ["gemma4", "gemma4 shared", "deepseek_v2", "deepseek_v3"]
DECODERS = ["bert decoder", "gpt2", "llama", "mistral", "gemma2", "qwen2_moe", "llama4", "gpt_oss", *LARGE_HEADS]


def build(kind, implementation, **changes):
    name, config_name, options = (KINDS | BIAS_KINDS)[kind]
    config = getattr(transformers, config_name)(**(options | changes))
    torch.manual_seed(0)  # vectors stay as they are made: sinks
    model = getattr(transformers, name)._from_config(config, attn_implementation=implementation)
    assert model.config._attn_implementation == implementation
    moderate(model, kind)
    return model


def moderate(model, kind):
    """Make matrices so large that queries tell keys apart, and see more than one."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(std=0.3)  # as initialized, scores are so small that every attention is a mean
            elif "gemma4" in kind and parameter.endswith("q_norm.weight"):
                p.fill_(p.numel() ** -0.5)  # its scores are not scaled: with weights of 1 each query sees one key


def implementations(kind):
    return ["eager"] if kind in NO_SDPA else ["eager", "sdpa"]


def tokens(length=N):
    return torch.randint(3, VOCAB, (B, length), generator=torch.Generator().manual_seed(1))


def padding(side):
    mask = torch.ones(B, N, dtype=torch.long)
    if side == "left":
        mask[0, :4] = 0
    elif side == "right":
        mask[0, -4:] = 0
    return None if side is None else mask


def run(model, kind, mask, **inputs):
    if kind in T5_KINDS:
        # other lengths for the decoder, and padding of its own
        inputs |= {"decoder_input_ids": tokens().flip(0)[:, :-2]}
        if mask is not None:
            inputs |= {"decoder_attention_mask": mask.flip(0)[:, :-2]}
    out = model(input_ids=tokens(), attention_mask=mask, **inputs)
    return out.logits if "logits" in out else out.last_hidden_state


def real(kind, mask, o):
    """The rows of ``o`` that are not padding: what padding attends to is nobody's business."""
    if mask is None:
        return o.flatten(0, 1)
    return o[(mask.flip(0)[:, :-2] if kind in T5_KINDS else mask).bool()]


def close(a, b, floor=0.0, rtol=1e-4):
    torch.testing.assert_close(a, b, rtol=rtol, atol=max(rtol / 5 * b.abs().max().item(), floor))
