"""One file per benchmark; `cgru list benchmarks` names them."""
