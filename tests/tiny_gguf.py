"""A llama of two layers as a GGUF file, and the same model from transformers to compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch

HIDDEN, LAYERS, HEADS, KV_HEADS, INNER, CONTEXT = 32, 2, 4, 2, 64, 128
TEMPLATE = "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}<|endoftext|>{% endfor %}"


def byte_tokens() -> list[str]:
    """The 256 byte symbols of a byte-level BPE, then two specials and three merged tokens."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    symbols = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(rest))]
    return [*symbols, "<s>", "<|endoftext|>", "he", "ll", "hell"]


def tiny_model() -> Any:
    """A random llama whose weights are exact in bfloat16, so that conversion loses nothing."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(byte_tokens()),
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).float().eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def write_gguf(path: Path, model: Any) -> Path:
    """Write the model with a byte-level tokenizer and a chat template."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_file_type(int(gguf.LlamaFileType.ALL_F32))
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    tokens = byte_tokens()
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in ("<s>", "<|endoftext|>") else 1 for token in tokens])
    writer.add_token_merges(["h e", "l l", "he ll"])
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("<|endoftext|>"))
    writer.add_unk_token_id(tokens.index("<s>"))
    writer.add_pad_token_id(tokens.index("<|endoftext|>"))
    writer.add_chat_template(TEMPLATE)
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    for layer in range(LAYERS):
        theirs, ours = f"blk.{layer}.", f"model.layers.{layer}."
        for short, name in (
            ("attn_norm", "input_layernorm"),
            ("ffn_norm", "post_attention_layernorm"),
            ("attn_v", "self_attn.v_proj"),
            ("attn_output", "self_attn.o_proj"),
            ("ffn_gate", "mlp.gate_proj"),
            ("ffn_up", "mlp.up_proj"),
            ("ffn_down", "mlp.down_proj"),
        ):
            writer.add_tensor(f"{theirs}{short}.weight", weights[f"{ours}{name}.weight"])
        for short, heads in (("q", HEADS), ("k", KV_HEADS)):
            rows = weights[f"{ours}self_attn.{short}_proj.weight"]
            # GGUF interleaves the halves that transformers rotates against each other.
            paired = rows.reshape(heads, 2, -1, HIDDEN).swapaxes(1, 2).reshape(rows.shape)
            writer.add_tensor(f"{theirs}attn_{short}.weight", paired.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
