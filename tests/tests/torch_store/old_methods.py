"""The methods of torch up to 2.0, whose client numbers operations otherwise and sends no greeting."""

import sys
import threading
from datetime import timedelta

from torch.distributed import TCPStore

port, host = int(sys.argv[1]), sys.argv[2]
limit = timedelta(seconds=60)
store, other = (TCPStore(host, port, 2, False, limit, False) for _ in range(2))
store.set("k", "v")
assert store.get("k") == b"v" and other.get("k") == b"v"
assert store.add("n", 5) == 5 and other.add("n", 1) == 6
assert store.compare_set("k", "v", "w") == b"w" and store.compare_set("absent", "a", "b") == b"a"
store.wait(["k", "n"])
assert store.num_keys() == 2
assert store.delete_key("n") and not store.delete_key("n")
heard = []
thread = threading.Thread(target=lambda: heard.append(other.get("later")))
thread.start()
store.set("later", "now")
thread.join(60)
assert heard == [b"now"]
print("every method answered", flush=True)
