"""nano's tokenizer: byte-level BPE of 4,096 tokens, learned from the training files alone.

The first ids are the control tokens of the released model's chat format, so that its encoding runs on nano
too. They are looked up by their text, as everywhere.
"""

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SIZE = 4096
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
IMAGE, NOISE = "<｜deepseek_image｜>", "<｜dspark_noise｜>"
CONTROL = (
    BOS, EOS, PAD, IMAGE, NOISE,
    "<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜",
    "<｜latest_reminder｜>", "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>",
    "<｜action｜>", "<｜query｜>", "<｜authority｜>", "<｜domain｜>", "<｜title｜>", "<｜read_url｜>",
)  # fmt: skip


def learn_vocabulary(texts: Iterable[str]) -> Tokenizer:
    """Blocks for about a minute of one core. The same texts give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        special_tokens=list(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, the token that begins a sentence before them."""
    bos = token_id(tokenizer, BOS)
    return [
        [bos, *encoding.ids] for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)
    ]


def token_id(tokenizer: Tokenizer, text: str) -> int:
    """Of a control token, which the vocabulary has by construction."""
    found = tokenizer.token_to_id(text)
    assert found is not None, f"the vocabulary has no {text!r}"
    return found
