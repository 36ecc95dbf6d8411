#!/usr/bin/env bash
# All training parts side by side on one GPU, within a time limit: the denoiser compiles while CLIP and VAE train, the
# judges follow in two chains, the denoiser takes what time is left and anneals to the limit. Version 1 was trained in this
# order, by hand (docs/lab.md); this script has not been run on a GPU yet. Needs the parts art, icons and tokenizer in WORK.
#
#   bash tools/emoji_canvas/side_by_side.sh WORK SECONDS
set -u
work=$1
end=$(($(date +%s) + $2))
mkdir -p "$work/log"
build() { python3 -m tools.emoji_canvas --work "$work" --device cuda "$@"; }
chain() { for part in "$@"; do build "$part" > "$work/log/$part.log" 2>&1 || echo "$part failed, see $work/log/$part.log"; done; }

build --compile --until "$end" --steps 100000 denoiser > "$work/log/denoiser.log" 2>&1 &
chain vae object detector &
chain clip style hazard clip-eval &
wait
build check
