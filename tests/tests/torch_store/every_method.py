"""Every method of torch's TCPStore client, against the store at a port of two hosts; asserts its answers."""

import sys
import threading
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore

port, host, other_host = int(sys.argv[1]), *sys.argv[2:]


def client(host=host):
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60), wait_for_workers=False)


def times_out(act):
    try:
        act()
    except Exception as error:  # torch's classes for it differ between releases
        assert "imeout" in str(error), error
        return
    raise AssertionError("it did not time out")


store = client()
other = client(other_host)
short = timedelta(milliseconds=300)

store.set("k", "v")
assert store.get("k") == b"v"
store.set("binary", bytes(range(256)).decode("latin-1"))
store.set("empty", "")
assert other.get("empty") == b""
assert store.add("n", 5) == 5 and other.add("n", -7) == -2 and store.get("n") == b"-2"
assert store.compare_set("k", "x", "w") == b"v"
assert store.compare_set("k", "v", "w") == b"w"
assert store.compare_set("fresh", "", "first") == b"first"
assert store.compare_set("absent", "expected", "new") == b"expected"
assert store.check(["k", "n"]) and not store.check(["k", "absent"])
store.wait(["k", "n"])
times_out(lambda: store.wait(["never"], short))
assert store.get("k") == b"w", "after a wait that was given up"
assert store.num_keys() == 5, store.num_keys()
assert store.delete_key("empty") and not store.delete_key("empty")

if hasattr(store, "append"):
    store.append("log", "a")
    other.append("log", "bc")
    # Two connections: the second append is carried out once its client has an answer to something later.
    other.num_keys()
    assert store.get("log") == b"abc"
    store.multi_set(["m1", "m2"], ["1", "22"])
    assert other.multi_get(["m1", "m2"]) == [b"1", b"22"]
    assert store.has_extended_api()
if hasattr(store, "queue_push"):
    store.queue_push("q", "one")
    store.queue_push("q", "two")
    assert store.queue_len("q") == 2
    assert other.queue_pop("q") == b"one" and store.queue_pop("q", False) == b"two"
    try:
        store.queue_pop("q", False)
        raise AssertionError("a pop of nothing")
    except Exception as error:
        assert "empty" in str(error).lower() or "QueueEmpty" in type(error).__name__, error
if hasattr(store, "list_keys"):
    assert set(store.list_keys()) >= {"k", "n", "log", "m1", "m2"}, store.list_keys()
if hasattr(store, "clone"):
    assert store.clone().get("k") == b"w"
prefixed = PrefixStore("a/b", store)
prefixed.set("k", "below")
assert other.get("a/b/k") == b"below" and other.get("k") == b"w"

large = "x" * (8 * 1024 * 1024)
store.set("large", large)
assert other.get("large") == large.encode()


def both(act, release):
    """`act` in a thread of its own, with a client of its own; `release` lets it end."""
    result, mine = [], client()
    thread = threading.Thread(target=lambda: result.append(act(mine)))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive(), "it should wait"
    release()
    thread.join(60)
    assert not thread.is_alive(), "it should continue"
    return result[0]


assert both(lambda mine: mine.get("later"), lambda: store.set("later", "now")) == b"now"
assert both(lambda mine: mine.get("counted"), lambda: store.add("counted", 1)) == b"1"
both(lambda mine: mine.wait(["w1", "w2"]), lambda: [store.set("w1", ""), store.set("w2", "")])
if hasattr(store, "queue_push"):
    assert both(lambda mine: mine.queue_pop("work"), lambda: store.queue_push("work", "item")) == b"item"
if hasattr(store, "barrier"):
    both(lambda mine: mine.barrier("all", 2), lambda: store.barrier("all", 2))
    times_out(lambda: store.barrier("lonely", 2, short))

# A pair that counts its workers: both must have said so before either continues.
pair = [
    threading.Thread(target=lambda: TCPStore(host, port, 2, is_master=False, timeout=timedelta(seconds=60)))
    for _ in range(2)
]
[thread.start() for thread in pair]
[thread.join(60) for thread in pair]
assert not any(thread.is_alive() for thread in pair)
print("every method answered", flush=True)
