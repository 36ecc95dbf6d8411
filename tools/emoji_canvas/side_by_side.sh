#!/usr/bin/env bash
# All training parts side by side on one GPU, within a time limit: the denoiser compiles while CLIP and VAE train, judges
# and reward networks follow in chains, the denoiser takes what time is left and anneals to the limit. Parts that are
# already in WORK are kept. Needs the parts art, icons and tokenizer in WORK.
#
#   bash tools/emoji_canvas/side_by_side.sh WORK SECONDS
set -u
work=$1
end=$(($(date +%s) + $2))
mkdir -p "$work/log"
build() { python3 -m tools.emoji_canvas --work "$work" --device cuda "$@"; }
chain() { for part in "$@"; do build "$part" > "$work/log/$part.log" 2>&1 || echo "$part failed, see $work/log/$part.log"; done; }

build --compile --until "$end" --steps 100000 denoiser > "$work/log/denoiser.log" 2>&1 &
chain clip reward-clip clip-eval &
chain vae style reward-swin &
chain object hazard detector &
wait
build check > "$work/log/check.log" 2>&1
