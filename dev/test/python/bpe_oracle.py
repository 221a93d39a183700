"""The oracle of ./tokenize --train-bpe: `tokenizers` trains a byte-level BPE with Llama 3's split pattern on whole documents.

Ids are laid out as in Llama 3: the 256 bytes, then the merged tokens in the order they were learnt, then the special tokens. The
merge list is rebuilt from these ids, which makes one rule of "lowest merge first" (Hugging Face) and "lowest id of the merged
bytes first" (tiktoken).
"""
import json

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

LLAMA3_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                  r"|\s*[\r\n]+|\s+(?!\S)|\s+")
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
CHAT = ["<|finetune_right_pad_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"]


def pre_tokenizer():
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])


def learn(texts, num_tokens):
    """Returns the token strings in the order of their ids: the 256 bytes, then the merged tokens."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizer()
    trainer = trainers.BpeTrainer(vocab_size=num_tokens, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  show_progress=False)
    tok.train_from_iterator(texts, trainer)
    vocab = tok.get_vocab()
    return sorted(vocab, key=vocab.get)


def merges_of(tokens):
    """Returns tiktoken's rule as a list of merges: all splits of each token into two, in the order of the tokens' ids."""
    rank = {token: i for i, token in enumerate(tokens)}
    merges = []
    for token in tokens:
        splits = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in rank and token[i:] in rank]
        merges += sorted(splits, key=lambda pair: (rank[pair[0]], rank[pair[1]]))
    return merges


def tokenizer_json(documents, vocab_size, chat=False):
    """Trains on a list of documents and returns tokenizer.json, parsed."""
    specials = [BOS, EOS, *(CHAT if chat else [])]
    tokens = learn(documents, vocab_size - len(specials))
    tok = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges_of(tokens), ignore_merges=True))
    tok.pre_tokenizer = pre_tokenizer()
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens(specials)
    tok.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, tok.token_to_id(BOS))])
    return json.loads(tok.to_str())
