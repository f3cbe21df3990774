#!/usr/bin/env bash
# From a model that continues texts to one that answers: a small base model, fine-tuning on conversations, the loss of the answers before
# and after, and an answer.
#
#   examples/finetune.sh [OUT] [SETTINGS...]     OUT: a new folder (default runs/finetune); settings: of the fine-tuning, as for pretrain_gpt.py
#
# The base is trained here, so that nothing has to be fetched. It is so small that it learns the answers by heart: the losses are of the
# conversations that it was trained on. With a model from elsewhere the commands read
#   python tools/convert_checkpoint.py --from hf --to megalite --input MODEL --output runs/base
#   python pretrain_gpt.py --config runs/base/config.toml --load runs/base --load-weights-only --sft-data-path chat.jsonl --seq-length 1024 ...
# and takes the chat template of the model's tokenizer.
#
# Needs megalite's Python on the PATH (make venv; PATH="$PWD/.venv/bin:$PATH"). OMP_NUM_THREADS: threads, 2 if not set.
# BASE_ITERS: steps of the base, 300 if not set.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out=${1:-runs/finetune}
[ $# -gt 0 ] && shift
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
chat=examples/data/answers.jsonl

if ! python -P -c 'import megalite' 2>/dev/null; then
    echo 'error: this python has no megalite: run "make venv", then PATH="$PWD/.venv/bin:$PATH"' >&2
    exit 2
fi
if [ -e "$out" ]; then
    echo "error: $out exists; remove it or name another folder" >&2
    exit 2
fi
mkdir -p "$out"

model=(--config examples/small.toml --seq-length 192 --eval-interval None --lr-warmup-iters 0 --log-interval 20)
python tools/preprocess_data.py --input examples/data/shakespeare.txt --tokenizer-type bytes --append-eod --output-prefix "$out/text"
python pretrain_gpt.py "${model[@]}" --data-path "$out/text_text_document" --tokenizer-type bytes --split 1 \
    --train-iters "${BASE_ITERS:-300}" --save "$out/base"
python tools/evaluate.py --load "$out/base" --chat "$chat" --device cpu
python pretrain_gpt.py "${model[@]}" --load "$out/base" --load-weights-only --sft-data-path "$chat" --tokenizer-type bytes \
    --micro-batch-size 1 --global-batch-size 2 --lr 1e-3 --train-iters 200 --save "$out/tuned" "$@"
python tools/evaluate.py --load "$out/tuned" --chat "$chat" --device cpu
python tools/generate.py --load "$out/tuned" --prompt $'user: Who deceives Othello?\nassistant:' --temperature 0 --max-new-tokens 20 --device cpu
