"""config.py -- the shape of a model: its configuration, the presets, config.json, and the flags of training that dN gets.
llmc/config.h and llmc/run/session/dial.h have the same in C."""
import json
import math
import os
from dataclasses import dataclass, fields

from dev.reference.log import die
from dev.reference.tables import c_flags, c_numbers, c_table, flag_value

LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass
class Config:
    vocab_size: int = 256
    hidden_size: int = 64
    intermediate_size: int = 256
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 16
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = False
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_type: str = "default"  # or "llama3", which has the four fields below
    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    bos_token_id: int = None
    eos_token_id: list = None

    def rope(self):
        r = dict(rope_type=self.rope_type)
        if self.rope_type == "llama3":
            r |= {k: getattr(self, k) for k in LLAMA3_ROPE}
        return r

    def matmul_parameters(self):
        q, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        block = self.hidden_size * (2 * q + 2 * kv + 3 * self.intermediate_size)
        return self.num_hidden_layers * block + self.vocab_size * self.hidden_size

    def flops_per_token(self, T):
        """Returns the FLOPs of forward and backward, with the causal half of attention, without recomputation."""
        attention = self.num_hidden_layers * self.num_attention_heads * self.head_dim * T
        return 6 * (self.matmul_parameters() + attention)



def presets():
    """Returns {name: Config} of the shapes that Meta published: the table in llmc/config.h."""
    return {name: Config(vocab_size=V, hidden_size=C, intermediate_size=FF, num_hidden_layers=L, num_attention_heads=NH,
                         num_key_value_heads=NKV, head_dim=HD, max_position_embeddings=positions, tie_word_embeddings=tied,
                         rms_norm_eps=1e-5, rope_theta=500000.0, rope_type="llama3", factor=float(factor),
                         bos_token_id=128000, eos_token_id=[128001])
            for name, V, C, FF, L, NH, NKV, HD, positions, tied, factor in c_table("llmc/config.h", "presets")}


def preset(name, vocab_size):
    """Returns the Config of a preset, or None. dN has N layers and `vocab_size` tokens; Meta's have their own vocabulary."""
    if name in presets():
        return presets()[name]
    if not (name[:1] == "d" and name[1:].isdigit() and 1 <= int(name[1:]) <= 1024 and name[1] != "0"):
        return None
    N = int(name[1:])
    kv = max(k for k in range(1, N + 1) if N % k == 0 and k <= max(1, N / 3))
    ffn = -(-(-(-64 * N * 8 // 3)) // 256) * 256
    return Config(vocab_size=vocab_size, hidden_size=64 * N, intermediate_size=ffn, num_hidden_layers=N,
                  num_attention_heads=N, num_key_value_heads=kv, head_dim=64, rms_norm_eps=1e-5, rope_theta=500000.0)


DIALLED = "steps batch total-batch lr warmup".split()  # flags that a new model dN gets from dial_of()


def dial_of(a, weights, rows, cuda):
    """Returns {flag: value} by the laws of llmc/run/session/dial.h, which choose_dial() and choose_rate() apply in C."""
    d, row, flags = c_numbers("llmc/run/session/dial.h", "DIAL"), a.seq, {}
    data, power = rows * row, d["BATCH_D"]
    tokens = min(d["TOKENS_PER_WEIGHT"] * weights, d["EPOCHS"] * data) if a.steps is None else data
    if a.steps is not None and a.steps >= 0:
        tokens = (d["BATCH"] * a.steps) ** (1 / (1 - power))
    if a.batch is None and a.total_batch is None:
        best = d["BATCH"] * tokens ** power
        if a.steps is not None and a.steps > 0:
            best = min(best, d["EPOCHS"] * data / a.steps)
        share = 2 ** round(math.log2(max(best / row, d["ROWS"])))
        while share > 1 and share > rows:
            share //= 2
        flags["total-batch"] = share * row
    step = flags.get("total-batch") or a.total_batch or (a.batch or 1) * row
    if a.batch is None:
        micro, most = 1, d["MICRO_GPU" if cuda else "MICRO_CPU"]
        while step >= row and step // row % (2 * micro) == 0 and 2 * micro * row <= most and 2 * micro <= rows:
            micro *= 2
        flags["batch"] = micro
    flags["steps"] = max(1, int(tokens / step))
    steps = flags["steps"] if a.steps is None else a.steps if a.steps >= 0 else max(1, rows * row // step)
    law = d["RATE"] * weights ** d["RATE_N"] * max(steps * step, 1) ** d["RATE_D"] * (d["RATE_MUON"] if a.optimizer == "muon" else 1)
    flags["lr"] = float(f"{min(law * math.sqrt(step / (d['BATCH'] * max(steps * step, 1) ** power)), d['RATE_MOST']):.1e}")
    flags["warmup"] = max(0, min(int(d["WARMUP"] * steps), steps - a.decay))
    return flags


def settle(a, chosen):
    """Gives the flags of DIALLED that are not given the values of `chosen`, or their defaults."""
    c = c_flags()
    for name in DIALLED:
        field = name.replace("-", "_")
        if getattr(a, field) is None:
            setattr(a, field, chosen.get(name, flag_value(c[name][0], c[name][2])))


def read_rope(c, j, path):
    """Sets the RoPE fields of c. config.json spells them the old way (rope_theta, rope_scaling), as in transformers 5
    (rope_parameters), or both ways."""
    old = dict(j.get("rope_scaling", {}))
    if "rope_theta" in j:
        old["rope_theta"] = j["rope_theta"]
    if old:  # transformers then reads rope_scaling alone
        old.setdefault("rope_theta", 10000.0)
    rope = {}
    for name, spelling in (("rope_scaling", old), ("rope_parameters", dict(j.get("rope_parameters", {})))):
        if "type" in spelling:
            spelling.setdefault("rope_type", spelling.pop("type"))
        for k, v in spelling.items():
            if v is not None and rope.setdefault(k, v) != v:
                die(f"{path}: {name} says {k} is {v!r}, but elsewhere it is {rope[k]!r}")
    c.rope_type, c.rope_theta = rope.get("rope_type", "default"), float(rope.get("rope_theta", 10000.0))
    if c.rope_type not in ("default", "llama3") or rope.get("partial_rotary_factor", 1.0) != 1.0:
        die(f"{path}: RoPE is {rope}, wanted type default or llama3")
    if c.rope_type == "llama3":
        original = LLAMA3_ROPE[-1]  # transformers takes the one outside of the RoPE members first
        rope[original] = j.get(original, rope.get(original, c.max_position_embeddings))
        for k in LLAMA3_ROPE:
            if k not in rope:
                die(f"{path}: RoPE type llama3 lacks {k}")
            setattr(c, k, rope[k])


def read_config(folder):
    """Returns the Config of a model folder. Refuses by name each field of config.json that the model would compute wrongly."""
    path = os.path.join(folder, "config.json")
    try:
        with open(path, encoding="utf-8") as f:
            j = {k: v for k, v in json.load(f).items() if v is not None}  # null means absent
    except (OSError, ValueError, AttributeError) as e:
        die(f"{path}: {e}")
    for key, wanted in dict(model_type="llama", hidden_act="silu", attention_bias=False, mlp_bias=False,
                            partial_rotary_factor=1.0).items():
        if j.get(key, wanted) != wanted:
            die(f"{path}: {key} is {j[key]!r}, wanted {wanted!r}")
    try:
        c = Config(vocab_size=j["vocab_size"], hidden_size=j["hidden_size"], intermediate_size=j["intermediate_size"],
                   num_hidden_layers=j["num_hidden_layers"], num_attention_heads=j["num_attention_heads"])
    except KeyError as e:
        die(f"{path}: {e.args[0]} is missing")
    c.num_key_value_heads = j.get("num_key_value_heads", c.num_attention_heads)
    c.head_dim = j.get("head_dim", c.hidden_size // c.num_attention_heads)
    for key in ("max_position_embeddings", "tie_word_embeddings", "rms_norm_eps", "bos_token_id"):
        setattr(c, key, j.get(key, getattr(c, key)))
    eos = j.get("eos_token_id")
    c.eos_token_id = eos if isinstance(eos, list) or eos is None else [eos]
    c.bos_token_id = None if c.bos_token_id == -1 else c.bos_token_id
    c.source = j  # no field: what we do not know stays as it is, see write_config()
    read_rope(c, j, path)
    if c.num_key_value_heads < 1 or c.num_attention_heads % c.num_key_value_heads or c.head_dim % 2:
        die(f"{path}: num_key_value_heads {c.num_key_value_heads} must divide {c.num_attention_heads}, and head_dim "
            f"{c.head_dim} must be even")
    return c


def write_config(c, folder, dtype, spelling="both"):
    """Writes config.json. `spelling`: the way of the RoPE fields, old, new or both. Old and new are for tests of readers."""
    j = dict(architectures=["LlamaForCausalLM"], model_type="llama", attention_bias=False, attention_dropout=0.0,
             mlp_bias=False, hidden_act="silu", initializer_range=0.02, use_cache=True, dtype=dtype, torch_dtype=dtype)
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                "num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings", "rms_norm_eps",
                "bos_token_id"):
        j[key] = getattr(c, key)
    j["eos_token_id"] = c.eos_token_id[0] if c.eos_token_id and len(c.eos_token_id) == 1 else c.eos_token_id
    if spelling in ("old", "both"):
        j["rope_theta"] = c.rope_theta
        j["rope_scaling"] = c.rope() if c.rope_type != "default" else None
        if spelling == "old" and c.rope_type != "default":
            j["rope_scaling"]["type"] = j["rope_scaling"].pop("rope_type")
    if spelling in ("new", "both"):
        j["rope_parameters"] = dict(c.rope(), rope_theta=c.rope_theta)
    source = getattr(c, "source", {})
    j |= {key: value for key, value in source.items() if key not in j or key in ("initializer_range", "use_cache")}
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
        f.write(json.dumps(j, indent=2, sort_keys=True) + "\n")


def config_of(pairs):
    """Returns the Config that KEY=VALUE pairs of --config describe."""
    types = {f.name: type(getattr(Config(), f.name)) for f in fields(Config)}
    c = Config()
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key not in types or types[key] is type(None):
            die(f"--config {key}: unknown, wanted one of {', '.join(types)}", 2)
        try:
            setattr(c, key, value.lower() in ("1", "true", "yes") if types[key] is bool else types[key](value))
        except ValueError:
            die(f"--config {key}: is {value}, wanted a number", 2)
    return c
