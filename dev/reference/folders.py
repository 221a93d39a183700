"""folders.py -- reads and writes the tensors of model folders, in Hugging Face's format, and of adapters, in PEFT's format.

Tensors come and go as pairs of name and tensor. train_llama3.py makes the models."""
import glob
import json
import os
import sys

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dev.reference.config import write_config
from dev.reference.log import die


def save_tensors(tensors, path, metadata):
    """Writes a safetensors file. Its mode follows the umask: the library lets no other user read it."""
    save_file(tensors, path, metadata=metadata)
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(path, 0o666 & ~umask)


def checkpoints(out):
    """Returns the checkpoints in the folder of a run, the oldest first."""
    return sorted(glob.glob(os.path.join(glob.escape(out), "step_" + "[0-9]" * 8)))


def model_of(name):
    """Returns the folder of the model that --model names: in the folder of a run, its newest checkpoint."""
    def is_model(folder):
        return any(os.path.exists(os.path.join(folder, file)) for file in ("config.json", "adapter_config.json"))
    models = [] if is_model(name) else [path for path in checkpoints(name) if is_model(path)]
    return models[-1] if models else name


def adapter_config(folder):
    """Returns the adapter_config.json of a folder of adapters, or None. target_modules are the matrices that have tensors."""
    path = os.path.join(folder, "adapter_config.json")
    if not os.path.exists(path):
        return None
    with open(path, encoding="utf-8") as f:
        config = json.load(f)
    with safe_open(os.path.join(folder, "adapter_model.safetensors"), framework="pt") as f:
        names = {name.split(".lora_")[0].split(".")[-1]: True for name in f.keys()}  # a set that keeps its order
    alpha = config["lora_alpha"] * (config["r"] ** 0.5 if config.get("use_rslora") else 1)
    return config | {"target_modules": list(names), "lora_alpha": alpha}


def base_folder(folder):
    """Returns the folder of the base model, if `folder` holds adapters, else `folder`."""
    adapter = adapter_config(folder)
    return adapter["base_model_name_or_path"] if adapter else folder


@torch.no_grad()
def read_adapters(folder, tensors):
    """Reads adapters into the tensors of (name, tensor)."""
    with safe_open(os.path.join(folder, "adapter_model.safetensors"), framework="pt") as f:
        for name, w in tensors:
            w.copy_(f.get_tensor(name))


def write_adapters(folder, tensors, lora, base):
    """Writes a folder of adapters. lora: their rank, alpha and matrices. base: the folder of the model beside them."""
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "adapter_config.json"), "w", encoding="utf-8") as f:
        json.dump(dict(peft_type="LORA", task_type="CAUSAL_LM", base_model_name_or_path=base, r=lora["rank"],
                       lora_alpha=lora["alpha"], lora_dropout=0.0, bias="none", target_modules=lora["on"]), f, indent=2)
    save_tensors({name: w.detach().to("cpu", torch.float32).contiguous() for name, w in tensors},
                 os.path.join(folder, "adapter_model.safetensors"), {"format": "pt"})


@torch.no_grad()
def read_weights(folder, tensors, tied):
    """Reads a model folder, of one file or several, into the tensors of (name, tensor), all of which must be in it. `tied`: a
    head in the folder must equal the embedding."""
    index, paths = os.path.join(folder, "model.safetensors.index.json"), [os.path.join(folder, "model.safetensors")]
    if not os.path.exists(paths[0]) and os.path.exists(index):
        with open(index, encoding="utf-8") as f:
            paths = [os.path.join(folder, p) for p in sorted(set(json.load(f)["weight_map"].values()))]
    wanted, head = dict(tensors), None
    known = set(wanted)
    embedding = wanted["model.embed_tokens.weight"]
    for path in reversed(paths):  # of two tensors with one name, transformers takes that of the last file
        try:
            with safe_open(path, framework="pt") as f:
                for name in f.keys():
                    w = f.get_tensor(name)
                    if name.endswith("inv_freq") or (name in known and name not in wanted):
                        continue
                    if name == "lm_head.weight" and tied:
                        head = w
                    elif name not in wanted:
                        die(f"{path}: tensor {name} is unknown")
                    elif wanted[name].shape != w.shape:
                        die(f"{path}: {name} has shape {list(w.shape)}, wanted {list(wanted[name].shape)}")
                    else:
                        wanted.pop(name).copy_(w)
        except (OSError, SafetensorError) as e:
            die(f"{path}: {e}")
    if wanted:
        die(f"{paths[0]}: tensor {next(iter(wanted))} is missing")
    if head is not None and not torch.equal(head.to(embedding.device, embedding.dtype), embedding):
        die(f"{folder}: lm_head.weight differs from the embedding, but tie_word_embeddings is true")


def write_weights(folder, c, tensors, dtype, spelling):
    """Writes a model folder of Config c with the tensors (name, tensor) in `dtype`. If that would make a finite weight
    infinite, writes F32, with a warning. spelling: see write_config()."""
    tensors = {name: w.detach().cpu() for name, w in tensors}
    rounded = {name: w.to(dtype) for name, w in tensors.items()}
    large = [name for name, w in tensors.items() if not torch.equal(w.isfinite(), rounded[name].isfinite())]
    if large:
        dtype = torch.float32
        print(f"warning: {folder}: tensor {large[0]} is infinite in F16 or BF16: the weights are F32", file=sys.stderr)
    os.makedirs(folder, exist_ok=True)
    write_config(c, folder, str(dtype).split(".")[1], spelling)
    tensors = {name: (w.to(dtype) if large else rounded[name]).contiguous() for name, w in tensors.items()}
    save_tensors(tensors, os.path.join(folder, "model.safetensors"), {"format": "pt"})
    size = sum(w.numel() * w.element_size() for w in tensors.values())
    with open(os.path.join(folder, "model.safetensors.index.json"), "w", encoding="utf-8") as f:
        json.dump({"metadata": {"total_size": size}, "weight_map": {name: "model.safetensors" for name in tensors}}, f,
                  indent=2)
