#!/usr/bin/env bash
# Trains a character-level GPT on the shipped Shakespeare text on one rank and reports its validation loss.
#
#   examples/char_gpt.sh [OUT] [SETTINGS...]     OUT: a new folder (default runs/char_gpt); settings: as for pretrain_gpt.py
#
# Needs megalite's Python on the PATH (make venv; PATH="$PWD/.venv/bin:$PATH"). OMP_NUM_THREADS: threads, 2 if not set.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out=${1:-runs/char_gpt}
[ $# -gt 0 ] && shift
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
text=examples/data/shakespeare.txt

if ! python -P -c 'import megalite' 2>/dev/null; then
    echo 'error: this python has no megalite: run "make venv", then PATH="$PWD/.venv/bin:$PATH"' >&2
    exit 2
fi

if [ -e "$out" ]; then
    echo "error: $out exists; remove it or name another folder" >&2
    exit 2
fi
mkdir -p "$out"

# Nine tenths of the text are one document to train on, the rest is another one to validate with (the text is ASCII, so bytes are characters).
cut=$(($(wc -c <"$text") * 9 / 10))
head -c "$cut" "$text" >"$out/train.txt"
tail -c "+$((cut + 1))" "$text" >"$out/valid.txt"

python tools/train_tokenizer.py --input "$text" --model-type chars --output-prefix "$out/chars"
python tools/preprocess_data.py --input "$out/train.txt" "$out/valid.txt" --output-prefix "$out/shakespeare" \
    --tokenizer-type chars --tokenizer-model "$out/chars.json" --workers 1
python pretrain_gpt.py --config examples/char_gpt.toml --data-path "$out/shakespeare_text_document" \
    --tokenizer-type chars --tokenizer-model "$out/chars.json" --save "$out" "$@"
python tools/plot_metrics.py "$out/metrics.jsonl" --output "$out/loss.png" --text
