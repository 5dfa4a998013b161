"""Texts whose token counts are exact, around the boundaries of a page."""

from pathlib import Path

PAGE = 32
SHORT = (1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1, 3 * PAGE + 7)
LONG = (
    1, 2, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1000, 1500,
)  # fmt: skip

_STORY = (
    "The history of the city begins with a small fishing village on the river. Traders came from the north "
    "and brought salt, wool and stories. In the spring the water rose, and every family moved its boats to "
    "the hill where the old tower still stands. "
)


def exact_texts(model_dir: Path, lengths: tuple[int, ...]) -> dict[int, tuple[str, list[int]]]:
    """By length: a text, and the token ids that it encodes to, exactly that many; each text is another."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    texts = {}
    for number, length in enumerate(lengths):
        source = f"{number + 1}. Chapter. " if length > PAGE // 2 else ""
        ids = tokenizer.encode(source + _STORY * (length // 40 + 1), add_special_tokens=False).ids[:length]
        text = tokenizer.decode(ids, skip_special_tokens=False)
        if tokenizer.encode(text, add_special_tokens=False).ids != ids:
            raise ValueError(f"{length} tokens of the story do not survive the way through text")
        texts[length] = (text, ids)
    return texts
