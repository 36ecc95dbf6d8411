"""A Ray cluster of two nodes with one core each, in a process of its own.

Prints its address and the second node's id. A line on its stdin kills that node; it ends with its stdin.
"""

import os
import sys

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

from ray.cluster_utils import Cluster

NODE = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 100_000_000}

if __name__ == "__main__":
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    second = cluster.add_node(**NODE)
    sys.stdout.write(f"cluster {cluster.address} {second.node_id}\n")
    sys.stdout.flush()
    if sys.stdin.readline():
        cluster.remove_node(second, allow_graceful=False)
        sys.stdin.read()
    cluster.shutdown()
