"""Tiny real models for tests, made on the spot without a network. Used by Arctic's own tests and by its adapters'.

The models are two-layer Qwen3 with random weights whose scale is large enough that log-probs differ between tokens.
Needs the ``train`` extra.
"""

from __future__ import annotations

from pathlib import Path

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
"""Special tokens; their ids are their places."""
_CORPUS = ["user assistant system what is the sum of one two three and four ? answer: 0 1 2 3 4 5 6 7 8 9 + - ="] * 20


def make_tiny_model(
    directory: str | Path,
    *,
    seed: int = 0,
    tie_embeddings: bool = False,
    hidden_size: int = 64,
    layers: int = 2,
    head_dim: int = 32,
    initializer_range: float = 0.2,
) -> str:
    """Write a random Qwen3 model and a byte-level tokenizer to ``directory``; returns it as a string.

    Float32, 512 tokens of vocabulary, 512 positions, grouped-query attention (4 heads, 2 KV heads).
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = _tokenizer()
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=512,
        initializer_range=initializer_range,
        tie_word_embeddings=tie_embeddings,
        bos_token_id=None,
        eos_token_id=_SPECIAL.index("<|im_end|>"),
        pad_token_id=_SPECIAL.index("<|endoftext|>"),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).float()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def _tokenizer():  # noqa: ANN202 - transformers is imported lazily
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    raw.train_from_iterator(_CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
