"""A Ray cluster of two nodes with one core each, in a process of its own.

Prints its address and the second node's id. A line on its stdin kills that node, for which a third one comes, and is
answered by "killed" as soon as the second is gone. It ends with its stdin.
"""

import os
import sys

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

from ray.cluster_utils import Cluster

NODE = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 100_000_000}


def say(text: str) -> None:
    """At once, to whoever started this."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    second = cluster.add_node(**NODE)
    say(f"cluster {cluster.address} {second.node_id}")
    if sys.stdin.readline():
        cluster.remove_node(second, allow_graceful=False)
        say("killed")
        cluster.add_node(**NODE)
        sys.stdin.read()
    cluster.shutdown()
