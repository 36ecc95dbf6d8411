"""LoRA on a denoiser: trained (`train`), read from files (`file`), fused with its layer (`fused`), merged (`merge`)."""
