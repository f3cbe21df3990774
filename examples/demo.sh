#!/usr/bin/env bash
# From text to a trained model and back to text, on this machine's CPU, in a few minutes:
# tokenizer, token files, 3D-parallel training on four ranks (tensor 2 x pipeline 2), loss curve, generation on one rank.
#
#   examples/demo.sh [OUT] [SETTINGS...]    OUT: folder for everything that is made, emptied first (default demo_out);
#                                           settings: more for pretrain_gpt.py, such as --train-iters 100
#
# Needs megalite's Python on the PATH: `make demo` sees to it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out=${1:-demo_out}
[ $# -gt 0 ] && shift
export OMP_NUM_THREADS=1  # four ranks share few cores
mark=.made-by-megalite-demo

bold='' dim='' plain=''
if [ -t 1 ]; then bold=$'\e[1m' dim=$'\e[2m' plain=$'\e[0m'; fi
heading() { printf '\n%s== %s%s\n\n' "$bold" "$1" "$plain"; }
run() { printf '%s$ %s%s\n' "$dim" "${*@Q}" "$plain" | sed "s/'\([A-Za-z0-9_.,/=-]*\)'/\1/g"; "$@"; }

if ! python -P -c 'import megalite' 2>/dev/null; then
    echo 'error: this python has no megalite: run "make venv", then PATH="$PWD/.venv/bin:$PATH"' >&2
    exit 2
fi

# Only a folder that an earlier demo made is emptied.
if [ -e "$out" ] && [ ! -e "$out/$mark" ]; then
    echo "error: $out exists and was not made by this demo; remove it or name another folder" >&2
    exit 2
fi
rm -rf "$out"
mkdir -p "$out"
touch "$out/$mark"

heading '1. A tokenizer: 1,024 pieces, learned from nine works by Shakespeare'
run python tools/train_tokenizer.py --input examples/data/shakespeare.txt --output-prefix "$out/tokenizer" --vocab-size 1024

heading '2. Token files: one document per scene'
run python tools/preprocess_data.py --input examples/data/shakespeare.txt --document-separator '\n\n\n' --append-eod \
    --tokenizer-type sentencepiece --tokenizer-model "$out/tokenizer.model" --output-prefix "$out/shakespeare"

heading '3. Training on four ranks: every matmul over 2 (tensor), the layers over 2 (pipeline)'
run torchrun --standalone --nproc-per-node 4 pretrain_gpt.py --tp 2 --pp 2 --device cpu \
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \
    --micro-batch-size 8 --global-batch-size 16 --train-iters 400 --lr 3e-3 --min-lr 3e-4 --lr-warmup-iters 50 \
    --data-path "$out/shakespeare_text_document" --split 95,5 --eval-interval 100 --eval-iters 20 \
    --tokenizer-type sentencepiece --tokenizer-model "$out/tokenizer.model" \
    --log-interval 50 --save "$out/train" "$@"

heading '4. The loss'
run python tools/plot_metrics.py "$out/train/metrics.jsonl" --output "$out/loss.png" --text

heading '5. The checkpoint of four ranks, loaded by one: it continues a text'
run python tools/generate.py --load "$out/train" --prompt $'HAMLET.\nTo be, or not to be' --max-new-tokens 200 --temperature 0.8 --device cpu

heading "Done: tokenizer, data, checkpoint and loss.png are in $out"
