"""Downloads a model folder of the Hugging Face hub, with the library `huggingface_hub`, which resumes and checks.

    python3 dev/data/model.py HuggingFaceTB/SmolLM2-135M          to models/SmolLM2-135M
    ./train_llama3 --model models/SmolLM2-135M --generate "Gravity is"

Only what the trainers read is fetched: config.json, *.safetensors with their index, the tokenizer's files, generation
settings, licence and model card. A gated model (meta-llama's) needs a token: accept its licence on its page, then run
`hf auth login`.
"""
import argparse
import os
import sys

from data_common import ROOT, fail, shown

WANTED = ["config.json", "*.safetensors", "model.safetensors.index.json", "tokenizer*", "original/tokenizer.model",
          "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template*",
          "generation_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*", "README.md"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repo", help="OWNER/NAME on the hub")
    parser.add_argument("--revision", help="branch, tag or commit (default: main)")
    parser.add_argument("-o", "--out", metavar="DIR", help="folder to write to (default: models/NAME)")
    args = parser.parse_args()
    import huggingface_hub
    from huggingface_hub import errors
    out = args.out or os.path.join(ROOT, "models", args.repo.rstrip("/").split("/")[-1])
    try:
        huggingface_hub.snapshot_download(args.repo, revision=args.revision, local_dir=out, allow_patterns=WANTED,
                                          ignore_patterns=["consolidated*", "*/*.safetensors"])
    except errors.GatedRepoError:
        fail(f"{args.repo}: is gated", f"accept its licence at https://huggingface.co/{args.repo}, then run `hf auth login`")
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError):
        fail(f"{args.repo}: no such model on the hub, wanted OWNER/NAME", "a private one needs `hf auth login`")
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as e:
        fail(f"{args.repo}: the download failed: {str(e).splitlines()[0]}", "the same command continues where it stopped")
    if not os.path.exists(os.path.join(out, "config.json")):
        fail(f"{args.repo}: holds no config.json, wanted a model in Hugging Face's format")
    print(f"wrote {shown(out)}\nnext  ./train_llama3 --model {shown(out)} --generate \"Once upon a time\"")


if __name__ == "__main__":
    sys.exit(main())
